"""Test ``ignore_unused_parameters``: by default a missing gradient counts as zero; false raises an error that names the parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_zero import observe
from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.logged import messages_of_log
from tests.support.parity import Run, initialize
from tests.support.rows import slow_but
from tests.support.zero3 import whole_parameters

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


TAKEN = (0, 1, 1, 0, 1, 0)  # the branch of each step, like an adapter that a script activates


def _rows(step: int, rank: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(ranks.device())


def _started() -> tuple[Branches, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branches().to(ranks.device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _choose(model: Branches, taken: int, freezes: bool) -> None:
    """Freeze the branch that this step leaves out, if the script ``freezes``."""
    for index, branch in enumerate(model.branches):
        branch.requires_grad_(index == taken or not freezes)


def _plain(freezes: bool, world: int) -> dict[str, Tensor]:
    """Return the weights of plain PyTorch, in which each parameter that requires a gradient and has none gets one of zeros."""
    model, optimizer = _started()
    for step, taken in enumerate(TAKEN):
        _choose(model, taken, freezes)
        for rank in range(world):
            (model(_rows(step, rank), (taken,)) / world).backward()
        for param in model.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def _switched(stage: int) -> None:
    """Check that a branch left out is trained with zeros, also in Adam's step count, and that one that is frozen is not trained."""
    for freezes in (False, True):
        model, optimizer = _started()
        engine = initialize(model, Run(stage, extra={"zero_allow_untested_optimizer": True}), optimizer=optimizer)
        for step, taken in enumerate(TAKEN):
            _choose(model, taken, freezes)
            engine.backward(engine(_rows(step, ranks.rank()), (taken,)))
            engine.step()
        expected = _plain(freezes, ranks.world())
        for name, value in whole_parameters(model).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=lambda text, what=(freezes, name): f"{what}: {text}")
        engine.destroy()
    skipped = _plain(True, ranks.world())["branches.1.weight"]
    assert not torch.allclose(_plain(False, ranks.world())["branches.1.weight"], skipped, atol=1e-3)  # the two rules differ here


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_branches_that_take_turns_train_as_in_plain_pytorch(stage: int) -> None:
    ranks.run_ranks(_switched, 2, stage)


def _warnings(stage: int, decay: float, taken: tuple[int, ...]) -> list[str]:
    torch.manual_seed(0)
    model = Branches().to(ranks.device())
    observe._warned.clear()  # of earlier jobs in this process
    with messages_of_log() as lines:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
        engine = initialize(model, Run(stage), optimizer=optimizer)
        for _ in range(2):
            _micro_step(engine, *taken)
        engine.destroy()
    return [line for line in lines if "had no gradient on this rank" in line]


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_the_first_step_warns_of_decay_without_a_gradient(stage: int) -> None:
    found, other = ranks.run_ranks(_warnings, 2, stage, 0.1, (0,))
    assert len(found) == 1 and "(branches.1." in found[0] and "trunk" not in found[0] and "branches.0" not in found[0]
    assert other == []
    assert ranks.run_ranks(_warnings, 2, stage, 0.1, (0, 1)) == [[], []]
    assert ranks.run_ranks(_warnings, 2, stage, 0.0, (0,)) == [[], []]
