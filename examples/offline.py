"""Replace the hub on a machine without network: text from the installed Python's docstrings, trained tokenizers, published model shapes.

The three experiments share this file; each of their folders has a link to it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import socket
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlparse

from flags import FlagError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Third-party code is not part of Python, and tests and demos contain little prose. The rest is equal on every machine with this Python.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"})
SENTENCE_END = re.compile(r"(?<=[.!?])\s")

Item = TypeVar("Item")

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096
# Special tokens by role, for each kind of model, in the order of their ids. They are not passwords (B105).
DECODER_TOKENS = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
ENCODER_TOKENS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "mask_token": "[MASK]"}  # nosec B105
SEQ2SEQ_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # nosec B105

# Published shapes; other values are the defaults of the model type's configuration class.
_BLENDERBOT_400M = {
    "model_type": "blenderbot",
    "vocab_size": 8008,
    "d_model": 1280,
    "encoder_layers": 2,
    "decoder_layers": 12,
    "encoder_attention_heads": 32,
    "decoder_attention_heads": 32,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_position_embeddings": 128,
    "scale_embedding": True,
}
_DEBERTA_V2 = {
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "max_relative_positions": -1,
    "type_vocab_size": 0,
}
GLUE = "nyu-mll/glue"  # dataset of --task_name
KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25},
    "bert-base-uncased": {"model_type": "bert"},
    "bert-large-uncased": {
        "model_type": "bert",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "microsoft/deberta-v2-xlarge-mnli": _DEBERTA_V2
    | {
        "num_hidden_layers": 24,
        "hidden_size": 1536,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "attention_head_size": 64,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
    "facebook/blenderbot-400M-distill": _BLENDERBOT_400M,
}


@dataclass(frozen=True)
class Function:
    """A documented function: its signature on one line, and the first sentence of its docstring."""

    signature: str
    summary: str


@dataclass(frozen=True)
class Documentation:
    """The docstrings of some files."""

    texts: list[str] = field(default_factory=list)  # whole docstrings
    functions: list[Function] = field(default_factory=list)  # without special methods (``__eq__``)
    descriptions: list[str] = field(default_factory=list)  # first sentences of docstrings of modules and classes


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Return the Python files of the standard library, sorted, without tests and installed packages.

    Args:
        root: Folder to search; None is the standard library of the running interpreter.
    """
    root = library_root() if root is None else root
    files = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def library_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def parse(source: bytes) -> Documentation:
    """Return the docstrings of a module, its classes and functions in the order of the file; parse the code without running it.

    The result is empty for files that this Python cannot parse (templates, other syntax).
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return Documentation()
    found = Documentation()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if not text:
            continue
        found.texts.append(text)
        sentence = first_sentence(text)
        if sentence and isinstance(node, (ast.Module, ast.ClassDef)):
            found.descriptions.append(sentence)
        elif sentence and not (node.name.startswith("__") and node.name.endswith("__")):
            found.functions.append(Function(f"def {node.name}({ast.unparse(node.args)})", sentence))
    return found


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring on one line; "" if its first paragraph has fewer than two words."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = SENTENCE_END.split(paragraph)[0]
    return sentence if len(sentence.split()) > 1 else ""


@functools.lru_cache(maxsize=1)
def standard_library(root: Path) -> Documentation:
    """Return all docstrings of the library under ``root``; files are parsed once per process.

    Raises:
        FlagError: The interpreter does not have the sources of its library.
    """
    found = Documentation()
    for path in standard_library_files(root):
        part = parse(path.read_bytes())
        found.texts.extend(part.texts)
        found.functions.extend(part.functions)
        found.descriptions.extend(part.descriptions)
    if not found.functions:
        raise FlagError(
            f"No docstrings found under {root}: this Python has no library sources. Give --train_file, or the name of a dataset on the hub."
        )
    return found


def standard_library_text(root: Path | None = None, end_of_text: str = "") -> list[str]:
    """Return all docstrings of the standard library, each followed by ``end_of_text``."""
    return [f"{text}\n{end_of_text}" for text in standard_library(root or library_root()).texts]


def standard_library_functions(root: Path | None = None) -> list[Function]:
    """Return the documented functions of the standard library without special methods and repetitions."""
    return list(dict.fromkeys(standard_library(root or library_root()).functions))


def standard_library_descriptions(root: Path | None = None) -> list[str]:
    """Return the first sentences of all docstrings of modules and classes in the standard library, without repetitions."""
    return list(dict.fromkeys(standard_library(root or library_root()).descriptions))


def split_items(items: Sequence[Item], held_out_percent: int) -> tuple[list[Item], list[Item]]:
    """Divide items into a training and a held-out part; the held-out items are evenly spaced and always the same.

    Args:
        items: Documents in a fixed order.
        held_out_percent: Percentage to hold out, 1 to 99.

    Returns:
        Items to train on and items held out, both in the order of ``items``.
    """
    held_out = [(index * held_out_percent) // 100 != ((index + 1) * held_out_percent) // 100 for index in range(len(items))]
    train = [item for item, held in zip(items, held_out, strict=True) if not held]
    return train, [item for item, held in zip(items, held_out, strict=True) if held]


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Mapping[str, str] = DECODER_TOKENS) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer on ``texts``.

    Args:
        texts: Documents from which merges are learnt.
        vocab_size: Number of entries, including 256 bytes and the special tokens; short texts may result in fewer.
        special_tokens: Special tokens by role. With ``cls_token`` and ``sep_token`` a text becomes ``[CLS] a [SEP] b [SEP]``;
            with ``bos_token`` and another ``eos_token`` it ends with the latter; otherwise no token is added.

    Raises:
        FlagError: ``vocab_size`` is too small for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = list(dict.fromkeys(special_tokens.values()))
    needed = 256 + len(specials)
    if vocab_size < needed:
        raise FlagError(
            f"--vocab_size {vocab_size}: a byte-level tokenizer needs at least {needed} entries (256 bytes and {', '.join(specials)})."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    template = _template(special_tokens, specials)
    if template is not None:
        tokenizer.post_processor = template
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special_tokens)


def _template(special_tokens: Mapping[str, str], specials: list[str]) -> object | None:
    """Return a post-processor that adds special tokens around a text or a pair of texts; None if no tokens are added."""
    from tokenizers import processors

    ids = [(token, index) for index, token in enumerate(specials)]
    if "cls_token" in special_tokens:
        start, end = special_tokens["cls_token"], special_tokens["sep_token"]
        return processors.TemplateProcessing(single=f"{start} $A {end}", pair=f"{start} $A {end} $B:1 {end}:1", special_tokens=ids)
    end = special_tokens["eos_token"]
    if end == special_tokens["bos_token"]:
        return None
    return processors.TemplateProcessing(single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=ids)


def build_tokenizer(
    args: argparse.Namespace, texts: Callable[[], list[str]], special_tokens: Mapping[str, str] = DECODER_TOKENS
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the flags name, or train one on the text; it is equal on every rank.

    Args:
        args: The model flags.
        texts: Function that returns the documents to train on.
        special_tokens: See `train_tokenizer`.
    """
    tokenizer = named_tokenizer(args)
    if tokenizer is not None:
        return tokenizer
    return train_tokenizer(texts(), args.vocab_size or DEFAULT_VOCAB_SIZE, special_tokens)


def named_tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that the flags name, or return None if one must be trained.

    Raises:
        FlagError: The named tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    name = args.tokenizer_name or args.model_name_or_path
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name)
    except OSError as error:
        flag = "--tokenizer_name" if args.tokenizer_name else "--model_name_or_path"
        advice = "Give a local folder with a tokenizer, or leave the flag out to train a tokenizer on the text."
        raise FlagError(f"{flag} {name}: {error}\n{advice}") from error


def is_reachable(timeout_s: float = 3.0) -> bool:
    """Return whether the hub responds within ``timeout_s`` seconds; the hub's own client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = urlparse(constants.ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def known_config(name: str) -> PretrainedConfig:
    """Return the configuration of a model in ``KNOWN_SHAPES`` without network access."""
    from transformers import CONFIG_MAPPING

    shape = dict(KNOWN_SHAPES[name])
    return CONFIG_MAPPING[shape.pop("model_type")](**shape)


def named_config(name: str) -> tuple[PretrainedConfig, str]:
    """Load a configuration by path or hub name; those of ``KNOWN_SHAPES`` also without network.

    Args:
        name: A folder, a hub name, or a key of ``KNOWN_SHAPES``.

    Returns:
        The configuration, and one line for the user: why the built-in shape is used, or "".

    Raises:
        FlagError: The name is not built in and cannot be loaded.
    """
    from transformers import AutoConfig

    if name in KNOWN_SHAPES and not Path(name).is_dir():
        try:
            return AutoConfig.from_pretrained(name, local_files_only=True), ""
        except OSError:
            if not is_reachable():
                shape = ", ".join(f"{key}={value}" for key, value in KNOWN_SHAPES[name].items())
                return known_config(name), f"{name}: the hub is out of reach, using its published shape ({shape})."
    try:
        return AutoConfig.from_pretrained(name), ""
    except OSError as error:
        known = ", ".join(KNOWN_SHAPES)
        raise FlagError(f"No configuration {name}: {error}\nGive a local folder, or one that is built in: {known}.") from error


def check_offline(args: Any, *names: str) -> str:
    """Check before loading whether the flags need the hub; raise an error at once, or replace unavailable models and data.

    Args:
        args: Parsed flags. With ``offline`` the flags of ``names`` and ``model_name_or_path`` are set to None; the model's shape
            stays as ``config_name`` if it is built in.
        *names: Flags, besides the model, that name something on the hub: a dataset, a tokenizer.

    Returns:
        One line for the user that lists the replacements; "" if there are none.

    Raises:
        FlagError: A named item is neither local nor in the cache, the hub does not respond, and ``--offline`` is not set.
    """
    wanted = {name: getattr(args, name) for name in ("model_name_or_path", *names)}
    remote = {name: value for name, value in wanted.items() if value and not Path(value).exists()}
    if not remote:
        return ""
    listed = ", ".join(f"--{name} {value}" for name, value in remote.items())
    if not args.offline:
        if is_reachable() or all(_is_cached(name, value) for name, value in remote.items()):
            return ""
        raise FlagError(
            f"The hub is out of reach, and {listed} can be had nowhere else. Give local folders and files instead, or add --offline: "
            "random weights of the model's published shape and a task made from Python's own docstrings then stand in for them."
        )
    model = remote.get("model_name_or_path")
    if model in KNOWN_SHAPES:
        args.config_name = args.config_name or model
    for name in remote:
        setattr(args, name, None)
    shape = f"random weights of the shape of {args.config_name}" if model and args.config_name else "a small model with random weights"
    return f"--offline: in place of {listed}: {shape if model else 'the model as named'}, data and tokenizer from Python's own docstrings."


def _is_cached(flag: str, name: str) -> bool:
    """Return whether this machine's caches have the model or dataset."""
    from huggingface_hub import try_to_load_from_cache

    if flag not in ("dataset_name", "task_name"):
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    from datasets import config

    name = GLUE if flag == "task_name" else name
    return Path(config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir()


def load_samples(args: argparse.Namespace, to_columns: Callable[[Sequence[Function]], dict[str, list[Any]]]) -> DatasetDict:
    """Load samples from the hub or from files; without either flag, make them from the functions of the standard library.

    Args:
        args: The data flags.
        to_columns: Function that makes columns of samples from documented functions.
    """
    if args.dataset_name:
        return load_hub_dataset(args, *filter(None, (args.dataset_name, args.dataset_config_name)))
    if args.train_file:
        return load_files(args)
    train, validation = split_items(standard_library_functions(), args.validation_split_percentage)
    return from_columns(to_columns(train), to_columns(validation))


def load_hub_dataset(args: argparse.Namespace, *source: str) -> DatasetDict:
    """Load a dataset from the hub or its cache.

    Args:
        args: The data flags; ``validation_split_percentage`` is held out if the dataset has no validation split.
        *source: Name of the dataset, and of its configuration if it has one.
    """
    return _with_validation(args, source, {})


def load_files(args: argparse.Namespace, **options: Any) -> DatasetDict:
    """Load ``--train_file`` and ``--validation_file`` (.txt, .csv or .json).

    Args:
        args: The data flags.
        **options: Options of the file builder of ``datasets``.
    """
    extension = args.train_file.rsplit(".", 1)[-1]
    files = {"train": args.train_file} | ({"validation": args.validation_file} if args.validation_file else {})
    return _with_validation(args, ("text" if extension == "txt" else extension,), {"data_files": files, **options})


def from_columns(train: dict[str, list[Any]], validation: dict[str, list[Any]]) -> DatasetDict:
    """Return a dataset made from columns in memory."""
    from datasets import Dataset, DatasetDict

    return DatasetDict(train=Dataset.from_dict(train), validation=Dataset.from_dict(validation))


def first_samples(dataset: Dataset, limit: int | None) -> Dataset:
    """Return the first ``limit`` samples, or all if ``limit`` is None."""
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def _with_validation(args: argparse.Namespace, source: tuple[str, ...], options: dict[str, Any]) -> DatasetDict:
    from datasets import load_dataset

    raw = load_dataset(*source, **options)
    if "validation" not in raw:
        percent = args.validation_split_percentage
        raw["validation"] = load_dataset(*source, split=f"train[:{percent}%]", **options)
        raw["train"] = load_dataset(*source, split=f"train[{percent}%:]", **options)
    return raw
