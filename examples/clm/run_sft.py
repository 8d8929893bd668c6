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
from common.hub import check_offline
from common.ranks import Ranks, files_first
from common.results import to_perplexity
from common.tokenizer import DEFAULT_VOCAB_SIZE, cached_tokenizer, named_tokenizer
from common.trainer import parse_arguments, quiet, ranks_of, report, train
from model import build_config, build_model, finish_config
from sft_data import encode_splits, load_instructions, prompt_of
from task import Material
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed

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
        tokenizer = named_tokenizer(args)
        if tokenizer is None:
            texts = [prompt_of(sample) + sample["output"] for sample in raw["train"]]
            tokenizer = cached_tokenizer(texts, args.vocab_size or DEFAULT_VOCAB_SIZE, Path(args.output_dir))
    with files_first(ranks, args):
        data = encode_splits(raw, tokenizer, args)
    return Material(tokenizer, data, finish_config(config, tokenizer, args))


@told_once
def main() -> None:
    """Run the program."""
    training, args = parse_arguments(TrainingArguments, DESCRIPTION, (add_data_flags, add_small_llama_flags), check_data)
    note = check_offline(args, "tokenizer_name", "dataset_name")
    quiet(training)
    ranks = ranks_of(training)
    if note:
        ranks.say(note)
    material = load_material(args, ranks)
    set_seed(training.seed)
    trainer = Trainer(
        model=build_model(material.config, material.tokenizer, args),
        args=training,
        train_dataset=material.data[0],
        eval_dataset=material.data[1],
        data_collator=default_data_collator,
        processing_class=material.tokenizer,
    )
    clock = train(trainer)
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    judged = {"perplexity": to_perplexity(metrics["eval_loss"])}
    sample = f"prompts and answers of {args.block_size} tokens"
    report(trainer, clock, title="supervised fine-tuning", sample=sample, metrics=judged, eval_seconds=metrics["eval_runtime"])


if __name__ == "__main__":
    main()
