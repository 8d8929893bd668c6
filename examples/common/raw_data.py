"""Datasets as they come: from the hub or from files, always with the splits ``train`` and ``validation``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from common.docstrings import Function, split_items, standard_library_functions

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def load_samples(args: argparse.Namespace, to_columns: Callable[[Sequence[Function]], dict[str, list[Any]]]) -> DatasetDict:
    """From the hub, from files, or made from the functions of the standard library when neither is named.

    Args:
        args: The data flags.
        to_columns: Makes samples of functions.
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
        args: ``validation_split_percentage`` is held out where the dataset has no validation split.
        *source: Name, and configuration if there is one.
    """
    return _with_validation(args, source, {})


def load_files(args: argparse.Namespace, **options: Any) -> DatasetDict:
    """Load ``--train_file`` and ``--validation_file`` (.txt, .csv or .json).

    Args:
        args: The data flags.
        **options: For the builder of ``datasets``.
    """
    extension = args.train_file.rsplit(".", 1)[-1]
    files = {"train": args.train_file} | ({"validation": args.validation_file} if args.validation_file else {})
    return _with_validation(args, ("text" if extension == "txt" else extension,), {"data_files": files, **options})


def from_columns(train: dict[str, list[Any]], validation: dict[str, list[Any]]) -> DatasetDict:
    """Make a dataset of columns in memory."""
    from datasets import Dataset, DatasetDict

    return DatasetDict(train=Dataset.from_dict(train), validation=Dataset.from_dict(validation))


def first_samples(dataset: Dataset, limit: int | None) -> Dataset:
    """The first ``limit`` samples; all of them for None."""
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def _with_validation(args: argparse.Namespace, source: tuple[str, ...], options: dict[str, Any]) -> DatasetDict:
    from datasets import load_dataset

    raw = load_dataset(*source, **options)
    if "validation" not in raw:
        percent = args.validation_split_percentage
        raw["validation"] = load_dataset(*source, split=f"train[:{percent}%]", **options)
        raw["train"] = load_dataset(*source, split=f"train[{percent}%:]", **options)
    return raw
