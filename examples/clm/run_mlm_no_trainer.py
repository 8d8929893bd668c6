"""Train a masked language model (BERT) with stock Accelerate, under a launcher file or with a DeepSpeed JSON of its own.

    torchrun --nproc_per_node 2 examples/clm/run_mlm_no_trainer.py \
        --deepspeed_config examples/clm/bert/onebit_toy.json --output_dir runs/bert --max_train_steps 300

The JSON files in bert/ are those of the 1-bit Adam experiments. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for common/, which the examples share

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from arguments import parse_mlm_arguments
from common.arguments import FlagError, told_once
from common.compare import compare
from common.results import to_perplexity
from common.run import Run, Task, build_accelerator, build_run, construction, finish, ranks_of, train_and_report
from common.tokenizer import ENCODER_TOKENS
from data import mask_blocks
from model import build_model
from task import load_material
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase, default_data_collator

PROMPT = "Return the {mask} of the list."
SHOWN_WORDS = 5


def read_deepspeed_config(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The JSON of ``--deepspeed_config`` with what Accelerate asks for and DeepSpeed's own scripts leave to its defaults.

    Args:
        args: The batch size that the file names replaces that of the flags.
        ranks: Data-parallel ranks.

    Raises:
        FlagError: The file cannot be read, or its batch sizes do not fit the number of ranks.
    """
    path = args.deepspeed_config
    try:
        config: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise FlagError(f"--deepspeed_config {path}: {error}") from error
    micro = config.get("train_micro_batch_size_per_gpu", "auto")
    if isinstance(micro, int):
        args.per_device_train_batch_size = micro
    micro, total = args.per_device_train_batch_size, config.get("train_batch_size", "auto")
    if isinstance(total, int) and not isinstance(config.get("gradient_accumulation_steps"), int):
        if total % (micro * ranks):
            raise FlagError(f"--deepspeed_config {path}: train_batch_size {total} is no multiple of {micro} per rank x {ranks} ranks.")
        config["gradient_accumulation_steps"] = total // (micro * ranks)
    config.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)
    config.setdefault("zero_optimization", {"stage": 0})
    if args.freeze_step:
        config.setdefault("optimizer", {}).setdefault("params", {})["freeze_step"] = args.freeze_step
    return config


def launched_ranks() -> int:
    """Processes that torchrun, Open MPI, MPICH or Slurm started."""
    names = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "1"))


def evaluate(run: Run) -> dict[str, float]:
    """Mean loss in nats per hidden token over the evaluation sequences of all ranks, and the perplexity (collective)."""
    losses, counts = [], []
    for batch in run.eval_loader:
        hidden = (batch["labels"] != -100).sum(dim=1)
        logits = run.model(**batch).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").sum(dim=1)
        gathered = run.accelerator.gather_for_metrics((loss, hidden))
        losses.append(gathered[0])
        counts.append(gathered[1])
    loss = (torch.cat(losses).sum() / torch.cat(counts).sum().clamp(min=1)).item()
    return {"perplexity": to_perplexity(loss), "eval_loss": loss}


def prepare(accelerator: Accelerator, args: argparse.Namespace) -> tuple[Run, PreTrainedTokenizerBase]:
    """Load text, tokenizer and model, and hand everything to Accelerate.

    Returns:
        The run at its first step, and the tokenizer.
    """
    material = load_material(args, ranks_of(accelerator), ENCODER_TOKENS)
    data = [mask_blocks(blocks, material.tokenizer, args.mlm_probability, args.seed) for blocks in material.data]
    with construction(accelerator, args):
        model = build_model(material.config, material.tokenizer, args, masked=True)
    task = Task("masked language model", f"sequences of {args.block_size} tokens", evaluate, headline=("perplexity",))
    collators = (default_data_collator, default_data_collator)
    return build_run(accelerator, args, task, model, data=(data[0], data[1]), collators=collators), material.tokenizer


@torch.no_grad()
def fill_in(folder: str) -> None:
    """Load the saved folder as any user would and let it fill in a word."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()
    text = PROMPT.format(mask=tokenizer.mask_token)
    tokens = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    place = tokens["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    shares, words = model(**tokens).logits[0, place].softmax(dim=-1).topk(SHOWN_WORDS)
    found = ", ".join(f"{tokenizer.decode(word).strip()!r} {share:.0%}" for share, word in zip(shares, words, strict=True))
    print(f"\nThe model lies in {folder}. Reloaded with from_pretrained it fills {text!r} with {found}.")


@told_once
def main() -> None:
    """Run the program."""
    args = parse_mlm_arguments()
    if args.compare:
        sys.exit(compare(__file__, sys.argv[1:], args))
    options: dict[str, Any] = {}
    if args.deepspeed_config:
        config = read_deepspeed_config(args, launched_ranks())
        args.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = build_accelerator(args, "tokenizer_name", "dataset_name", **options)
    run, tokenizer = prepare(accelerator, args)
    train_and_report(run)
    finish(run, tokenizer, show=partial(fill_in, args.output_dir))


if __name__ == "__main__":
    main()
