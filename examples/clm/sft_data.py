"""Load instructions and answers in Alpaca's format from the hub or a file, or make them from Python's standard library."""

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
INSTRUCTION = "Say in one sentence what this Python function does."
PROMPT = "### Instruction\n{instruction}\n\n### Input\n{input}\n\n### Response\n"
PROMPT_WITHOUT_INPUT = "### Instruction\n{instruction}\n\n### Response\n"


def load_instructions(args: argparse.Namespace) -> DatasetDict:
    """Load samples with the columns ``instruction``, ``input`` (may be empty) and ``output``.

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
    """Return samples of functions: one fixed instruction, the signature as input, the summary as output."""
    return {
        "instruction": [INSTRUCTION] * len(functions),
        "input": [function.signature for function in functions],
        "output": [function.summary for function in functions],
    }


def prompt_of(sample: dict[str, str]) -> str:
    """Return the text before the answer."""
    template = PROMPT if sample.get("input") else PROMPT_WITHOUT_INPUT
    return template.format(instruction=sample["instruction"], input=sample.get("input", ""))


def encode(sample: dict[str, str], tokenizer: PreTrainedTokenizerBase, length: int) -> dict[str, list[int]]:
    """Return the tokens of prompt and answer, padded to ``length``; only the answer and its end-of-text token count in the loss.

    Args:
        sample: One row from `load_instructions`.
        tokenizer: Tokenizer with an end-of-text token, which also serves as padding.
        length: Number of tokens; longer samples are cut at the end.
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
    """Encode both splits; leave out samples whose prompt leaves no space for an answer.

    Raises:
        FlagError: No sample is left.
    """
    splits = []
    for split, limit in (("train", args.max_train_samples), ("validation", args.max_eval_samples)):
        options: dict[str, Any] = {"desc": "Encode", "fn_kwargs": {"tokenizer": tokenizer, "length": args.block_size}}
        encoded = raw[split].map(encode, remove_columns=raw[split].column_names, **options)
        kept = first_samples(encoded.filter(lambda sample: any(label != IGNORED for label in sample["labels"])), limit)
        if len(kept) == 0:
            raise FlagError(f"--block_size {args.block_size} leaves no room for an answer after any prompt of the {split} data; raise it.")
        splits.append(kept)
    return splits[0], splits[1]
