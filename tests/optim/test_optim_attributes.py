"""Optimizers that treat parameters in other ways than torch's do (attributes, assigned values): plain PyTorch's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.core.optimizer.clones import clone
from hf_zero.errors import UnsupportedError
from hf_zero.optim.elementwise import needs_whole_tensors
from tests.support import ranks


class Scaled(torch.optim.Optimizer):
    """SGD with a factor of the rate that each parameter may carry."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * getattr(param, "lr_mul", 1.0))


class Assigning(torch.optim.Optimizer):
    """SGD for parameters that require a gradient, which assigns new values to ``data``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


class Swapping(torch.optim.Optimizer):
    """Heavy ball, which exchanges the memory of a parameter with that of its last value."""

    def __init__(self, params: Any, lr: float = 0.1, normed: bool = False) -> None:
        super().__init__(params, {"lr": lr, "normed": normed})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    last = self.state[param].setdefault("last", param.detach().clone())
                    grad = param.grad / (1 + param.grad.norm()) if group["normed"] else param.grad
                    new = last.mul_(-0.5).add_(param, alpha=1.5).sub_(grad, alpha=group["lr"])
                    self.state[param]["last"], param.data = param.data, new


class SwappingWhole(Swapping):
    """The same over whole tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, normed=True)


def _model(**attributes: float) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    for name, value in attributes.items():
        setattr(model[0].weight, name, value)
        setattr(model[2].bias, name, 3 * value)
    return model


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def _trains(kind: type[Any], zero: dict[str, Any]) -> None:
    model, plain = _model(lr_mul=0.2), _model(lr_mul=0.2)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
    engine: Any = hf_zero.initialize(model=model, optimizer=kind(model.parameters()), config=config)[0]
    optimizer = kind(plain.parameters())
    for step in range(3):
        engine.backward(_loss(engine, step, ranks.rank()))
        engine.step()
        for rank in range(ranks.world()):
            (_loss(plain, step, rank) / ranks.world()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for param, wanted in zip(engine.parameters(), plain.parameters(), strict=True):
        with hf_zero.zero.GatheredParameters(param):
            torch.testing.assert_close(param.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_attributes_of_parameters_are_read(stage: int) -> None:
    ranks.run_ranks(_trains, 2, Scaled, {"stage": stage})


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"stage": 3}], ids=str)
def test_assigned_values_of_parameters_that_require_gradients_count(zero: dict[str, Any]) -> None:
    ranks.run_ranks(_trains, 2, Assigning, zero)


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}], ids=str)
@pytest.mark.parametrize("kind", [Swapping, SwappingWhole])
def test_exchanged_memory_keeps_both_values(kind: type[Any], zero: dict[str, Any]) -> None:
    ranks.run_ranks(_trains, 2, kind, zero)


def test_only_attributes_that_the_step_looks_for_need_whole_tensors() -> None:
    assert needs_whole_tensors(Scaled(_model(lr_mul=2.0).parameters()))
    assert not needs_whole_tensors(Scaled(_model(tag=2.0).parameters()))
    with pytest.raises(UnsupportedError, match="optimizer Scaled reads 'lr_mul', an attribute of parameters of the model"):
        needs_whole_tensors(Scaled(_model(lr_mul=2.0).parameters()), shards_only=True)


class _Looked(torch.optim.SGD):
    """An optimizer in an attribute of another: while its groups are read, the script's thread gives the other one an attribute."""

    holder: torch.optim.Optimizer | None = None

    def __getattribute__(self, name: str) -> Any:
        holder = super().__getattribute__("holder")
        if name == "param_groups" and holder is not None:
            vars(holder)["step"] = holder.step
        return super().__getattribute__(name)


def test_a_clone_is_made_while_the_scripts_thread_sets_an_attribute() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([param], lr=0.1)
    optimizer.first = optimizer.last = inner = _Looked([param], lr=0.1)
    inner.holder = optimizer
    made: Any = clone(optimizer, [{**optimizer.param_groups[0], "params": [torch.ones(2)]}])
    assert made is not optimizer and made.first is made.last is not inner and "step" in vars(optimizer)
