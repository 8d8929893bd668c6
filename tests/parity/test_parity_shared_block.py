"""Test a block that runs several times: in one forward (ALBERT), in two forwards before one backward (DPO), in two backwards before a
step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import ranks
from tests.support.models import CASES, LENGTH, Batch, Mlp, class_loss
from tests.support.parity import Forward, Run, check_training
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)


class Repeated(Mlp):
    """A model that runs its list of blocks twice, the second time in reverse order."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in [*self.blocks, *reversed(self.blocks)]:
            hidden = block(hidden)
        return self.head(hidden)


def _build_repeated() -> nn.Module:
    torch.manual_seed(0)
    return Repeated()


def _repeated(run: Run) -> None:
    check_training(_build_repeated, CASES["mlp"].rows, class_loss, run, label="blocks run twice")


class Renamed(Mlp):
    """A model that registers modules again, under names that come before its list of blocks: a block, a part of one, or a list of some."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        blocks = self._modules.pop("blocks")
        again = {"block": blocks[0], "part": next(blocks[1].children()), "list": nn.ModuleList([blocks[2], blocks[0]])}
        self.again = nn.ModuleDict({"one": blocks[1]}) if kind == "dict" else again[kind]
        self.blocks = blocks

    @staticmethod
    def build(kind: str) -> Renamed:
        torch.manual_seed(0)
        return Renamed(kind)


def _renamed(run: Run) -> None:
    for kind in ("block", "part", "list", "dict"):
        check_training(partial(Renamed.build, kind), CASES["mlp"].rows, class_loss, run, label=f"registered again: {kind}")


def _albert(run: Run) -> None:
    case = CASES["albert"]
    check_training(case.build, case.rows, case.forward, run, label="albert")


def preference_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss like DPO's: two forwards of the same model, one loss of both."""
    chosen = class_logits(model, batch["inputs"])
    rejected = class_logits(model, batch["inputs"].flip(1))
    return -functional.logsigmoid(chosen - rejected).mean()


def class_logits(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).float()[:, 0]


def _two_forwards(run: Run) -> None:
    case = CASES["mlp"]
    check_training(case.build, case.rows, preference_loss, run, label="two forwards, one backward")


def halves(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return two losses on the two halves of the features, each with a forward of its own."""
    left = torch.cat([batch["inputs"][:, : LENGTH // 2], torch.zeros_like(batch["inputs"][:, LENGTH // 2 :])], dim=1)
    first = class_loss(model, {**batch, "inputs": left})
    second = class_loss(model, {**batch, "inputs": batch["inputs"] - left})
    return first, second


def both_halves(model: nn.Module, batch: Batch) -> Tensor:
    first, second = halves(model, batch)
    return first + second


def forward_backward_twice(engine: Any, batch: Batch, _forward: Forward, _micro: int) -> float:
    """Run forward, backward, forward, backward, step."""
    left = torch.cat([batch["inputs"][:, : LENGTH // 2], torch.zeros_like(batch["inputs"][:, LENGTH // 2 :])], dim=1)
    first = class_loss(engine, {**batch, "inputs": left})
    engine.backward(first)
    second = class_loss(engine, {**batch, "inputs": batch["inputs"] - left})
    engine.backward(second)
    engine.step()
    return (first + second).item()


def two_graphs_backward_twice(engine: Any, batch: Batch, _forward: Forward, _micro: int) -> float:
    """Run both forwards first, then both backwards, then the step."""
    first, second = halves(engine, batch)
    engine.backward(first)
    engine.backward(second)
    engine.step()
    return (first + second).item()


def _two_backwards(run: Run, graphs_first: bool) -> None:
    case = CASES["mlp"]
    micro_step = two_graphs_backward_twice if graphs_first else forward_backward_twice
    check_training(case.build, case.rows, both_halves, run, micro_step=micro_step, label="two backwards, one step")


@pytest.mark.fast_rows("3-bf16", "0-fp32")
@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_blocks_that_run_twice_in_a_forward(stage: int, dtype: str) -> None:
    ranks.run_ranks(_repeated, 2, Run(stage=stage, dtype=dtype, accumulation=2))


@pytest.mark.parametrize("stage", slow_but(STAGES, 3))
def test_blocks_with_two_names(stage: int) -> None:
    ranks.run_ranks(_renamed, 2, Run(stage=stage))


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_albert(stage: int) -> None:
    ranks.run_ranks(_albert, 3, Run(stage=stage, dtype="bf16", accumulation=2, clip=0.1))


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_two_forwards_before_one_backward(stage: int) -> None:
    ranks.run_ranks(_two_forwards, 2, Run(stage=stage, accumulation=2))


@pytest.mark.fast_rows("2-True", "3-False")
@thinned(stage=STAGES, graphs_first=[False, True])
def test_two_backwards_before_a_step(stage: int, graphs_first: bool) -> None:
    ranks.run_ranks(_two_backwards, 2, Run(stage=stage), graphs_first)
