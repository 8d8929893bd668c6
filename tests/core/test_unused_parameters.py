"""Test ``ignore_unused_parameters``: by default a missing gradient counts as zero; false raises an error that names the parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.parity import Run, initialize
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)


class Branches(nn.Module):
    """A trunk and two branches; the call chooses the branches that run."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, taken: tuple[int, ...]) -> Tensor:
        x = self.trunk(x)
        return sum(self.branches[index](x).square().sum() for index in taken)  # type: ignore[return-value]


def _engine(stage: int, accumulation: int = 1, ignore: bool = False):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    extra = {"zero_optimization": {"ignore_unused_parameters": ignore}}
    return initialize(Branches(), Run(stage, accumulation=accumulation, extra=extra))


def _micro_step(engine, *taken: int) -> None:  # type: ignore[no-untyped-def]
    engine.backward(engine(torch.ones(2, 4, device=ranks.device()), taken))
    engine.step()


def _named(stage: int) -> str:
    """Leave a branch out on rank 1: both ranks get the same error, and the weights stay."""
    engine = _engine(stage)
    _micro_step(engine, 0, 1)
    with pytest.raises(StateError) as error:
        _micro_step(engine, *((0, 1) if ranks.rank() == 0 else (0,)))
    assert not engine.was_step_applied() and engine.global_steps == 1
    engine.discard_gradients()
    _micro_step(engine, 1, 0)
    assert engine.was_step_applied() and engine.global_steps == 2
    engine.destroy()
    return str(error.value)


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_an_unused_parameter_is_an_error_on_all_ranks_alike(stage: int) -> None:
    first, second = ranks.run_ranks(_named, 2, stage)
    assert first == second
    assert first.startswith("branches.1.weight, branches.1.bias: no gradient in this step on rank(s) 1 of 2")
    assert "trunk" not in first and "branches.0" not in first and "ignore_unused_parameters" in first


def _over_micro_steps(stage: int) -> None:
    """Check that only complete optimizer steps and parameters that require a gradient count; without the key there is no message."""
    engine = _engine(stage, accumulation=2)
    for taken in ((0,), (1,), (0,)):
        _micro_step(engine, *taken)
    with pytest.raises(StateError, match=r"branches\.1\.weight, branches\.1\.bias"):
        _micro_step(engine, 0)
    engine.discard_gradients()
    engine.module.branches[1].requires_grad_(False)
    for taken in ((0,), (0,)):
        _micro_step(engine, *taken)
    assert engine.global_steps == 2
    engine.destroy()
    engine = _engine(stage, ignore=True)
    _micro_step(engine, 0)
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_a_gradient_in_any_micro_step_is_enough(stage: int) -> None:
    ranks.run_ranks(_over_micro_steps, 2, stage)
