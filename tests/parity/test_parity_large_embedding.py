"""Test an embedding or head large enough to be a block of its own: read by its own forward, by a subclass', or by the model's root."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_zero import observe
from tests.support import ranks
from tests.support.models import Batch, Block
from tests.support.parity import Run, check_training, initialize
from tests.support.rows import thinned

VOCABULARY, WIDTH = 70_000, 16  # more than grouping.LARGE_MODULE_NUMEL elements
# So small that nothing stays gathered between forward and backward.
TIGHT = {"stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1000}
ROOMY = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}


class Reader(nn.Embedding):
    """An embedding whose backward reads the complete table, unlike that of a plain embedding."""

    def forward(self, indices: Tensor) -> Tensor:
        rows = super().forward(indices)
        return rows + 0.1 * (rows @ self.weight[:WIDTH])


class Tall(nn.Module):
    """Blocks between a large embedding and the output that ``kind`` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed = (Reader if kind == "subclass" else nn.Embedding)(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        if kind != "root reads the embedding":
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.embed(indices)
        for block in self.blocks:
            hidden = block(hidden)
        if self.kind == "root reads the embedding":
            return functional.linear(hidden, self.embed.weight)
        if self.kind == "root reads the head":  # as fused losses do
            return functional.linear(hidden, self.head.weight)
        return self.head(hidden)


def _rows(step: int, micro: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return {"indices": torch.randint(0, 50, (2, 4), generator=generator)}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["indices"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["indices"].roll(1, 1).flatten())


KINDS = ["plain", "subclass", "tied", "root reads the embedding", "root reads the head"]


def _trains(kind: str, limits: dict[str, int]) -> None:
    run = Run(3, accumulation=2, clip=0.1, extra={"zero_optimization": limits})
    check_training(lambda: Tall(kind), _rows, _loss, run, label=kind)


@pytest.mark.fast_rows("tight-tied", "roomy-plain")
@thinned("tight", limits=["tight", "roomy"], kind=KINDS)
def test_large_embedding_trains(limits: str, kind: str) -> None:
    ranks.run_ranks(_trains, 2, kind, {"tight": TIGHT, "roomy": ROOMY}[limits])


def _gathers(kind: str) -> list[str]:
    """Return the gathers of the large modules in one micro-step, after the first has recorded the order."""
    engine = initialize(Tall(kind), Run(3, extra={"zero_optimization": TIGHT}))
    for step in range(2):
        with observe.record_labels() as labels:
            engine.backward(_loss(engine, _rows(step, 0, ranks.rank())))
        assert engine.module.embed.weight.numel() == 0, "released, and its shape with it"
        engine.step()
    engine.destroy()
    return [label for label in labels if "gathering" in label and ("embed" in label or "head" in label)]


def test_a_plain_embedding_is_gathered_once() -> None:
    gathering = "hf_zero::gathering ({})".format
    for found in ranks.run_ranks(_gathers, 2, "plain"):
        assert found == [gathering("embed"), gathering("head"), gathering("head")]
    for found in ranks.run_ranks(_gathers, 2, "subclass"):
        assert sorted(found) == [gathering("embed")] * 2 + [gathering("head")] * 2
