"""A training script without Trainer, as users write it; `accelerate launch` starts it, and its last line reports the results.

Two epochs over ``TEXTS`` rows with accumulation 2: train, evaluate, save the state half-way, train on, load the saved state and train on
again, export for `from_pretrained`. The script does not use hf_zero directly, except with ``--plugin zero``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

ROWS, LENGTH, VOCAB, BATCH = 32, 8, 64, 2
EVAL_ROWS = 7  # no multiple of the batch or of the ranks
STEPS, SAVED_AT = 8, 4
LR, DECAY = 1e-2, 0.1


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return random token rows; labels are the inputs."""
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def lr_at(step: int) -> float:
    """Return the factor of the learning rate of the schedule made in code."""
    return 1.0 / (1.0 + 0.1 * step)


def make_optimizer(kind: str, model: torch.nn.Module) -> Any:
    """Return the optimizer made in code, or the placeholder for the configuration's optimizer."""
    if kind == "code":
        decay = [p for n, p in model.named_parameters() if "ln" not in n and "bias" not in n]
        plain = [p for n, p in model.named_parameters() if "ln" in n or "bias" in n]
        groups = [{"params": decay, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=LR)
    if kind == "ours":
        from hf_zero import DummyOptim as Stand

        return Stand(model.parameters(), lr=LR, weight_decay=DECAY)
    return DummyOptim(model.parameters(), lr=LR, weight_decay=DECAY)


def make_scheduler(kind: str, optimizer: Any, processes: int) -> Any:
    """Return a torch schedule, a function that makes one, or the placeholder for the configuration's schedule."""
    if kind == "code":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)
    if kind == "callable":
        return DummyScheduler(optimizer, lr_scheduler_callable=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lr_at))
    if kind == "ours":
        from hf_zero import DummyScheduler as Stand

        return Stand(optimizer, total_num_steps=STEPS * processes, warmup_num_steps=2)
    return DummyScheduler(optimizer, total_num_steps=STEPS * processes, warmup_num_steps=2)


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    if args.plugin == "launcher":
        return Accelerator(gradient_accumulation_steps=2)
    from hf_zero import ZeroPlugin

    options = json.loads(args.zero_options)
    return Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=ZeroPlugin(**options))


def train(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, batches: list[Any], record: dict[str, list[float]]) -> None:
    """Run the training loop of a no-trainer example."""
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                # accelerate 1.6 returns None and leaves the norm with the engine
                record["norms"].append(float(norm if norm is not None else model.get_global_grad_norm()))
                record["lrs"].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        record["losses"].append(accelerator.gather(loss.detach().float()).mean().item())


def evaluate(accelerator: Accelerator, model: Any, loader: DataLoader[Any]) -> tuple[float, int]:
    """Return the mean loss over rows, and the number of rows."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        per_row = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), batch["labels"][:, 1:], reduction="none").mean(1)
        losses.append(accelerator.gather_for_metrics(per_row))
    counted = torch.cat(losses)
    return counted.mean().item(), counted.numel()


def facts(accelerator: Accelerator) -> dict[str, Any]:
    """Return the facts that ranks have about each other, and the effect of the launcher's settings."""
    plugin = accelerator.state.deepspeed_plugin
    own = torch.tensor([accelerator.process_index, int(accelerator.is_main_process)], device=accelerator.device)
    return {
        "ranks": [
            accelerator.num_processes,
            torch.distributed.get_world_size(),
            str(accelerator.distributed_type),
            accelerator.state.backend,
        ],
        "gathered": accelerator.gather(own).tolist(),
        "total": accelerator.reduce(torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)).item(),
        "config": plugin.deepspeed_config,
        "init": plugin.zero3_init_flag,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--optimizer", choices=["code", "config", "ours"], default="code")
    parser.add_argument("--scheduler", choices=["code", "callable", "config", "ours"], default="code")
    parser.add_argument("--plugin", choices=["launcher", "zero"], default="launcher")
    parser.add_argument("--zero_options", default="{}")
    args = parser.parse_args()

    set_seed(1)
    accelerator = make_accelerator(args)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = make_optimizer(args.optimizer, model)
    scheduler = make_scheduler(args.scheduler, optimizer, accelerator.num_processes)
    train_loader = DataLoader(rows(ROWS, 1), batch_size=BATCH)
    eval_loader = DataLoader(rows(EVAL_ROWS, 2), batch_size=BATCH)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)

    report: dict[str, Any] = {"eval_before": evaluate(accelerator, model, eval_loader)}
    batches = [batch for _ in range(2) for batch in train_loader]
    half = 2 * SAVED_AT  # micro-steps
    first: dict[str, list[float]] = {"losses": [], "norms": [], "lrs": []}
    train(accelerator, model, optimizer, scheduler, batches[:half], first)
    accelerator.save_state(str(args.output / "state"))
    train(accelerator, model, optimizer, scheduler, batches[half:], first)
    report["run"] = first
    report["eval_after"] = evaluate(accelerator, model, eval_loader)

    state = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        args.output / "export", state_dict=state, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    report["state_is_none"] = accelerator.gather(torch.tensor([int(state is None)], device=accelerator.device)).tolist()
    report["unwrapped"] = type(unwrapped).__name__

    accelerator.load_state(str(args.output / "state"))
    again: dict[str, list[float]] = {"losses": [], "norms": [], "lrs": []}
    train(accelerator, model, optimizer, scheduler, batches[half:], again)
    report["again"] = again

    report["facts"] = facts(accelerator)
    report["skipped"] = bool(accelerator.optimizer_step_was_skipped)
    report["world"] = [accelerator.num_processes, accelerator.state.deepspeed_plugin.zero_stage]
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.free_memory(model, optimizer, train_loader, eval_loader, scheduler)
    with accelerator.main_process_first():
        accelerator.print("REPORT " + json.dumps(report), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
