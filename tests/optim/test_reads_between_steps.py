"""A script that reads gradients, values or states through ``optimizer.param_groups`` between steps gets one error, not zeros."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.optim.elementwise import needs_whole_tensors
from tests.support import ranks


class Sam(torch.optim.Optimizer):
    """Half steps that the script calls; another optimizer does the rest."""

    def __init__(self, params: Any, whole: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.whole = whole

    @torch.no_grad()
    def first_step(self) -> None:
        for param in [param for group in self.param_groups for param in group["params"] if param.grad is not None]:
            param.add_(param.grad)

    def second_step(self) -> None:
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (param.grad.norm() if self.whole else 1.0))


def _reads(stage: int, whole: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    own: Any = Sam(model.parameters(), whole)
    engine: Any = hf_zero.initialize(model=model, optimizer=own, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        if own.param_groups[0]["params"]:
            with pytest.raises(StateError, match=r"read gradients of the tensors in optimizer.param_groups between backward and step"):
                own.first_step()
        with pytest.raises(StateError, match=r"SGD.step\(\): this optimizer belongs to one that an engine steps"):
            own.second_step()
        for param in own.param_groups[0]["params"]:
            assert param.numel() and param.shape == torch.zeros_like(param).shape and repr(param)
            for read in (lambda param: param.norm(), lambda param: param.data, lambda param: param.mul_(2), lambda param: param[0]):
                if whole:
                    with pytest.raises(StateError, match=r"whose values are here inside of step\(\) only"):
                        read(param)
            param.grad = None
        engine.step()
        assert not [param for group in own.param_groups for param in group["params"] if param.grad is not None]
    engine.destroy()


@pytest.mark.parametrize(("stage", "whole"), [(0, True), (1, False), (3, True)])
def test_gradients_and_values_that_are_not_there(stage: int, whole: bool) -> None:
    ranks.run_ranks(_reads, 2, stage, whole)


class Evaluating(torch.optim.SGD):
    """Its step cannot be called without a closure."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


def test_a_step_that_requires_a_closure_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"Evaluating.step\(\) requires 'closure', but the engine calls it without arguments"):
        needs_whole_tensors(Evaluating(model.parameters(), lr=0.1), all_here=True)


def _copied() -> None:
    model = nn.Linear(4, 3)
    engine, optimizer, *_ = hf_zero.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}},
    )
    engine.backward(engine(torch.ones(2, 4)).sum())
    part = optimizer.param_groups[0]["params"][0]
    values = part.detach().clone()
    copied = copy.deepcopy(optimizer.param_groups)[0]["params"][0], pickle.loads(pickle.dumps(part))
    assert all(type(one) is nn.Parameter and torch.equal(one, values) and one.grad is None for one in copied)
    engine.step()
    assert all(torch.equal(one, values) for one in copied) and not torch.equal(part, values)
    engine.destroy()


def test_copies_of_param_groups_are_ordinary_parameters() -> None:
    ranks.run_ranks(_copied, 2)
