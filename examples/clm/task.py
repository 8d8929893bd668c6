"""Load text, tokenizer, blocks and configuration; the scripts of this example share these functions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data import load_raw_datasets, make_blocks, text_column
from flags import files_first, say
from model import build_config, finish_config
from offline import DECODER_TOKENS, build_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass
class Material:
    """The inputs of a run: data, tokenizer and configuration of the model."""

    tokenizer: PreTrainedTokenizerBase
    data: tuple[Dataset, Dataset]
    config: PretrainedConfig


def load_material(
    args: argparse.Namespace,
    first_rank_first: Callable[[], AbstractContextManager[Any]],
    special_tokens: Mapping[str, str] = DECODER_TOKENS,
) -> Material:
    """Load text and tokenizer, and build the configuration of the model.

    Args:
        args: The data and model flags.
        first_rank_first: Function that returns a context which the other ranks enter after the first rank has left it.
        special_tokens: Special tokens of a tokenizer that is trained here, by role.
    """
    config, note = build_config(args)
    say(note)
    with files_first(args, first_rank_first):
        raw = load_raw_datasets(args)
    tokenizer = build_tokenizer(args, lambda: raw["train"][text_column(raw)][:], special_tokens)
    with files_first(args, first_rank_first):
        data = make_blocks(raw, tokenizer, args)
    return Material(tokenizer, data, finish_config(config, tokenizer, args))
