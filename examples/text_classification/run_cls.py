"""The same task on transformers' Trainer; ``--deepspeed`` names the DeepSpeed JSON, and without it Trainer runs DDP.

    torchrun --nproc_per_node 2 examples/text_classification/run_cls.py \
        --deepspeed examples/text_classification/zero3.json --output_dir runs/cls_trainer --num_train_epochs 3
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for common/, which the examples share

from arguments import add_data_flags, add_model_flags, check_data
from common.arguments import told_once
from common.trainer import parse_arguments, report, start, train
from model import build_model
from task import collator, load_material
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

DESCRIPTION = (
    "Train a text classifier with transformers' Trainer: the flags of run_cls_no_trainer.py for data and model, Trainer's for the rest."
)


@told_once
def main() -> None:
    """Run the program."""
    training, args = parse_arguments(TrainingArguments, DESCRIPTION, (add_data_flags, add_model_flags), check_data)
    material = load_material(args, start(training, args, "tokenizer_name", "task_name"))

    def compute_metrics(found: EvalPrediction) -> dict[str, float]:
        return material.metric.compute(predictions=found.predictions.argmax(axis=-1), references=found.label_ids)

    set_seed(training.seed)
    trainer = Trainer(
        model=build_model(material.config, args),
        args=training,
        train_dataset=material.data[0],
        eval_dataset=material.data[1],
        data_collator=collator(material.tokenizer, args, half=training.bf16 or training.fp16),
        processing_class=material.tokenizer,
        compute_metrics=compute_metrics,
    )
    clock = train(trainer)
    trainer.save_model()
    metrics = trainer.evaluate()
    judged = {name: metrics[f"eval_{name}"] for name in ("f1", "accuracy")}
    sample = f"pairs of at most {args.max_length} tokens"
    report(trainer, clock, title="text classification", sample=sample, metrics=judged, eval_seconds=metrics["eval_runtime"])


if __name__ == "__main__":
    main()
