"""Test derivatives with respect to inputs: torch.autograd.grad and torch.func through the engine, which train nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.utils.checkpoint import checkpoint

import hf_zero
from tests.support import ranks
from tests.support.parity import DTYPES, Run, Trace, check_bitwise, collect, initialize, train
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)
Model = Callable[..., Tensor]


class Tower(nn.Module):
    """Blocks that stage 3 reshards, in front of a loss of one row, (8,) -> ()."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = torch.tanh(y)
        return self.head(x).float().square().sum()


def build(**kwargs: Any) -> Tower:
    torch.manual_seed(0)
    return Tower(**kwargs)


def by_autograd(model: Model, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(model(leaf), leaf)[0]


def twice_over_one_graph(model: Model, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    loss = model(leaf)
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0] + torch.autograd.grad(loss, leaf)[0]


# Gradient functions are given the engine inside a lambda: torch.func copies a callable's attributes.
WAYS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "autograd": by_autograd,
    "twice": twice_over_one_graph,
    "grad": lambda model, x: func.grad(lambda row: model(row))(x),
    "grad_and_value": lambda model, x: torch.stack([part.sum() for part in func.grad_and_value(lambda row: model(row))(x)]),
    "jacrev": lambda model, x: func.jacrev(lambda row: model(row))(x),
    "jacfwd": lambda model, x: func.jacfwd(lambda row: model(row))(x),
    "hessian": lambda model, x: func.hessian(lambda row: model(row))(x),
    "vmap": lambda model, x: func.vmap(lambda row: model(row))(torch.stack([x, -x])),
    "vmap of grad": lambda model, x: func.vmap(func.grad(lambda row: model(row)))(torch.stack([x, -x])),
    "vmap of jacrev": lambda model, x: func.vmap(func.jacrev(lambda row: model(row)))(torch.stack([x, -x])),
}


def _right_and_unscaled(stage: int, dtype: str) -> None:
    model = build()
    plain = copy.deepcopy(model).to(ranks.device(), DTYPES[dtype])
    engine = initialize(model, Run(stage, dtype))
    assert engine.optimizer.needs_scaler() == (dtype == "fp16")
    x = torch.randn(8, device=ranks.device()).to(DTYPES[dtype]) + ranks.rank()
    for name, way in WAYS.items():
        torch.testing.assert_close(way(engine, x), way(plain, x), msg=lambda text, name=name: f"{name}: {text}")
    assert engine.micro_steps == 0 and not engine.accumulation.awaits_step
    for param in engine.module.parameters():
        assert param.grad is None and hf_zero.utils.safe_get_full_grad(param) is None
    engine.destroy()


@pytest.mark.fast_rows("3-fp16", "2-fp32")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_gradients_of_inputs_are_right_and_unscaled(stage: int, dtype: str) -> None:
    ranks.run_ranks(_right_and_unscaled, 2, stage, dtype)


def _row(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return {"x": torch.randn(8, generator=generator, device="cpu").to(ranks.device())}


def _nothing_trained(run: Run) -> None:
    """Run the same training with and without derivatives between forward, backward and step."""

    def looking(engine: Any, batch: dict[str, Tensor], forward: Any, _micro: int) -> float:
        by_autograd(engine, batch["x"])
        loss = forward(engine, batch)
        WAYS["vmap of grad"](engine, batch["x"])
        engine.backward(loss)
        WAYS["grad"](engine, batch["x"])
        engine.step()
        return loss.item()

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"])

    def plain(engine: Any, batch: dict[str, Tensor], forward: Any, _micro: int) -> float:
        loss = forward(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    traces = []
    for micro_step in (plain, looking):
        engine = initialize(build(), run)
        traces.append(train(engine, _row, forward, run, micro_step))
        assert engine.global_steps == run.steps and engine.micro_steps == run.steps * run.accumulation
        engine.destroy()
    check_bitwise(traces[1], traces[0], f"stage {run.stage}")


IN_BETWEEN = [Run(stage, accumulation=2) for stage in STAGES] + [Run(3, "fp16", accumulation=2)]


@pytest.mark.parametrize("run", slow_but(IN_BETWEEN, IN_BETWEEN[0], IN_BETWEEN[2], IN_BETWEEN[-1]), ids=str)
def test_derivatives_in_between_change_no_training(run: Run) -> None:
    ranks.run_ranks(_nothing_trained, 2, run)


def _recomputed(stage: int) -> None:
    """Recompute activations inside a backward for inputs, which gathers; reentrant checkpointing hides all parameters from the outer
    graph.
    """
    x = torch.randn(8, device=ranks.device())
    engine = initialize(build(reentrant=False), Run(stage))
    torch.testing.assert_close(by_autograd(engine, x), by_autograd(build().to(ranks.device()), x))
    assert engine.micro_steps == 0
    engine.destroy()
    hidden, seen = build(reentrant=True), build()
    for model in (hidden, seen):
        model.head.requires_grad_(False)
    traces = []
    for model in (hidden, seen):
        engine = initialize(model, Run(stage))
        engine(x.clone().requires_grad_()).backward()
        assert engine.micro_steps == 1
        engine.step()
        traces.append(collect(engine, Trace()))
        engine.destroy()
    check_bitwise(*traces, "reentrant")


@pytest.mark.slow  # fast: `test_gradients_of_inputs_are_right_and_unscaled`
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_recomputation_in_a_backward_for_inputs(stage: int) -> None:
    ranks.run_ranks(_recomputed, 2, stage)


def _penalty(stage: int, transform: bool, gather: bool) -> None:
    """Train on a loss made of gradients; at stage 3 the model stays unsharded until its backward, or a script keeps it so."""
    model = build()
    plain = copy.deepcopy(model).to(ranks.device())
    engine = initialize(model, Run(stage))
    x = torch.randn(8, device=ranks.device())
    if transform:
        with torch.no_grad():  # no backward can follow
            func.grad(lambda row: engine(row))(x)
        assert stage < 3 or not any(param.numel() for param in engine.module.parameters())

    def penalty(model: Model) -> Tensor:
        if transform:
            return func.grad(lambda row: model(row))(x).square().sum()
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(model(leaf), leaf, create_graph=True)[0].square().sum()

    with hf_zero.zero.GatheredParameters(list(engine.parameters()) if gather else ()):
        loss = penalty(engine)
        engine(x)  # a forward in between
        engine.backward(loss)
    assert gather or stage < 3 or not any(param.numel() for param in engine.module.parameters())
    penalty(plain).backward()
    for name, param in plain.named_parameters():
        grad = hf_zero.utils.safe_get_full_grad(engine.module.get_parameter(name))
        torch.testing.assert_close(grad, torch.zeros_like(param) if param.grad is None else param.grad)
    assert engine.micro_steps == 1
    engine.destroy()


@pytest.mark.fast_rows("3-autograd", "2-gathered", "3-torch.func")
@pytest.mark.parametrize(
    ("transform", "gather"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["autograd", "gathered", "torch.func", "torch.func gathered"],
)
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_gradient_penalties(stage: int, transform: bool, gather: bool) -> None:
    ranks.run_ranks(_penalty, 2, stage, transform, gather)


def _of_parameters(stage: int) -> None:
    """Check that torch.autograd.grad with respect to parameters returns this rank's own gradients, and trains nothing."""
    model = build()
    plain = copy.deepcopy(model).to(ranks.device())
    engine = initialize(model, Run(stage))
    x = torch.randn(8, device=ranks.device()) + ranks.rank()
    mine = torch.autograd.grad(engine(x), list(engine.module.parameters()))
    for grad, wanted in zip(mine, torch.autograd.grad(plain(x), list(plain.parameters())), strict=True):
        torch.testing.assert_close(grad, wanted)
    assert engine.micro_steps == 0
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_gradients_of_parameters_go_to_the_caller(stage: int) -> None:
    ranks.run_ranks(_of_parameters, 2, stage)
