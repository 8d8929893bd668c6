"""Train a sequence-to-sequence model with stock Accelerate: one process, DDP, or ZeRO 0-3, whatever the launcher says.

    accelerate launch --config_file examples/seq2seq/accelerate_zero2.yaml examples/seq2seq/run_seq2seq_no_trainer.py --output_dir runs/chat
    python examples/seq2seq/chat.py runs/chat

Nothing in here knows which engine runs underneath. See README.md beside this file for the commands and what to expect.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for common/, which the examples share

import torch
from accelerate import Accelerator
from arguments import parse_arguments
from common.arguments import told_once
from common.compare import compare
from common.optimizer import deepspeed_section
from common.results import wide_console
from common.run import Run, Task, build_accelerator, build_run, construction, finish, precision_of, ranks_of, train_and_report
from common.tracking import log_table
from model import build_model
from rich.table import Table
from task import Material, collator, decode, generation_options, load_material, write_chat_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

PRINTED_ROWS = 5
COLUMNS = ["prompt", "generated", "reference"]


def evaluate(run: Run, material: Material) -> dict[str, float]:
    """BLEU of what the model generates and mean loss of the targets, over all ranks (collective); keeps sample generations."""
    accelerator, args, tokenizer = run.accelerator, run.args, material.tokenizer
    losses, rows = [], []
    for index, batch in enumerate(run.eval_loader):
        loss = run.model(**batch).loss.float()
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["labels"]))))
        generated = generate(run, batch)
        padded = [
            accelerator.pad_across_processes(tensor, dim=1, pad_index=tokenizer.pad_token_id)
            for tensor in (generated, batch["labels"], batch["input_ids"])
        ]
        texts = [decode(tokenizer, tokens.cpu()) for tokens in accelerator.gather_for_metrics(tuple(padded))]
        material.metric.add_batch(predictions=texts[0], references=texts[1])
        if index < args.n_val_batch_generations:
            rows += [[prompt, answer, reference] for answer, reference, prompt in zip(*texts, strict=True)]
    keep_samples(run, rows)
    return {"bleu": material.metric.compute()["bleu"], "eval_loss": torch.cat(losses).mean().item()}


def generate(run: Run, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Generate for one batch; tokens of shape [batch, length]. At stage 3 the ranks go on together until the last has finished."""
    zero = deepspeed_section(run.accelerator, "zero_optimization") or {}
    together = int(zero.get("stage", 0)) == 3 and run.accelerator.num_processes > 1
    model = run.accelerator.unwrap_model(run.model)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model.generate(**inputs, **generation_options(run.args), synced_gpus=together)


def keep_samples(run: Run, rows: list[list[str]]) -> None:
    """Print the first sample generations and send all of them to the trackers."""
    if not rows:
        return
    if run.args.with_tracking:
        log_table(run.accelerator, "generations", COLUMNS, rows, run.progress.steps)
    if run.accelerator.is_main_process:
        table = Table(
            title=f"Sample generations at step {run.progress.steps} ({min(PRINTED_ROWS, len(rows))} of {len(rows)})", show_lines=True
        )
        for name in COLUMNS:
            table.add_column(name, overflow="fold")
        for row in rows[:PRINTED_ROWS]:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        wide_console().print(table)


def prepare(accelerator: Accelerator, args: argparse.Namespace) -> tuple[Run, Material]:
    """Load text, tokenizer, metric and model, and hand everything to Accelerate.

    Returns:
        The run at its first step, and what it was made of.
    """
    material = load_material(args, ranks_of(accelerator))
    with construction(accelerator, args):
        model = build_model(material.config, material.tokenizer, args)
    sample = f"sources of at most {args.max_source_length} tokens, targets of at most {args.max_target_length}"
    task = Task("sequence to sequence", sample, partial(evaluate, material=material), headline=("bleu", "eval_loss"))
    batches = collator(material.tokenizer, args, half=precision_of(accelerator) != "fp32")
    return build_run(accelerator, args, task, model, data=material.data, collators=(batches, batches)), material


@torch.no_grad()
def answer_from_folder(run: Run) -> None:
    """Leave what the chat has to know, load the saved folder as any user would and let it answer the first evaluation sample."""
    write_chat_file(run.args)
    folder = run.args.output_dir
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    sample = run.eval_loader.dataset[0]
    inputs = {name: torch.tensor([sample[name]]) for name in ("input_ids", "attention_mask")}
    answer = model.generate(**inputs, **generation_options(run.args))
    prompt, text = decode(tokenizer, inputs["input_ids"])[0], decode(tokenizer, answer)[0]
    print(f"\nThe model lies in {folder}. Reloaded with from_pretrained it answers\n    {prompt}\nwith\n    {text}")
    print(f"Talk with it: python examples/seq2seq/chat.py {folder}")


@told_once
def main() -> None:
    """Run the program."""
    args = parse_arguments()
    if args.compare:
        sys.exit(compare(__file__, sys.argv[1:], args))
    accelerator = build_accelerator(args, "tokenizer_name", "dataset_name")
    run, material = prepare(accelerator, args)
    train_and_report(run)
    finish(run, material.tokenizer, show=partial(answer_from_folder, run))


if __name__ == "__main__":
    main()
