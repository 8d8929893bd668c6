"""What both scripts of this example do in the same way: tokenizer, samples, configuration, metric, and what the chat has to know."""

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
    """What a run starts from."""

    tokenizer: PreTrainedTokenizerBase
    data: tuple[Dataset, Dataset]
    config: PretrainedConfig
    metric: Any


def load_material(args: argparse.Namespace, first_rank_first: Callable[[], AbstractContextManager[Any]]) -> Material:
    """Load text, tokenizer and metric and work out the configuration of the model.

    Args:
        args: The data and model flags.
        first_rank_first: Context that the other ranks enter when the first has left it.
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
    """Makes batches; in 16 bit their length is a multiple of 8, which tensor cores want."""
    label_pad = IGNORED if args.ignore_pad_token_for_loss else tokenizer.pad_token_id
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=label_pad, pad_to_multiple_of=8 if half else None)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``generate`` that the flags ask for; nothing is said twice within a line."""
    return {
        "max_length": args.val_max_target_length,
        "min_length": args.val_min_target_length,
        "num_beams": args.num_beams,
        "do_sample": False,
        "no_repeat_ngram_size": NO_REPEAT_NGRAM,
    }


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[Any]) -> list[str]:
    """Texts of rows of tokens, padding and ignored labels left out."""
    rows = [torch.as_tensor(row) for row in tokens]
    return [text.strip() for text in tokenizer.batch_decode([row[row != IGNORED] for row in rows], skip_special_tokens=True)]


def write_chat_file(args: argparse.Namespace) -> None:
    """Leave beside the model what `chat.py` has to know of the training."""
    options = {"source_prefix": args.source_prefix, "max_source_length": args.max_source_length}
    record = options | {"generation": generation_options(args)}
    Path(args.output_dir, CHAT_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def keep_samples(args: argparse.Namespace, accelerator: Accelerator, rows: list[tuple[str, ...]]) -> None:
    """Print the first sample generations; all of them go into generations.csv and to the trackers that show tables."""
    for prompt, generated, reference in rows[:PRINTED_ROWS]:
        say(f"  prompt     {prompt}\n  generated  {generated}\n  reference  {reference}\n")
    if args.output_dir and accelerator.is_main_process:
        with Path(args.output_dir, "generations.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    for tracker in accelerator.trackers:
        if rows and hasattr(tracker, "log_table"):
            tracker.log_table("generations", columns=COLUMNS, data=[list(row) for row in rows])
