"""Train a text classifier with stock Accelerate: one process, DDP, or ZeRO 0-3, whatever the launcher says.

    accelerate launch --config_file examples/text_classification/accelerate_zero2.yaml \
        examples/text_classification/run_cls_no_trainer.py --output_dir runs/cls

Nothing in here knows which engine runs underneath. See README.md beside this file for the commands and what to expect.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for common/, which the examples share

import torch
from accelerate import Accelerator
from arguments import parse_arguments
from common.arguments import told_once
from common.compare import compare
from common.run import Run, Task, build_accelerator, build_run, construction, finish, precision_of, ranks_of, train_and_report
from model import build_model
from task import Material, collator, load_material
from transformers import AutoModelForSequenceClassification, AutoTokenizer

SHOWN_SAMPLES = 4


def evaluate(run: Run, metric: Any) -> dict[str, float]:
    """F1, accuracy and mean loss over the evaluation samples of all ranks (collective)."""
    losses = []
    for batch in run.eval_loader:
        output = run.model(**batch)
        gathered = run.accelerator.gather_for_metrics((output.logits.argmax(dim=-1), batch["labels"]))
        metric.add_batch(predictions=gathered[0].tolist(), references=gathered[1].tolist())
        losses.append(run.accelerator.gather_for_metrics(output.loss.float().repeat(len(batch["labels"]))))
    values = metric.compute()
    return {"f1": values["f1"], "accuracy": values["accuracy"], "eval_loss": torch.cat(losses).mean().item()}


def prepare(accelerator: Accelerator, args: argparse.Namespace) -> tuple[Run, Material]:
    """Load text, tokenizer, metric and model, and hand everything to Accelerate.

    Returns:
        The run at its first step, and what it was made of.
    """
    material = load_material(args, ranks_of(accelerator))
    with construction(accelerator, args):
        model = build_model(material.config, args)
    task = Task(
        "text classification",
        f"pairs of at most {args.max_length} tokens",
        partial(evaluate, metric=material.metric),
        headline=("f1", "accuracy"),
    )
    batches = collator(material.tokenizer, args, half=precision_of(accelerator) != "fp32")
    return build_run(accelerator, args, task, model, data=material.data, collators=(batches, batches)), material


@torch.no_grad()
def show_predictions(run: Run, material: Material) -> None:
    """Load the saved folder as any user would and let it judge the first evaluation samples."""
    folder = run.args.output_dir
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()
    samples = material.raw["validation"].select(range(min(SHOWN_SAMPLES, len(material.raw["validation"]))))
    texts = [samples[name][:] for name in material.columns]
    batch = tokenizer(*texts, padding=True, truncation=True, max_length=run.args.max_length, return_tensors="pt")
    shares = model(**batch).logits.softmax(dim=-1)
    print(f"\nThe model lies in {folder}. Reloaded with from_pretrained it says of the first evaluation samples:")
    for index, share in enumerate(shares):
        found, label = int(share.argmax()), samples["label"][index]
        verdict = "right" if found == label else f"wrong, it is {model.config.id2label[label]}"
        print(
            f"    {' | '.join(column[index] for column in texts)}\n        {model.config.id2label[found]} ({share[found]:.0%}): {verdict}"
        )


@told_once
def main() -> None:
    """Run the program."""
    args = parse_arguments()
    if args.compare:
        sys.exit(compare(__file__, sys.argv[1:], args))
    accelerator = build_accelerator(args, "tokenizer_name", "task_name")
    run, material = prepare(accelerator, args)
    train_and_report(run)
    finish(run, material.tokenizer, show=partial(show_predictions, run, material))


if __name__ == "__main__":
    main()
