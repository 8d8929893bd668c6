"""Text for the example: hub or local files when named, else the docstrings of the installed Python; tokenizer and blocks."""

from __future__ import annotations

import argparse
import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096
# Third-party code is not part of Python, and tests and demos are hardly prose: what is left is the same on every machine with this Python.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"})


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Python files of the standard library, sorted, without tests and installed packages.

    Args:
        root: Folder to look in; None is the standard library of the running interpreter.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def docstrings(source: bytes) -> Iterator[str]:
    """Docstrings of a module, its classes and functions in the order of the file; the code is parsed, never run.

    Files that this Python cannot parse (templates, other syntax) yield nothing.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text:
            yield text


def standard_library_text(root: Path | None = None) -> list[str]:
    """All docstrings of the standard library, each followed by the end-of-text token.

    Raises:
        FileNotFoundError: The interpreter comes without the sources of its library.
    """
    texts = [f"{text}\n{END_OF_TEXT}" for path in standard_library_files(root) for text in docstrings(path.read_bytes())]
    if not texts:
        where = root or sysconfig.get_paths()["stdlib"]
        raise FileNotFoundError(
            f"No docstrings found under {where}: this Python has no library sources. Give --train_file or --dataset_name."
        )
    return texts


def split_texts(texts: list[str], validation_percent: int) -> tuple[list[str], list[str]]:
    """Hold out documents spread evenly over the list, the same ones every time.

    Args:
        texts: Documents in a fixed order.
        validation_percent: Share to hold out, 1 to 99.

    Returns:
        Training and validation documents, both in the order of ``texts``.
    """
    held_out = [(index * validation_percent) // 100 != ((index + 1) * validation_percent) // 100 for index in range(len(texts))]
    train = [text for text, held in zip(texts, held_out, strict=True) if not held]
    validation = [text for text, held in zip(texts, held_out, strict=True) if held]
    return train, validation


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer, as GPT-2's, on ``texts``.

    Args:
        texts: Documents to learn the merges from.
        vocab_size: Entries including 256 bytes and the end-of-text token; small texts may give fewer.

    Raises:
        ValueError: ``vocab_size`` leaves no room for the 256 bytes and the special token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 257:
        raise ValueError(f"--vocab_size {vocab_size}: a byte-level tokenizer needs at least 257 entries (256 bytes and {END_OF_TEXT}).")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT)


def cached_tokenizer(texts: list[str], vocab_size: int, cache_dir: Path | None) -> PreTrainedTokenizerBase:
    """Train a tokenizer, or load the one trained before on the same text and size.

    Args:
        texts: Documents to learn from.
        vocab_size: Wanted number of entries.
        cache_dir: Folder of the cache; None trains anew.
    """
    from transformers import PreTrainedTokenizerFast

    if cache_dir is None:
        return train_tokenizer(texts, vocab_size)
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()[:12]
    path = cache_dir / f"tokenizer-{vocab_size}-{digest}"
    if not path.exists():
        partial = path.with_name(path.name + ".partial")
        train_tokenizer(texts, vocab_size).save_pretrained(partial)
        partial.rename(path)  # a run that is stopped midway must not leave half a tokenizer for the next one
    return PreTrainedTokenizerFast.from_pretrained(path)


def load_raw_datasets(args: argparse.Namespace) -> DatasetDict:
    """Training and validation text: from the hub, from files, or from the standard library when neither is named.

    Args:
        args: The data flags of `arguments.parse_arguments`.

    Returns:
        Splits ``train`` and ``validation``; text in the column ``text``, or in the first column.
    """
    from datasets import Dataset, DatasetDict, load_dataset

    if not args.dataset_name and not args.train_file:
        train, validation = split_texts(standard_library_text(), args.validation_split_percentage)
        return DatasetDict(train=Dataset.from_dict({"text": train}), validation=Dataset.from_dict({"text": validation}))

    options: dict[str, Any] = {}
    source: tuple[str, ...]
    if args.dataset_name:
        source = (args.dataset_name, args.dataset_config_name) if args.dataset_config_name else (args.dataset_name,)
    else:
        extension = args.train_file.rsplit(".", 1)[-1]
        source = ("text" if extension == "txt" else extension,)
        options["data_files"] = {"train": args.train_file}
        if args.validation_file:
            options["data_files"]["validation"] = args.validation_file
        if extension == "txt":
            options["keep_linebreaks"] = not args.no_keep_linebreaks
    raw = load_dataset(*source, **options)
    if "validation" not in raw:
        percent = args.validation_split_percentage
        raw["validation"] = load_dataset(*source, split=f"train[:{percent}%]", **options)
        raw["train"] = load_dataset(*source, split=f"train[{percent}%:]", **options)
    return raw


def group_into_blocks(examples: dict[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Join token lists and cut them into blocks of equal length; the rest shorter than a block is dropped.

    Args:
        examples: One list of token ids per document and column.
        block_size: Tokens per block.

    Returns:
        The same columns cut into blocks, and ``labels``, equal to ``input_ids`` (the model shifts them).
    """
    joined = {name: [token for document in column for token in document] for name, column in examples.items()}
    whole = len(joined["input_ids"]) // block_size * block_size
    blocks = {name: [tokens[start : start + block_size] for start in range(0, whole, block_size)] for name, tokens in joined.items()}
    blocks["labels"] = [list(block) for block in blocks["input_ids"]]
    return blocks


def make_blocks(raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Tokenize both splits and cut them into blocks.

    Args:
        raw: Result of `load_raw_datasets`.
        tokenizer: Any Hugging Face tokenizer.
        args: ``block_size``, ``max_*_samples`` and the cache flags.

    Returns:
        Training and validation sequences with columns ``input_ids``, ``attention_mask``, ``labels``.

    Raises:
        ValueError: A split holds less text than one block.
    """
    columns = raw["train"].column_names
    text_column = "text" if "text" in columns else columns[0]
    options = {"num_proc": args.preprocessing_num_workers, "load_from_cache_file": not args.overwrite_cache}

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch[text_column], return_token_type_ids=False)

    tokenized = raw.map(tokenize, batched=True, remove_columns=columns, desc="Tokenize", **options)
    grouped = tokenized.map(group_into_blocks, batched=True, fn_kwargs={"block_size": args.block_size}, desc="Cut into blocks", **options)
    splits = []
    for split, limit in (("train", args.max_train_samples), ("validation", args.max_eval_samples)):
        blocks = grouped[split]
        if len(blocks) == 0:
            raise ValueError(
                f"The {split} text is shorter than one block of {args.block_size} tokens: lower --block_size or give more text."
            )
        splits.append(blocks if limit is None else blocks.select(range(min(limit, len(blocks)))))
    return splits[0], splits[1]
