"""Test parameters without a gradient: a step leaves them as they are, as plain PyTorch does; with ``ignore_unused_parameters: false`` it
raises an error that names them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


# The branches that each of two ranks takes in each micro-step, like adapters that a script activates, or experts that a router chooses.
TAKEN = (
    ((0,), (0,)), ((1,), (1,)), ((1,), (1,)), ((0,), (1,)), ((0,), (0,)), ((0, 1), (0,)),
    ((0,), (0,)), ((1,), (1,)), ((1,), (0,)), ((1,), (1,)), ((0,), (0,)), ((0,), (0,)),
)  # fmt: skip


class Choices(Branches):
    """Branches, a factor that belongs to the second one, and a weight that no forward uses; both share a unit with the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.spare = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, taken: tuple[int, ...]) -> Tensor:
        return super().forward(x * self.factor if 1 in taken else x, taken)


def _rows(step: int, rank: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(ranks.device())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
    "whole": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.1),
}
# Name -> class of the model, optimizer, micro-steps per step, further configuration. Offloaded updates may begin during the backward.
CASES: dict[str, tuple[type[Branches], str, int, dict[str, Any]]] = {
    "adamw": (Choices, "adamw", 1, {}),
    "momentum": (Choices, "momentum", 1, {}),
    "accumulated": (Choices, "adamw", 2, {}),
    "whole tensors": (Choices, "whole", 1, {}),
    "offloaded": (Choices, "adamw", 1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "in files": (Branches, "adamw", 1, {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}),
}


def _started(kind: type[Branches], optimizer: str) -> tuple[Branches, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind().to(ranks.device())
    return model, OPTIMIZERS[optimizer](model)


def _choose(model: Branches, step: int, freezes: bool) -> None:
    """Freeze the branches that no rank takes in this micro-step, if the script ``freezes``."""
    for index, branch in enumerate(model.branches):
        branch.requires_grad_(not freezes or any(index in taken for taken in TAKEN[step]))


def _plain(case: str, zeros: bool = False) -> dict[str, Tensor]:
    """Return the weights of plain PyTorch; ``zeros``: a parameter without a gradient gets one of zeros, and so another update."""
    kind, name, micro_steps, _ = CASES[case]
    model, optimizer = _started(kind, name)
    for step, taken in enumerate(TAKEN):
        for rank in range(2):
            (model(_rows(step, rank), taken[rank]) / 2 / micro_steps).backward()
        if (step + 1) % micro_steps == 0:
            for param in model.parameters():
                if zeros and param.grad is None:
                    param.grad = torch.zeros_like(param)
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def _turns(case: str, stage: int, freezes: bool, folder: str, by_rank: bool = False) -> None:
    """Check the weights after branches took turns, with a save and a load into a new engine on the way; ``by_rank``: the states of the
    optimizer are loaded from its state dict on this rank.
    """
    kind, name, micro_steps, extra = CASES[case]
    extra = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **extra}
    if case == "in files":
        extra = {**extra, "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/{ranks.rank()}"}}}

    def begin() -> Any:
        model, optimizer = _started(kind, name)
        return initialize(model, Run(stage, accumulation=micro_steps, extra=extra), optimizer=optimizer)

    engine = begin()
    for step, taken in enumerate(TAKEN):
        if step == len(TAKEN) // 2:
            engine.save_checkpoint(folder)
            states = copy.deepcopy(engine.optimizer.state_dict())
            engine.destroy()
            engine = begin()
            engine.load_checkpoint(folder, load_optimizer_states=not by_rank)
            if by_rank:
                engine.optimizer.load_state_dict(states)
        _choose(engine.module, step, freezes)
        engine.backward(engine(_rows(step, ranks.rank()), taken[ranks.rank()]))
        engine.step()
    expected = _plain(case)
    for name, value in whole_parameters(engine.module).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
@pytest.mark.parametrize("case", [case for case in CASES if case != "in files"])
def test_branches_that_take_turns_train_as_in_plain_pytorch(case: str, stage: int, tmp_path: Path) -> None:
    if case == "offloaded" and stage == 0:
        pytest.skip("stage 0 has no offload")
    ranks.run_ranks(_turns, 2, case, stage, False, str(tmp_path))
    zeros, expected = _plain(case, zeros=True), _plain(case)
    assert not all(torch.allclose(zeros[name], value, atol=1e-4) for name, value in expected.items())  # the two rules differ here


def test_branches_whose_states_are_in_files(tmp_path: Path) -> None:
    ranks.run_ranks(_turns, 2, "in files", 3, False, str(tmp_path))


@pytest.mark.parametrize("stage", slow_but(STAGES, 1))
@pytest.mark.parametrize("case", ["adamw", "offloaded"])
def test_a_state_dict_of_the_optimizer_has_the_parameters_that_were_skipped(case: str, stage: int, tmp_path: Path) -> None:
    if case == "offloaded" and stage == 0:
        pytest.skip("stage 0 has no offload")
    ranks.run_ranks(_turns, 2, case, stage, False, str(tmp_path), True)


@pytest.mark.parametrize("stage", slow_but(STAGES, 2))
def test_freezing_the_branches_that_no_rank_takes_changes_nothing(stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(_turns, 2, "adamw", stage, True, str(tmp_path))


def _set_to_none(stage: int) -> None:
    """Check that a gradient that a script drops between backward and step counts as none: its parameter is not updated."""
    model, optimizer = _started(Branches, "adamw")
    engine = initialize(model, Run(stage, extra={"zero_allow_untested_optimizer": True}), optimizer=optimizer)
    plain, own = _started(Branches, "adamw")
    for step in range(3):
        for rank in range(2):
            (plain(_rows(step, rank), (0, 1)) / 2).backward()
        engine.backward(engine(_rows(step, ranks.rank()), (0, 1)))
        for one in (plain, engine.module):
            for param in one.branches[step % 2].parameters():
                param.grad = None
        own.step()
        own.zero_grad()
        engine.step()
    expected = dict(plain.named_parameters())
    for name, value in whole_parameters(model).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_a_gradient_set_to_none_is_no_gradient(stage: int) -> None:
    ranks.run_ranks(_set_to_none, 2, stage)


def _warnings(case: str, decay: float, taken: tuple[int, ...], folder: str) -> list[str]:
    torch.manual_seed(0)
    model = (Choices if case == "in files" else Branches)().to(ranks.device())
    observe._warned.clear()  # of earlier jobs in this process
    params = {"lr": 1e-2, "weight_decay": decay}
    extra: dict[str, Any] = {"optimizer": {"type": "OneBitAdam" if case == "one bit" else "AdamW", "params": params}}
    if case == "in files":
        extra["zero_optimization"] = {"offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/{ranks.rank()}"}}
    with messages_of_log() as lines:
        engine = initialize(model, Run(0 if case == "one bit" else 3, extra=extra))
        for _ in range(2):
            _micro_step(engine, *taken)
        engine.destroy()
    return [line for line in lines if "had no gradient on this rank" in line]


@pytest.mark.parametrize("case", ["one bit", "in files"])
def test_the_first_step_warns_of_decay_where_parameters_cannot_be_skipped(case: str, tmp_path: Path) -> None:
    found, other = ranks.run_ranks(_warnings, 2, case, 0.1, (0,), str(tmp_path))
    assert len(found) == 1 and ("(branches.1." if case == "one bit" else "(factor, spare)") in found[0]
    assert "trunk" not in found[0] and "branches.0" not in found[0] and other == []
    assert ranks.run_ranks(_warnings, 2, case, 0.0, (0,), str(tmp_path)) == [[], []]


def test_the_first_step_does_not_warn_of_parameters_that_are_skipped(tmp_path: Path) -> None:
    assert ranks.run_ranks(_warnings, 2, "skipped", 0.1, (0,), str(tmp_path)) == [[], []]
