"""Load tokenizer, samples, configuration and metric, and write the chat's settings; both scripts of this example share these functions."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import evaluate
import torch
from accelerate import Accelerator
from data import IGNORED, load_raw_datasets, text_columns, tokenize_samples
from flags import files_first, say
from model import build_config
from offline import SEQ2SEQ_TOKENS, build_tokenizer
from transformers import DataCollatorForSeq2Seq

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

METRIC_MODULE = Path(__file__).with_name("bleu.py")
CHAT_FILE = "chat.json"
NO_REPEAT_NGRAM = 3
PRINTED_ROWS, COLUMNS = 5, ["prompt", "generated", "reference"]


@dataclass
class Material:
    """The inputs of a run: data, tokenizer and configuration of the model."""

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
        metric = evaluate.load(str(METRIC_MODULE), keep_in_memory=True)
        tokenizer = build_tokenizer(
            args, lambda: [args.source_prefix, *(text for name in columns for text in raw["train"][name][:])], SEQ2SEQ_TOKENS
        )
    with files_first(args, first_rank_first):
        data = tokenize_samples(raw, tokenizer, args)
    config, note = build_config(args, tokenizer)
    say(note)
    return Material(tokenizer, data, config, metric)


def collator(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace, *, half: bool) -> DataCollatorForSeq2Seq:
    """Return a collator; with ``half``, the length of its batches is a multiple of 8, for tensor cores."""
    label_pad = IGNORED if args.ignore_pad_token_for_loss else tokenizer.pad_token_id
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=label_pad, pad_to_multiple_of=8 if half else None)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of ``generate`` for the flags; no sequence of three tokens may repeat within a text."""
    return {
        "max_length": args.val_max_target_length,
        "min_length": args.val_min_target_length,
        "num_beams": args.num_beams,
        "do_sample": False,
        "no_repeat_ngram_size": NO_REPEAT_NGRAM,
    }


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[Any]) -> list[str]:
    """Return the texts of rows of tokens, without padding and ignored labels."""
    rows = [torch.as_tensor(row) for row in tokens]
    return [text.strip() for text in tokenizer.batch_decode([row[row != IGNORED] for row in rows], skip_special_tokens=True)]


def write_chat_file(args: argparse.Namespace) -> None:
    """Write the settings of the training that `chat.py` needs to the model's folder."""
    options = {"source_prefix": args.source_prefix, "max_source_length": args.max_source_length}
    record = options | {"generation": generation_options(args)}
    Path(args.output_dir, CHAT_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def keep_samples(args: argparse.Namespace, accelerator: Accelerator, rows: list[tuple[str, ...]]) -> None:
    """Print the first generated samples, and write all of them to generations.csv and to trackers that support tables."""
    for prompt, generated, reference in rows[:PRINTED_ROWS]:
        say(f"  prompt     {prompt}\n  generated  {generated}\n  reference  {reference}\n")
    if args.output_dir and accelerator.is_main_process:
        with Path(args.output_dir, "generations.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    for tracker in accelerator.trackers:
        if rows and hasattr(tracker, "log_table"):
            tracker.log_table("generations", columns=COLUMNS, data=[list(row) for row in rows])
