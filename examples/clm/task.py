"""What the scripts of this example do in the same way: text, tokenizer, blocks and configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.ranks import Ranks, files_first
from common.tokenizer import DECODER_TOKENS, build_tokenizer
from data import load_raw_datasets, make_blocks, text_column
from model import build_config, finish_config

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass
class Material:
    """What a run starts from."""

    tokenizer: PreTrainedTokenizerBase
    data: tuple[Dataset, Dataset]
    config: PretrainedConfig


def load_material(args: argparse.Namespace, ranks: Ranks, special_tokens: Mapping[str, str] = DECODER_TOKENS) -> Material:
    """Load text and tokenizer and work out the configuration of the model.

    Args:
        args: The data and model flags, and ``output_dir``.
        ranks: Orders the ranks and prints.
        special_tokens: Of a tokenizer that is trained here.
    """
    config, note = build_config(args)
    if note:
        ranks.say(note)
    with files_first(ranks, args):
        raw = load_raw_datasets(args)
    with ranks.first_rank_first():
        tokenizer = build_tokenizer(args, lambda: raw["train"][text_column(raw)][:], special_tokens)
    with files_first(ranks, args):
        data = make_blocks(raw, tokenizer, args)
    return Material(tokenizer, data, finish_config(config, tokenizer, args))
