"""1-bit Adam against its single-process reference: the same bits over 200 steps, across the freeze, at 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import onebit_reference as reference
from tests import ranks
from tests.models import CASES, Batch
from tests.parity import Run, initialize, train

FREEZE = 60
STEPS = 200


def one_bit(stage: int, steps: int = STEPS, freeze: Any = FREEZE, **extra: Any) -> Run:
    params = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.05, "freeze_step": freeze, **extra.pop("params", {})}
    return Run(stage=stage, steps=steps, extra={"optimizer": {"type": "OneBitAdam", "params": params}, **extra})


def train_case(name: str, run: Run) -> Any:
    """Rank 0 returns the trace and where the parameters lie."""
    case = CASES[name]

    def feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step % 8, micro, rank)

    engine = initialize(case.build(), run)
    trace = train(engine, feed, case.forward, run)
    places = [[(slot.name, slot.offset, slot.numel) for slot in unit.layout.slots] for unit in engine.units if unit.trainable]
    engine.destroy()
    return (trace, places) if ranks.rank() == 0 else None


def expected(name: str, run: Run, world: int, places: reference.Places) -> reference.Outcome:
    case = CASES[name]
    freeze = run.extra["optimizer"]["params"]["freeze_step"]
    settings = reference.Settings(world, run.steps, freeze, max_norm=run.clip, accumulation=run.accumulation)
    return reference.run(
        case.build(), lambda model, step, micro, rank: case.forward(model, case.rows(step % 8, micro, rank)), settings, places
    )


@pytest.mark.parametrize(
    ("stage", "world"),
    [(0, 2), (0, 3), (1, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1), (0, 4), (1, 1), (1, 2), (1, 3)))],
)
def test_equals_the_reference_bit_for_bit(stage: int, world: int) -> None:
    run = one_bit(stage)
    trace, places = ranks.run_ranks(train_case, world, "odd_mlp", run)[0]
    wanted = expected("odd_mlp", run, world, places)
    assert trace.losses == wanted.losses
    assert trace.norms == pytest.approx(wanted.norms, rel=1e-5)
    different = [name for name, weight in trace.weights.items() if not torch.equal(weight, wanted.weights[name])]
    assert not different
    assert trace.losses[-1] < trace.losses[0]
