"""Checkpoints of optimizers whose groups keep different states, or that add entries to their ``state_dict``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint.format.values import Encoder
from hf_zero.checkpoint.state import optimizer_state, own_entries
from hf_zero.errors import CheckpointError
from tests.support import ranks


class Falling(torch.optim.Optimizer):
    """A rate, by another name than lr, that falls with a count in an attribute, which ``state_dict`` has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rate": 0.3})
        self.count, self.helper, self.groups = 0, {"seen": 0}, self.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.helper["seen"] += 1
        for group in self.groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["rate"] / (self.count + self.helper["seen"]))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "helper": self.helper}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.count = state.pop("count")
        self.helper.update(state.pop("helper"))
        super().load_state_dict(state)


class Odd(torch.optim.Optimizer):
    """Settings and states whose names mean something else in PyTorch's classes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": -0.1, "momentum": (0.9, 0.5), "betas": 0.5, "parts": torch.tensor([0.5, 0.25]), "scale": math.nan})
        self.history = torch.zeros(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.history.add_(torch.tensor([1.0, 2.0, 3.0]))
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("best", math.inf)
                    state["step"] = state.get("step", 0) + 0.5
                    rate = group["lr"] * float(group["parts"].sum()) * group["momentum"][0] * state["step"] / float(self.history[2])
                    param.add_(param.grad, alpha=rate)
            group["parts"].mul_(0.9)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.history = state.pop("history").clone()
        super().load_state_dict(state)


def _made(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "odd":
        return Odd(model.parameters())
    if name == "switch":
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=1)  # type: ignore[arg-type]
    matrices, vectors = ([param for param in model.parameters() if (param.ndim > 1) is kind] for kind in (True, False))
    if name == "momentum":
        return torch.optim.SGD([{"params": matrices, "momentum": 0.9}, {"params": vectors}], lr=0.1)
    if name == "amsgrad":
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "amsgrad": True}], lr=0.01)
    return Falling(model.parameters())


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def _trains_on(folder: str, name: str, stage: int, last: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    config |= {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    for first in (0, 2):
        model = _model()
        engine: Any = hf_zero.initialize(model=model, optimizer=_made(name, model), config=config)[0]
        if first:
            engine.load_checkpoint(folder)
        for step in range(first, first + 2 if not first else last):
            engine.backward(_loss(engine, step, ranks.rank()))
            engine.step()
        if not first:
            engine.save_checkpoint(folder)
            engine.destroy()
    plain = _model()
    optimizer = _made(name, plain)
    for step in range(last):
        for rank in range(ranks.world()):
            (_loss(plain, step, rank) / ranks.world()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for param, wanted in zip(engine.parameters(), plain.parameters(), strict=True):
        with hf_zero.zero.GatheredParameters(param):
            torch.testing.assert_close(param.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()


CELLS = [("momentum", 1), ("amsgrad", 3), ("entries", 0), ("entries", 3), ("odd", 3), ("switch", 1)]


@pytest.mark.parametrize(("name", "stage"), CELLS, ids=str)
def test_runs_go_on(tmp_path: Path, name: str, stage: int) -> None:
    ranks.run_ranks(_trains_on, 2, str(tmp_path), name, stage, 4)


def _goes_on_frozen(folder: str, stage: int) -> None:
    """Save while the first group is frozen; resume, and train it from the next step on, at the rate that the schedule has reached."""
    resumed: dict[bool, list[Any]] = {}
    for resumes in (False, True):
        for part in (0, 1) if resumes else (0,):
            model = _model()
            model[0].requires_grad_(False)
            made = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 0.02}], lr=0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
            config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
            engine: Any = hf_zero.initialize(model=model, optimizer=made, lr_scheduler=schedule, config=config)[0]
            if part:
                engine.load_checkpoint(folder)
            for step in range(3, 5) if part else range(3) if resumes else range(5):
                model[0].requires_grad_(step == 4)
                engine.backward(_loss(engine, step, ranks.rank()))
                engine.step()
            if resumes and not part:
                engine.save_checkpoint(folder)
                engine.destroy()
        with hf_zero.zero.GatheredParameters(list(engine.parameters())):
            weights = [param.detach().clone() for param in engine.parameters()]
        resumed[resumes] = [*weights, torch.tensor([group["lr"] for group in engine.optimizer.param_groups])]
        engine.destroy()
    for one, other in zip(*resumed.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_group_that_was_frozen_keeps_its_rate(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(_goes_on_frozen, 2, str(tmp_path), stage)


def _changes_settings(folder: str) -> None:
    """Resume with other settings than the saved ones, which a checkpoint restores as ``load_state_dict`` of PyTorch does."""
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}

    def engine_of(amsgrad: bool, split: bool) -> Any:
        model = _model()
        matrices = [param for param in model.parameters() if param.ndim > 1]
        vectors = {"params": [param for param in model.parameters() if param.ndim == 1], "weight_decay": 0.0}
        params = [{"params": matrices}, vectors] if split else [*model.parameters()]
        return hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(params, lr=0.01, amsgrad=amsgrad), config=config)[0]

    engine = engine_of(False, False)
    engine.backward(_loss(engine, 0, ranks.rank()))
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = engine_of(True, True)
    with mock.patch.object(optimizer_state, "warn_once") as warned:
        engine.load_checkpoint(folder)
    assert [group["amsgrad"] for group in engine.optimizer.param_groups] == [False, False]
    assert "param groups 0 and 1 of this optimizer were one group" in warned.call_args.args[0]
    assert "weight_decay 0.01 and 0.0" in warned.call_args.args[0]
    engine.backward(_loss(engine, 1, ranks.rank()))
    engine.step()
    engine.destroy()


def test_saved_settings_replace_others(tmp_path: Path) -> None:
    ranks.run_ranks(_changes_settings, 2, str(tmp_path))


def _unfreezes(folder: str, stage: int) -> None:
    """Train a parameter whose neighbours in the frozen unit stay frozen, save, train on, load."""
    model, config = _model(), {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    model[2].requires_grad_(False)
    engine: Any = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), config=config)[0]
    for step in range(4):
        if step == 1:
            model[2].weight.requires_grad_(True)
        if step == 3:
            engine.save_checkpoint(folder)
            kept = hf_zero.utils.safe_get_full_fp32_param(model[2].weight)
        engine.backward(_loss(engine, step, ranks.rank()))
        engine.step()
    engine.load_checkpoint(folder)
    assert torch.equal(hf_zero.utils.safe_get_full_fp32_param(model[2].weight), kept)
    assert not torch.equal(kept, _model()[2].weight)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_of_a_frozen_unit_that_was_trained_later_loads(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(_unfreezes, 2, str(tmp_path), stage)


def test_entries_that_cannot_be_saved_are_named() -> None:
    optimizer = Falling(nn.Linear(2, 2).parameters())
    optimizer.helper["like a parameter"] = torch.zeros(4)
    with mock.patch.object(own_entries, "warn_once") as warned:
        entries = own_entries.own_entries(optimizer, Encoder())
        assert "Falling.state_dict() has the entry 'helper'" in warned.call_args.args[0]
        assert entries.pop("count") == 0 and len(entries) == 1
        own_entries.give_entries(optimizer, {"count": 2, **entries})
    assert "lacks the entries helper, so all of them keep their present values" in warned.call_args.args[0] and optimizer.count == 0
    with pytest.raises(CheckpointError, match=r"Falling.load_state_dict\(\) failed for the saved entries count: KeyError: 'helper'"):
        own_entries.give_entries(optimizer, {"count": 2})
    own_entries.give_entries(optimizer, {"count": 2, "helper": {"seen": 5}})
    assert (optimizer.count, optimizer.helper["seen"]) == (2, 5) and len(optimizer.param_groups[0]["params"]) == 2
