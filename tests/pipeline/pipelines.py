"""Training of one model over a pipeline beside plain PyTorch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import parity, ranks
from tests.support.models import Batch, ModelCase
from tests.support.parity import Run
from tests.support.tp_training import compare_trained, reference_of


def with_stages(run: Run, stages: int, tp: int = 1, **section: Any) -> Run:
    """``run`` over ``stages``, each of whose layers ``tp`` ranks hold together."""
    extra: dict[str, Any] = {**run.extra, "pipeline": {"stages": stages, **section}}
    if tp > 1:
        extra["tensor_parallel"] = {"autotp_size": tp}
    return replace(run, extra=extra)


def replica(stages: int, tp: int) -> int:
    """Which of the ranks that train on samples of their own this one is: stages outside, tensor parallelism inside."""
    return ranks.rank() % (ranks.world() // stages) // tp


def train(
    case: ModelCase, run: Run, stages: int, tp: int = 1, **section: Any
) -> tuple[list[float], list[float], dict[str, Tensor] | None, Any]:
    """Losses and norms of every step, the joined weights on rank 0, and the engine."""
    run = with_stages(run, stages, tp, **section)
    engine = parity.initialize(case.build(), run)

    def feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step, micro, rank)

    losses, norms = [], []
    for step in range(run.steps):
        parts = []
        for micro in range(run.accumulation):
            batch = parity.prepare(feed(step, micro, replica(stages, tp)), parity.DTYPES[run.dtype])
            parts.append(parity.micro_step(engine, batch, case.forward, micro))
        losses.append(parity.mean_over_ranks(parts))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
    return losses, norms, engine._consolidated_16bit_state_dict(), engine


def check(case: ModelCase, run: Run, stages: int, tp: int = 1, **section: Any) -> None:
    """On every rank: losses, norms and trained weights over ``stages`` are those of plain PyTorch."""
    world = ranks.world() // (stages * tp)
    losses, norms, weights, engine = train(case, run, stages, tp, **section)
    engine.destroy()
    if ranks.rank() != 0:
        assert weights is None
        return
    compare_trained(reference_of(case, run, world), losses, norms, weights, run)


def train_by_schedule(
    case: ModelCase, run: Run, stages: int, name: str = "1F1B", each: int = 1
) -> tuple[list[float], list[float], dict[str, Tensor] | None, Any]:
    """As ``train``, with ``engine.train_batch``: the micro-batches of a step go through one of torch's schedules."""
    section = {"stages": stages, "schedule": name, "stages_per_rank": each}
    engine = parity.initialize(case.build(), replace(run, extra={**run.extra, "pipeline": section}))
    places = itertools.product(range(run.steps), range(run.accumulation))
    batches = (parity.prepare(case.rows(*place, replica(stages, 1)), parity.DTYPES[run.dtype]) for place in places)
    losses, norms = [], []
    for _ in range(run.steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
    return losses, norms, engine._consolidated_16bit_state_dict(), engine


def check_schedule(case: ModelCase, run: Run, stages: int, name: str, each: int = 1) -> None:
    """As ``check``, with ``engine.train_batch``."""
    losses, norms, weights, engine = train_by_schedule(case, run, stages, name, each)
    engine.destroy()
    if weights is not None:
        compare_trained(reference_of(case, run, ranks.world() // stages), losses, norms, weights, run)


class Scaled(nn.Module):
    """A module whose result is multiplied by a trained number."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) * self.scale


def with_numbers(case: ModelCase) -> ModelCase:
    """``case`` with trained parameters without a dimension, in the first and in the last layer."""

    def make() -> nn.Module:
        model: Any = case.make()
        for layer in model.model.layers[::3]:
            layer.mlp = Scaled(layer.mlp)
        return model

    return replace(case, make=make)
