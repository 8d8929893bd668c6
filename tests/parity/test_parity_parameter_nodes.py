"""Nodes of parameters in the graph that are made while the parameters are empty: functions that are given them, and hooks of scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from tests.support import ranks
from tests.support.models import CASES, Batch, Mlp, class_loss
from tests.support.parity import Forward, Run, check_training
from tests.support.rows import slow_but


class _Recomputed(torch.autograd.Function):
    """Checkpointing that gives gradients to parameters itself, as that of guided-diffusion and the adjoint method of torchdiffeq do."""

    @staticmethod
    def forward(ctx: Any, block: Callable[[Tensor], Tensor], hidden: Tensor, *params: Tensor) -> Tensor:  # type: ignore[override]
        ctx.block, ctx.params = block, params
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return block(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(hidden)
        return (None, *torch.autograd.grad(output, (hidden, *ctx.params), grad))


class Adjoint(Mlp):
    """A model that gives the parameters of its blocks to a function outside of the blocks, and that has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = _Recomputed.apply(block, hidden, *block.parameters())  # type: ignore[no-untyped-call]
        logits: Tensor = self.head(hidden) * self.gain
        return logits


def _build_adjoint() -> nn.Module:
    torch.manual_seed(0)
    return Adjoint()


def _hooked(engine: Any, batch: Batch, forward: Forward, _micro: int) -> float:
    """Train with two hooks that make nodes of parameters while these are empty."""
    first, second = engine.module.blocks[0].up.weight, engine.module.blocks[1].up.weight
    seen = []
    several = register_multi_grad_hook([first, engine.module.head.bias], lambda grads: seen.append(len(grads)))
    node = second.expand_as(second).grad_fn.next_functions[0][0]  # autograd holds it by a weak reference
    one = node.register_hook(lambda *_: seen.append(1))
    loss = forward(engine, batch)
    engine.backward(loss)
    engine.step()
    several.remove()
    one.remove()
    assert sorted(seen) == [1, 2]
    return loss.item()


def _nodes(run: Run) -> None:
    case = CASES["mlp"]
    check_training(_build_adjoint, case.rows, class_loss, run, label="parameters given to a function")
    check_training(case.build, case.rows, class_loss, run, micro_step=_hooked, label="hooks on nodes")


@pytest.mark.parametrize("stage", slow_but((2, 3), 3))
def test_nodes_of_empty_parameters(stage: int) -> None:
    ranks.run_ranks(_nodes, 2, Run(stage=stage))
