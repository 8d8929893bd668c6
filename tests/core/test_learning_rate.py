"""Test how a schedule is stepped: like torch's, or with the number of samples where its ``step`` requires one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.core.engine_parts import step_schedule


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


def test_a_metric_is_not_made_up() -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    with pytest.raises(TypeError, match="metrics"):
        step_schedule(schedule, None, 16)
    step_schedule(schedule, {"metrics": 0.5}, 16)
    assert schedule.best == 0.5
