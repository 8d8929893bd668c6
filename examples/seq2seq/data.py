"""Load pairs of source and target: conversations from the hub or files, or signatures and docstrings of Python's functions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flags import FlagError
from offline import Function, first_samples, load_samples

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of tokens that the loss ignores


def load_raw_datasets(args: argparse.Namespace) -> DatasetDict:
    """Load training and validation samples from the hub or from files; without either flag, from Python's standard library.

    Args:
        args: The data flags of `arguments.parse_arguments`.

    Returns:
        Splits ``train`` and ``validation`` with at most ``n_train`` and ``n_val`` samples.
    """
    raw = load_samples(args, to_columns)
    raw["train"], raw["validation"] = first_samples(raw["train"], args.n_train), first_samples(raw["validation"], args.n_val)
    return raw


def to_columns(functions: Sequence[Function]) -> dict[str, list[str]]:
    """Return the signatures of functions as ``source`` and the first sentences of their docstrings as ``target``."""
    return {"source": [function.signature for function in functions], "target": [function.summary for function in functions]}


def text_columns(raw: DatasetDict, args: argparse.Namespace) -> tuple[str, str]:
    """Return the names of the columns of sources and targets.

    Raises:
        FlagError: A named column does not exist, or there are fewer than two columns.
    """
    found = raw["train"].column_names
    for flag in ("text_column", "summary_column"):
        name = getattr(args, flag)
        if name and name not in found:
            raise FlagError(f"--{flag} {name}: the data has the columns {', '.join(found)}.")
    if len(found) < 2:
        raise FlagError(f"The data has the columns {', '.join(found)}, but needs one with sources and one with targets.")
    return args.text_column or found[0], args.summary_column or found[1]


def tokenize_samples(raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Tokenize both splits.

    Args:
        raw: Result of `load_raw_datasets`.
        tokenizer: Any Hugging Face tokenizer.
        args: The data flags; evaluation targets are cut at ``val_max_target_length``.

    Returns:
        Training and validation samples with ``input_ids``, ``attention_mask`` and ``labels``.
    """
    source_column, target_column = text_columns(raw, args)
    padding = "max_length" if args.pad_to_max_length else False

    def tokenize(batch: dict[str, list[str]], target_length: int) -> Any:
        sources = [args.source_prefix + text for text in batch[source_column]]
        options = {"padding": padding, "truncation": True, "return_token_type_ids": False}  # nosec B105
        encoded = tokenizer(sources, max_length=args.max_source_length, **options)
        labels = tokenizer(text_target=batch[target_column], max_length=target_length, **options)["input_ids"]
        if padding and args.ignore_pad_token_for_loss:
            pad = tokenizer.pad_token_id
            labels = [[IGNORED if token == pad else token for token in line] for line in labels]
        encoded["labels"] = labels
        return encoded

    lengths = {"train": args.max_target_length, "validation": args.val_max_target_length}
    train, validation = (
        raw[split].map(
            tokenize,
            batched=True,
            remove_columns=raw[split].column_names,
            fn_kwargs={"target_length": length},
            desc="Tokenize",
        )
        for split, length in lengths.items()
    )
    return train, validation
