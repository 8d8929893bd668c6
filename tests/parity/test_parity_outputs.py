"""Test outputs and inputs of modules: tuples, dicts, dataclasses, keyword tensors, inputs without gradient, in-place changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import ranks
from tests.support.models import CASES, CLASSES, LENGTH, Batch, Block, Mlp, class_loss
from tests.support.parity import Run, check_training
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)


@dataclass
class BlockOutput:
    """A plain dataclass, not a ModelOutput: it is not registered with pytree."""

    hidden: Tensor
    extra: dict[str, Any]


class TupleBlock(Block):
    def forward(self, hidden: Tensor) -> tuple[Tensor, None, list[Tensor]]:
        result = super().forward(hidden)
        return result, None, [result * 2]


class DictBlock(Block):
    def forward(self, hidden: Tensor) -> dict[str, Any]:
        result = super().forward(hidden)
        return {"hidden": result, "nested": {"also": (result.sum(dim=1), "text", 3)}}


class DataclassBlock(Block):
    def forward(self, hidden: Tensor) -> BlockOutput:
        result = super().forward(hidden)
        return BlockOutput(result, {"also": [result.mean(dim=1)]})


class KeywordBlock(Block):
    """A block that is called with keyword arguments only, one of them a nested container."""

    def forward(self, *, state: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        return super().forward(state["hidden"]) * scale


class InPlaceBlock(Block):
    """A block that changes its own output in place and returns a view of it."""

    def forward(self, hidden: Tensor) -> Tensor:
        result = super().forward(hidden)
        result.mul_(0.5)
        return result.view(result.shape[0], 1, -1)[:, 0]


class WeightViews(Block):
    """A block that uses views, slices and a no-grad statistic of its weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        top, bottom = self.up.weight.chunk(2)  # (width, width) each
        with torch.no_grad():
            norm = self.down.weight.norm().clamp(min=1.0)
        return hidden + functional.linear(hidden, top) - functional.linear(hidden, bottom.t().t()) / norm + self.down(self.up(hidden))


def unpack(output: Any) -> Tensor:
    """Return the hidden state plus a small part of every other output, so that each gets a gradient."""
    if isinstance(output, tuple):
        return output[0] + 0.1 * output[2][0]
    if isinstance(output, dict):
        return output["hidden"] + 0.1 * output["nested"]["also"][0].unsqueeze(1)
    if isinstance(output, BlockOutput):
        return output.hidden + 0.1 * output.extra["also"][0].unsqueeze(1)
    return output


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.entry = nn.Linear(LENGTH, 16)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(3))
        self.head = nn.Linear(16, CLASSES)
        self.keyword = kind == "keyword"

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = unpack(block(state={"hidden": hidden}, scale=0.9) if self.keyword else block(hidden))
        return self.head(hidden)


BLOCKS: dict[str, type[Block]] = {
    "tuple": TupleBlock,
    "dict": DictBlock,
    "dataclass": DataclassBlock,
    "keyword": KeywordBlock,
    "in place": InPlaceBlock,
    "weight views": WeightViews,
}


class NoInputGradient(nn.Module):
    """A model whose first block gets the data itself, which needs no gradient; the second block's input is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(LENGTH) for _ in range(3))
        self.head = nn.Linear(LENGTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.blocks[0](inputs)
        second = self.blocks[1](first.detach())
        return self.head(self.blocks[2](second)) + self.head(first)


class PartOfTheOutput(Mlp):
    """A block whose output is used only without gradient: its parameters' gradient is zero."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        hidden = self.blocks[0](hidden)
        hidden = hidden + self.blocks[1](hidden).detach()
        return self.head(self.blocks[2](hidden))


def _structured(kind: str, run: Run) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Structured(kind)

    check_training(build, CASES["mlp"].rows, class_loss, run, label=kind)


def _model(kind: type[nn.Module], run: Run) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    check_training(build, CASES["mlp"].rows, class_loss, run, label=kind.__name__)


def _no_loss_from_one_rank(run: Run) -> None:
    """Mask one rank's complete batch, so that its loss does not depend on the blocks: it still takes part in every collective."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["inputs"]).float()
        per_row = functional.cross_entropy(logits, batch["labels"], reduction="none")
        return (per_row * batch["mask"]).sum() / 2

    def feed(step: int, micro: int, rank: int) -> Batch:
        return {**CASES["mlp"].rows(step, micro, rank), "mask": torch.full((2,), float(rank))}

    check_training(CASES["mlp"].build, feed, forward, run, label="masked rank")


@pytest.mark.fast_rows("0-tuple", "2-dict", "3-dataclass", "3-keyword", "3-in place", "3-weight views")
@thinned(stage=STAGES, kind=list(BLOCKS))
def test_what_blocks_return_and_take(kind: str, stage: int) -> None:
    ranks.run_ranks(_structured, 2, kind, Run(stage=stage, accumulation=2, clip=0.1))


@pytest.mark.fast_rows("3-NoInputGradient-fp32", "2-PartOfTheOutput-bf16")
@thinned(stage=STAGES, kind=[NoInputGradient, PartOfTheOutput], dtype=["fp32", "bf16"])
def test_blocks_without_input_or_output_gradient(kind: type[nn.Module], stage: int, dtype: str) -> None:
    ranks.run_ranks(_model, 2, kind, Run(stage=stage, dtype=dtype, accumulation=2))


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_a_rank_whose_loss_is_masked(stage: int) -> None:
    ranks.run_ranks(_no_loss_from_one_rank, 2, Run(stage=stage, accumulation=2))
