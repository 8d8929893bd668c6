"""Instructions and answers for supervised fine-tuning: Alpaca's format from the hub or a file, or made from the standard library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flags import FlagError
from offline import Function, first_samples, load_samples

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label that the loss leaves out
INSTRUCTION = "Say in one sentence what this Python function does."
PROMPT = "### Instruction\n{instruction}\n\n### Input\n{input}\n\n### Response\n"
PROMPT_WITHOUT_INPUT = "### Instruction\n{instruction}\n\n### Response\n"


def load_instructions(args: argparse.Namespace) -> DatasetDict:
    """Samples with the columns ``instruction``, ``input`` (may be empty) and ``output``.

    Args:
        args: The data flags of `arguments.add_data_flags`.

    Returns:
        Splits ``train`` and ``validation``.

    Raises:
        FlagError: A column is missing.
    """
    raw = load_samples(args, to_columns)
    found = raw["train"].column_names
    if not {"instruction", "output"} <= set(found):
        raise FlagError(f"The data has the columns {', '.join(found)}; needed are instruction, output, and input where there is one.")
    return raw


def to_columns(functions: Sequence[Function]) -> dict[str, list[str]]:
    """The same instruction for every function: its signature is the input, its summary the output."""
    return {
        "instruction": [INSTRUCTION] * len(functions),
        "input": [function.signature for function in functions],
        "output": [function.summary for function in functions],
    }


def prompt_of(sample: dict[str, str]) -> str:
    """Text in front of the answer."""
    template = PROMPT if sample.get("input") else PROMPT_WITHOUT_INPUT
    return template.format(instruction=sample["instruction"], input=sample.get("input", ""))


def encode(sample: dict[str, str], tokenizer: PreTrainedTokenizerBase, length: int) -> dict[str, list[int]]:
    """Tokens of prompt and answer, padded to ``length``; only the answer and its end count in the loss.

    Args:
        sample: One row of `load_instructions`.
        tokenizer: With an end-of-text token, which also pads.
        length: Tokens; what is longer is cut at the end.
    """
    prompt = tokenizer(prompt_of(sample), add_special_tokens=False)["input_ids"]
    answer = [*tokenizer(sample["output"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    tokens, labels = (prompt + answer)[:length], ([IGNORED] * len(prompt) + answer)[:length]
    padding = length - len(tokens)
    return {
        "input_ids": tokens + [tokenizer.eos_token_id] * padding,
        "attention_mask": [1] * len(tokens) + [0] * padding,
        "labels": labels + [IGNORED] * padding,
    }


def encode_splits(raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Encode both splits; samples whose prompt leaves no room for an answer are left out.

    Raises:
        FlagError: None is left.
    """
    splits = []
    for split, limit in (("train", args.max_train_samples), ("validation", args.max_eval_samples)):
        options: dict[str, Any] = {"desc": "Encode", "fn_kwargs": {"tokenizer": tokenizer, "length": args.block_size}}
        encoded = raw[split].map(encode, remove_columns=raw[split].column_names, **options)
        kept = first_samples(encoded.filter(lambda sample: any(label != IGNORED for label in sample["labels"])), limit)
        if len(kept) == 0:
            raise FlagError(f"--block_size {args.block_size} leaves no room for an answer behind any prompt of the {split} data: raise it.")
        splits.append(kept)
    return splits[0], splits[1]
