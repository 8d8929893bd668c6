"""Train a causal language model with stock Accelerate: one process, DDP, or ZeRO 0-3, whatever the launcher says.

    accelerate launch --config_file examples/clm/accelerate_zero3.yaml examples/clm/run_clm_no_trainer.py --output_dir runs/zero3

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
from common.results import to_perplexity
from common.run import Run, Task, build_accelerator, build_run, construction, finish, ranks_of, train_and_report
from model import build_model
from task import load_material
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, default_data_collator

GENERATED_TOKENS = 40


def evaluate(run: Run) -> dict[str, float]:
    """Mean loss in nats per token over the evaluation sequences of all ranks, and the perplexity (collective)."""
    losses = []
    for batch in run.eval_loader:
        loss = run.model(**batch).loss.float()
        losses.append(run.accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    loss = torch.cat(losses).mean().item()
    return {"perplexity": to_perplexity(loss), "eval_loss": loss}


def prepare(accelerator: Accelerator, args: argparse.Namespace) -> tuple[Run, PreTrainedTokenizerBase]:
    """Load text, tokenizer and model, and hand everything to Accelerate.

    Returns:
        The run at its first step, and the tokenizer.
    """
    material = load_material(args, ranks_of(accelerator))
    with construction(accelerator, args):
        model = build_model(material.config, material.tokenizer, args)
    task = Task("causal language model", f"sequences of {args.block_size} tokens", evaluate, headline=("perplexity",))
    collators = (default_data_collator, default_data_collator)
    return build_run(accelerator, args, task, model, data=material.data, collators=collators), material.tokenizer


@torch.no_grad()
def loss_of_first_block(model: torch.nn.Module, run: Run) -> float:
    """Loss of ``model`` on the first evaluation sequence; with the engine itself a collective."""
    batch = default_data_collator([run.eval_loader.dataset[0]])
    model.eval()
    return model(**{name: tensor.to(run.accelerator.device) for name, tensor in batch.items()}).loss.item()


def reload_and_generate(run: Run, tokenizer: PreTrainedTokenizerBase, engine_loss: float) -> None:
    """Load the saved folder as any user would, compare it with the trained model and let it continue the prompt.

    Args:
        run: Names the folder and the prompt.
        tokenizer: Encodes the prompt.
        engine_loss: What the trained model said in `loss_of_first_block`.
    """
    model = AutoModelForCausalLM.from_pretrained(run.args.output_dir).to(run.accelerator.device)
    loss = loss_of_first_block(model, run)
    print(f"\nThe model lies in {run.args.output_dir}. Reloaded with from_pretrained: loss {loss:.4f} on the first evaluation sequence")
    print(f"(in training: {engine_loss:.4f}). It continues {run.args.prompt!r}:")
    prompt = tokenizer(run.args.prompt, return_tensors="pt", return_token_type_ids=False).to(run.accelerator.device)
    room = run.args.block_size - prompt["input_ids"].shape[1]  # a small model has no positions beyond its block
    length = {name: max(1, min(GENERATED_TOKENS, room)) for name in ("min_new_tokens", "max_new_tokens")}
    torch.manual_seed(run.args.seed)
    output = model.generate(**prompt, **length, do_sample=True, top_k=20, pad_token_id=tokenizer.eos_token_id)
    line = str(tokenizer.decode(output[0], skip_special_tokens=True))
    print("    " + " ".join(line.split()))


@told_once
def main() -> None:
    """Run the program."""
    args = parse_arguments()
    if args.compare:
        sys.exit(compare(__file__, sys.argv[1:], args))
    accelerator = build_accelerator(args, "tokenizer_name", "dataset_name")
    run, tokenizer = prepare(accelerator, args)
    train_and_report(run)
    loss = loss_of_first_block(run.model, run)
    finish(run, tokenizer, show=partial(reload_and_generate, run, tokenizer, loss))


if __name__ == "__main__":
    main()
