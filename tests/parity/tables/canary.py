"""Run the canary: one optimizer step of a tiny model of an architecture, through the engine on some ranks and in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support import ranks, zoo
from tests.support.models import Batch
from tests.support.parity import Difference, Run, Trace, difference, initialize, reference, train
from tests.support.processes import PATIENCE

# One step: the weights' limit is that of lr times a gradient's rounding, for gradients that are noise (a bias in front of a softmax).
LIMIT = Difference(loss=5e-6, norm=2e-5, weights=2e-4, masters=2e-4)


@dataclass(frozen=True)
class Sighting:
    """Result of one architecture. ``problem`` is empty when loss, grad norm and weights agree."""

    name: str
    problem: str
    difference: Difference | None = None


def check(name: str, stage: int = 3) -> Sighting:
    """Take one step of a class on this rank's rows, and compare it with the reference; return the same answer on every rank."""
    run = Run(stage=stage, steps=1, clip=0.1)

    def feed(step: int, micro: int, rank: int) -> Batch:
        return zoo.batch(name, torch.Generator().manual_seed(17 + rank))

    engine = initialize(zoo.build(name), run)
    trace = train(engine, feed, zoo.loss, run)
    engine.destroy()
    expected = reference(zoo.build(name), feed, zoo.loss, run, ranks.world())
    return compare(name, trace, expected)


def compare(name: str, trace: Trace, expected: Trace) -> Sighting:
    """Return whether loss, grad norm and weights agree; the norm must be neither 0 nor infinite."""
    found = difference(trace, expected)
    if not 0 < expected.norms[0] < float("inf"):
        return Sighting(name, f"plain PyTorch has a gradient norm of {expected.norms[0]}", found)
    if not found.within(LIMIT):
        worst = f"losses {trace.losses} and {expected.losses}, norms {trace.norms} and {expected.norms}"
        return Sighting(name, f"differs from plain PyTorch: {found}; {worst}", found)
    return Sighting(name, "", found)


def check_all(names: list[str], world_size: int = 2, stage: int = 3, seconds: float = 40.0) -> list[Sighting]:
    """Check classes one after another, each on fresh state; one that fails or hangs does not stop the others."""
    sightings = []
    for name in names:
        limit = PATIENCE * seconds
        outcomes = ranks.observe_ranks(check, world_size, name, stage, timeout=limit, group_timeout=limit / 2, grace=1.0)
        failed = next((outcome for outcome in outcomes if not outcome.ok), None)
        if failed is None:
            sightings.append(outcomes[0].value)
        else:
            sightings.append(Sighting(name, f"rank {failed.rank} {failed.status}: {failed.text}"))
    return sightings
