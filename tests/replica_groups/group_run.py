"""A rank of a replica group: trains a small model by a plan, writes each step that was taken, and dies where the plan says.

    python -m tests.replica_groups.group_run PLAN.json FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, WIDTH = 96, 2, 6


def data_set() -> TensorDataset:
    """Return the samples: inputs (SAMPLES, WIDTH) and targets (SAMPLES, 1)."""
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, 1, generator=generator))


def model() -> nn.Module:
    """Return the model, with the same weights on every call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def config(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the plan."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": plan.get("accumulation", 1),
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": plan["stage"], "stage3_param_persistence_threshold": 0},
        "hf_zero": {"replicas": "torchft"},
        **plan.get("extra", {}),
    }


class Deaths:
    """Deaths of this rank in this attempt, by the plan: each has a group, an attempt, a rank, a step and a place."""

    def __init__(self, plan: dict[str, Any], attempt: int) -> None:
        self._own = [
            death
            for death in plan.get("deaths", [])
            if (death["group"], death["attempt"], death["rank"])
            == (int(os.environ["REPLICA_GROUP_ID"]), attempt, int(os.environ["RANK"]))
        ]

    def at(self, place: str, step: int) -> None:
        """Die if the plan has a death at this place of the step."""
        if any((death["place"], death["step"]) == (place, step) for death in self._own):
            os.kill(os.getpid(), signal.SIGKILL)


def wrap(deaths: Deaths, engine: Any) -> None:
    """Let a death come between the exchanges of a step: before the average, inside it, before and after the vote."""
    from hf_zero.replica_groups.quorum import Quorum

    average, vote = Quorum.average, Quorum.vote

    def dying_average(self: Any, tensors: Any) -> None:
        step = engine.global_steps
        deaths.at("average", step)
        average(self, tensors[:1])
        deaths.at("inside", step)
        average(self, tensors[1:])
        deaths.at("averaged", step)

    def dying_vote(self: Any) -> bool:
        step, agreed = engine.global_steps, vote(self)
        deaths.at("voted", step)
        return agreed

    Quorum.average, Quorum.vote = dying_average, dying_vote  # type: ignore[method-assign]


def train(plan: dict[str, Any], folder: Path) -> None:
    """Train for the steps of the plan, and write what was done into ``folder``."""
    import hf_zero
    from hf_zero.utils import ReplicaSampler

    group, rank, world = (int(os.environ[name]) for name in ("REPLICA_GROUP_ID", "RANK", "WORLD_SIZE"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    deaths = Deaths(plan, attempt)
    net, samples = model(), data_set()
    engine, *_ = hf_zero.initialize(model=net, config=config(plan))
    wrap(deaths, engine)
    sampler = ReplicaSampler(SAMPLES, BATCH, world, rank, seed=1, groups=plan["groups"])
    loader = DataLoader(samples, batch_size=BATCH, sampler=sampler)
    log = (folder / f"steps-{group}-{rank}-{attempt}.jsonl").open("w")
    groups = engine.stepper.groups
    while engine.global_steps < plan["steps"]:
        for inputs, targets in loader:
            deaths.at("forward", engine.global_steps)
            loss = (engine(inputs) - targets).square().mean()
            before = engine.global_steps
            deaths.at("backward", before)
            engine.backward(loss)
            engine.step()
            if engine.global_steps != before:
                line = {"step": engine.global_steps, "taken": groups.taken, "norm": engine.get_global_grad_norm(), "lr": engine.get_lr()}
                print(json.dumps({**line, "shares": groups.shares.state_dict(), "samples": engine.global_samples}), file=log, flush=True)
                deaths.at("stepped", engine.global_steps)
            if engine.global_steps >= plan["steps"]:
                break
    weights = engine.consolidated_fp32() if hasattr(engine, "consolidated_fp32") else engine.module_state_dict()
    torch.save({name: value.clone() for name, value in weights.items()}, folder / f"weights-{group}-{rank}.pt")
    groups.leave()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
