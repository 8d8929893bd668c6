"""Supervised fine-tuning with transformers' Trainer: only answers count in the loss; ZeRO, tensor parallelism or both, as the JSON says.

    torchrun --nproc_per_node 4 examples/clm/run_sft.py --deepspeed examples/clm/sft/zero1_tp.json --output_dir runs/sft \
        --per_device_train_batch_size 16 --learning_rate 1e-3 --max_steps 40

With ``"tensor_parallel": {"autotp_size": 2}`` on four ranks there are two copies of the model: the global batch is 16 x 2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for common/, which the examples share

from arguments import add_data_flags, add_model_flags, check_data
from common.arguments import told_once
from common.ranks import Ranks, files_first
from common.tokenizer import build_tokenizer
from common.trainer import parse_arguments, start
from model import build_config, finish_config
from run_clm import train_language_model
from sft_data import encode_splits, load_instructions, prompt_of
from task import Material
from transformers import TrainingArguments

DESCRIPTION = (
    "Fine-tune a language model on instructions and answers with transformers' Trainer. "
    "With neither --dataset_name nor --train_file it needs no network: it learns what functions do, from Python's docstrings."
)


def add_small_llama_flags(parser: argparse.ArgumentParser) -> None:
    """Model flags; where none is named, the model is a small Llama."""
    add_model_flags(parser, model_type="llama")


def load_material(args: argparse.Namespace, ranks: Ranks) -> Material:
    """Load instructions and tokenizer and work out the configuration of the model."""
    config, note = build_config(args)
    if note:
        ranks.say(note)
    with files_first(ranks, args):
        raw = load_instructions(args)
    with ranks.first_rank_first():
        tokenizer = build_tokenizer(args, lambda: [prompt_of(sample) + sample["output"] for sample in raw["train"]])
    with files_first(ranks, args):
        data = encode_splits(raw, tokenizer, args)
    return Material(tokenizer, data, finish_config(config, tokenizer, args))


@told_once
def main() -> None:
    """Run the program."""
    training, args = parse_arguments(TrainingArguments, DESCRIPTION, (add_data_flags, add_small_llama_flags), check_data)
    material = load_material(args, start(training, args, "tokenizer_name", "dataset_name"))
    train_language_model(
        training, args, material, title="supervised fine-tuning", sample=f"prompts and answers of {args.block_size} tokens"
    )


if __name__ == "__main__":
    main()
