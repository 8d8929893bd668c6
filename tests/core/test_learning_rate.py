"""Test how a schedule is stepped: like torch's, or with the number of samples where its ``step`` requires one."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import hf_zero
from hf_zero.core import engine_parts
from hf_zero.core.engine_parts import step_schedule
from tests.support import ranks
from tests.support.parity import Run


class Noted:
    def __init__(self) -> None:
        self.given: list[Any] = []


class Plain(Noted):
    def step(self, epoch: int | None = None) -> None:
        self.given.append(epoch)


class Samples(Noted):
    def step(self, increment: int) -> None:
        self.given.append(increment)


class Anything(Noted):
    def step(self, *args: Any, **kwargs: Any) -> None:
        self.given.append((args, kwargs))


@pytest.mark.parametrize(
    ("kind", "arguments", "given"),
    [
        (Plain, None, None),
        (Plain, {"epoch": 3}, 3),
        (Samples, None, 16),
        (Samples, {"increment": 4}, 4),
        (Anything, {}, ((), {})),
    ],
)
def test_a_schedule_that_asks_for_a_number_is_given_the_samples(kind: type[Noted], arguments: dict[str, int] | None, given: object) -> None:
    schedule = kind()
    step_schedule(schedule, arguments, 16)
    assert schedule.given == [given]


def test_torchs_own_schedules_are_stepped_once() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    step_schedule(schedule, None, 16)
    assert schedule.get_last_lr() == [0.5]


def _steps_of_the_optimizer(stage: int, own: bool) -> None:
    """Train by ``optimizer.step()`` and ``scheduler.step()``, a loop of plain PyTorch; ``own``: of the script's own optimizer."""
    torch.manual_seed(0)
    model, rows = torch.nn.Linear(4, 2), torch.randn(2, 3, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)
    config = {name: value for name, value in Run(stage=stage).config().items() if name != "optimizer"}
    engine, returned, _, schedule = hf_zero.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    optimizer, rates = optimizer if own else returned, []
    for _ in range(3):
        engine.backward(engine(rows[ranks.rank()]).square().mean())
        optimizer.step()
        rates.append(engine.get_lr()[0])
        schedule.step()
        optimizer.zero_grad()
    assert rates == [1.0, 0.5, 0.25] and engine.get_lr() == [0.125]
    engine.backward(engine(rows[ranks.rank()]).square().mean())
    engine.step()
    assert engine.get_lr() == [0.0625], "engine.step() steps the schedule"
    engine.destroy()


@pytest.mark.parametrize(("stage", "own"), [(0, False), (2, True), (3, False)])
def test_a_script_that_steps_the_optimizer_steps_its_schedule_too(stage: int, own: bool) -> None:
    ranks.run_ranks(_steps_of_the_optimizer, 2, stage, own)


def test_a_schedule_that_nobody_steps_is_a_warning() -> None:
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), 5)
    with patch.object(engine_parts, "warn_once") as warn:
        for number in range(1, 12):
            step_schedule(schedule, None, 16, by_optimizer=number)
    assert schedule.last_epoch == 0 and warn.call_count == 1 and "optimizer.step() 10 times" in warn.call_args.args[0]


def test_a_metric_is_not_made_up() -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    with pytest.raises(TypeError, match="metrics"):
        step_schedule(schedule, None, 16)
    step_schedule(schedule, {"metrics": 0.5}, 16)
    assert schedule.best == 0.5
