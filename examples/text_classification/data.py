"""Load pairs of sentences with labels: from a GLUE task, from files, or from the functions of Python's standard library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flags import FlagError
from offline import (
    GLUE,
    Function,
    first_samples,
    from_columns,
    load_files,
    load_hub_dataset,
    split_items,
    standard_library_descriptions,
    standard_library_functions,
)

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerBase

# Text columns of the GLUE tasks with two classes.
GLUE_COLUMNS: dict[str, tuple[str, ...]] = {
    "cola": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
    "wnli": ("sentence1", "sentence2"),
}
LABELS = ("not_equivalent", "equivalent")
# Take another function's summary from a distant part of the library, because functions of one module often have similar summaries.
DISTANCE = 2 / 3


def load_raw_datasets(args: argparse.Namespace) -> DatasetDict:
    """Load training and validation pairs from a GLUE task or from files; without either flag, make them from Python's standard library.

    Args:
        args: The data flags of `arguments.parse_arguments`.

    Returns:
        Splits ``train`` and ``validation`` with the text columns and an integer ``label``.
    """
    if args.task_name:
        return load_hub_dataset(args, GLUE, args.task_name)
    if args.train_file:
        return load_files(args)
    percent = args.validation_split_percentage
    functions, descriptions = (split_items(items, percent) for items in (standard_library_functions(), standard_library_descriptions()))
    train, validation = (function_pairs(*items) for items in zip(functions, descriptions, strict=True))
    return from_columns(train, validation)


def function_pairs(functions: Sequence[Function], descriptions: Sequence[str]) -> dict[str, list[Any]]:
    """Pair each function once with its own summary and once with another sentence; the task is to tell the two apart.

    Half of the other sentences are about classes or modules, which a small model soon distinguishes from summaries of functions. The rest
    are summaries of other functions, so that the model must compare signature and summary.

    Args:
        functions: At least three functions, in a fixed order.
        descriptions: Sentences about classes and modules; they are repeated if there are too few.

    Returns:
        The columns of MRPC: ``sentence1`` (the signature), ``sentence2`` (a sentence), ``label`` (1 for the function's own summary)
        and ``idx``.
    """
    shift = max(1, int(len(functions) * DISTANCE))
    columns: dict[str, list[Any]] = {"sentence1": [], "sentence2": [], "label": [], "idx": []}
    for index, function in enumerate(functions):
        other = functions[(index + shift) % len(functions)].summary
        stranger = other if index % 2 else descriptions[index // 2 % len(descriptions)]
        for sentence in (function.summary, stranger):
            columns["sentence1"].append(function.signature)
            columns["sentence2"].append(sentence)
            columns["label"].append(int(sentence == function.summary))
            columns["idx"].append(len(columns["idx"]))
    return columns


def text_columns(raw: DatasetDict, args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the columns that hold the sentences.

    Raises:
        FlagError: A file lacks the columns of the sentences or of the label.
    """
    if args.task_name:
        return GLUE_COLUMNS[args.task_name]
    found = raw["train"].column_names
    columns = tuple(name for name in ("sentence1", "sentence2", "sentence", "text") if name in found)[:2]
    if not columns or "label" not in found:
        raise FlagError(
            f"--train_file {args.train_file}: has the columns {', '.join(found)}; needed are sentence1 (and sentence2 for pairs) and label."
        )
    return columns


def label_names(raw: DatasetDict) -> list[str]:
    """Return the names of the classes in the order of their ids."""
    feature = raw["train"].features["label"]
    if hasattr(feature, "names"):
        return list(feature.names)
    found = set(raw["train"].unique("label")) | set(raw["validation"].unique("label"))
    if found <= {0, 1}:
        return list(LABELS)
    raise FlagError(f"The column label holds {sorted(found, key=str)[:5]}: this example learns two classes, given as 0 and 1.")


def tokenize_pairs(raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Tokenize both splits.

    Args:
        raw: Result of `load_raw_datasets`.
        tokenizer: Any Hugging Face tokenizer.
        args: ``max_length``, ``pad_to_max_length``, ``max_*_samples``.

    Returns:
        Training and validation samples with ``input_ids``, ``attention_mask``, ``labels``, and ``token_type_ids`` if the tokenizer
        makes them.
    """
    columns = text_columns(raw, args)
    padding = "max_length" if args.pad_to_max_length else False

    def tokenize(batch: dict[str, list[Any]]) -> Any:
        encoded = tokenizer(*(batch[name] for name in columns), padding=padding, max_length=args.max_length, truncation=True)
        encoded["labels"] = batch["label"]
        return encoded

    splits = []
    for split, limit in (("train", args.max_train_samples), ("validation", args.max_eval_samples)):
        samples = first_samples(raw[split], limit)
        splits.append(
            samples.map(
                tokenize,
                batched=True,
                remove_columns=samples.column_names,
                desc="Tokenize",
            )
        )
    return splits[0], splits[1]
