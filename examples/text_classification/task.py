"""Load tokenizer, samples, model and metric; both scripts of this example share these functions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import evaluate
from data import label_names, load_raw_datasets, text_columns, tokenize_pairs
from flags import files_first, say
from model import build_config
from offline import ENCODER_TOKENS, build_tokenizer, is_reachable
from transformers import DataCollatorWithPadding, default_data_collator

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

METRIC_MODULE = Path(__file__).with_name("f1_accuracy.py")


@dataclass
class Material:
    """The inputs of a run: data, tokenizer and configuration of the model."""

    raw: DatasetDict
    columns: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase
    data: tuple[Dataset, Dataset]
    config: PretrainedConfig
    metric: Any


def load_material(args: argparse.Namespace, first_rank_first: Callable[[], AbstractContextManager[Any]]) -> Material:
    """Load text, tokenizer and metric, and build the configuration of the model.

    Args:
        args: The data and model flags.
        first_rank_first: Function that returns a context which the other ranks enter after the first rank has left it.
    """
    with files_first(args, first_rank_first):
        raw = load_raw_datasets(args)
    columns = text_columns(raw, args)
    with first_rank_first():
        metric = load_metric(args)
        tokenizer = build_tokenizer(args, lambda: [text for name in columns for text in raw["train"][name][:]], ENCODER_TOKENS)
    with files_first(args, first_rank_first):
        data = tokenize_pairs(raw, tokenizer, args)
    config, note = build_config(args, tokenizer, label_names(raw))
    say(note)
    return Material(raw, columns, tokenizer, data, config, metric)


def load_metric(args: argparse.Namespace) -> Any:
    """Return GLUE's metric from the hub for a GLUE task, else the metric f1_accuracy.py in this folder."""
    if args.task_name in ("mrpc", "qqp") and not args.offline and is_reachable():
        try:
            return evaluate.load("glue", args.task_name, keep_in_memory=True)
        except (ImportError, OSError):  # GLUE's metric needs scikit-learn, f1_accuracy.py does not
            pass
    return evaluate.load(str(METRIC_MODULE), keep_in_memory=True)


def collator(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace, *, half: bool) -> Any:
    """Return a collator; with ``half``, the length of its batches is a multiple of 8, for tensor cores."""
    if args.pad_to_max_length:
        return default_data_collator
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if half else None)
