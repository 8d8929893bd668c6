"""The same task on transformers' Trainer; ``--deepspeed`` names the DeepSpeed JSON, and without it Trainer runs DDP.

torchrun --nproc_per_node 2 examples/clm/run_clm.py --deepspeed examples/clm/zero3.json --output_dir runs/clm_trainer --max_steps 320
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for common/, which the examples share

from arguments import add_data_flags, add_model_flags, check_data
from common.arguments import told_once
from common.results import to_perplexity
from common.trainer import parse_arguments, report, start, train
from model import build_model
from task import Material, load_material
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed

DESCRIPTION = (
    "Train a language model with transformers' Trainer: the flags of run_clm_no_trainer.py for data and model, Trainer's for the rest."
)


def train_language_model(training: TrainingArguments, args: argparse.Namespace, material: Material, *, title: str, sample: str) -> None:
    """Train, save and evaluate with Trainer, and print the table.

    Args:
        training: What Trainer does.
        args: The data and model flags.
        material: Tokenizer, data and configuration.
        title: What is trained.
        sample: What one sample is.
    """
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
    report(trainer, clock, title=title, sample=sample, metrics=judged, eval_seconds=metrics["eval_runtime"])


@told_once
def main() -> None:
    """Run the program."""
    training, args = parse_arguments(TrainingArguments, DESCRIPTION, (add_data_flags, add_model_flags), check_data)
    material = load_material(args, start(training, args, "tokenizer_name", "dataset_name"))
    train_language_model(training, args, material, title="causal language model", sample=f"sequences of {args.block_size} tokens")


if __name__ == "__main__":
    main()
