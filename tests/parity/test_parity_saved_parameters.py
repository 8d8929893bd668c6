"""Test functions that save a parameter itself for their backward, outside of its module's forward: they read its values (ZeRO stage 3)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hf_zero
from tests.support import ranks
from tests.support.models import Batch, Block
from tests.support.parity import Run, check_training, initialize
from tests.support.rows import thinned

VOCABULARY, WIDTH = 70_000, 16  # more than grouping.LARGE_MODULE_NUMEL elements
# So small that nothing stays gathered between forward and backward.
TIGHT = {
    "stage3_max_live_parameters": 1000,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 1000,
}
ROOMY = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}


BEHIND = ("gathered", "bare", "frozen")  # the loss, behind the forward, reads the head


class Product(torch.autograd.Function):
    """The function ``hidden @ weight.T``. It saves the parameter, not a view of its memory as torch's own operations do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.detach().T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ hidden.flatten(0, -2)


class Tall(nn.Module):
    """Blocks between a large embedding and the matrix that ``kind`` names: of the head, of the embedding, of a block."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        vocabulary = 50 if kind == "block" else VOCABULARY  # beside a large table blocks this small would belong to the root
        self.embed = nn.Embedding(vocabulary, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        if kind != "embedding":
            self.head = nn.Linear(WIDTH, vocabulary, bias=False).requires_grad_(kind != "frozen")

    def forward(self, indices: Tensor) -> Tensor:
        hidden: Tensor = self.embed(indices)
        for block in self.blocks:
            hidden = block(hidden)
        if self.kind == "block":
            wide = Product.apply(hidden, self.blocks[0].up.weight)
            return self.head(hidden + wide[..., :WIDTH])  # type: ignore[no-any-return]
        if self.kind in BEHIND:
            return hidden
        return Product.apply(hidden, self.embed.weight if self.kind == "embedding" else self.head.weight)


def _rows(step: int, micro: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return {"indices": torch.randint(0, 50, (2, 4), generator=generator)}


def _loss(model: Any, batch: Batch) -> Tensor:
    out = model(batch["indices"])
    inner = getattr(model, "module", model)
    if inner.kind in BEHIND:
        gathers = inner is not model and inner.kind == "gathered"
        with hf_zero.zero.GatheredParameters([inner.head.weight]) if gathers else nullcontext():
            out = Product.apply(out, inner.head.weight)
    return functional.cross_entropy(out.flatten(0, 1), batch["indices"].roll(1, 1).flatten())


class Tiles(torch.autograd.Function):
    """A function that makes no tile of an empty weight, so that no operation fails."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return sum(((hidden @ rows.T).exp().sum() for rows in weight.split(10_000) if len(rows)), hidden.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return torch.zeros_like(hidden), torch.zeros_like(weight)


def _taken_before(kind: str) -> str:
    engine = initialize(Tall(kind), Run(3, extra={"zero_optimization": TIGHT}))
    weight = engine.module.head.weight
    with pytest.raises(Exception) as caught:
        engine.backward(Tiles.apply(engine(_rows(0, 0, ranks.rank())["indices"]), weight).sum())
    engine.destroy()
    return str(caught.value)


def _trains(kind: str, limits: dict[str, int]) -> None:
    run = Run(3, accumulation=2, clip=0.1, extra={"zero_optimization": limits})
    check_training(lambda: Tall(kind), _rows, _loss, run, label=kind)


@pytest.mark.fast_rows("tight-gathered", "tight-frozen", "roomy-head")
@thinned("tight", limits=["tight", "roomy"], kind=["head", "embedding", "block", *BEHIND])
def test_a_function_finds_the_parameter_it_saved(limits: str, kind: str) -> None:
    ranks.run_ranks(_trains, 2, kind, {"tight": TIGHT, "roomy": ROOMY}[limits])


def test_a_parameter_taken_before_the_forward_is_refused() -> None:
    for said in ranks.run_ranks(_taken_before, 2, "bare"):
        assert "head.weight" in said and "GatheredParameters" in said
