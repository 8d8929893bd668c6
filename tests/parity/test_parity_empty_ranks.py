"""Test empty ranks: without rows in a step, without elements of a unit, or without trained parameters outside of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import ranks
from tests.support.models import Batch
from tests.support.parity import Difference, Run, check_training, limits_of

WORLD = 4
_QGZ = {"zero_quantized_gradients": True}
_QUANTIZED = _QGZ | {"zero_quantized_weights": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "shard groups": {"zero_optimization": {"mics_shard_size": 2}},
    "shard groups, stage 1": {"zero_optimization": {"stage": 1, "mics_shard_size": 2}},
    "secondary copy": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    "node": {"hf_zero": {"param_shard_size": 2}},
    "host": {"zero_optimization": {"mics_shard_size": 2, "offload_optimizer": {"device": "cpu"}}},
    "codes": {"zero_optimization": _QUANTIZED},
    "codes, stage 2": {"zero_optimization": {"stage": 2, **_QGZ}},
    "codes, secondary copy": {"zero_optimization": _QUANTIZED | {"zero_hpz_partition_size": 2}},
    "codes, shard groups": {"zero_optimization": _QUANTIZED | {"mics_shard_size": 2}},
}
# Codes of 4 bits beside no codes: what a step of AdamW may differ by. That nobody is left out shows in the masters of all.
CODED = Difference(loss=0.05, norm=0.2, weights=0.15, masters=0.15)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 1, or alone; then a block of one element."""

    def __init__(self, width: int, adapted: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        if adapted:
            self.down, self.up = nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.base(hidden)
        return functional.gelu(out + self.up(self.down(hidden)) if hasattr(self, "up") else out)


class OneElement(nn.Module):
    """A unit with fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


def adapted() -> nn.Module:
    """Return a model in which only an adapter of one layer is trained, 2 x 8 elements: less than a rank's part of a padded unit."""
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(8, number == 1) for number in range(3)))


def slivers() -> nn.Module:
    """Return a model with blocks of one element between layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), OneElement(), nn.Linear(8, 8), OneElement())


MODELS = {"adapted": adapted, "slivers": slivers}


def rows(step: int, micro: int, rank: int) -> Batch:
    """Return rows: rank 3 has none in the first micro-step, rank 0 none in the second, and only rank 1 has rows in the third."""
    empty = rank == 3 if (step + micro) % 3 == 0 else rank == 0 if (step + micro) % 3 == 1 else rank != 1
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return {"inputs": torch.randn(0 if empty else 2, 8, generator=generator)}


def summed(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss that is 0 for no rows, with a graph."""
    return model(batch["inputs"]).float().square().sum() / 16


def _trained(layouts: Sequence[str]) -> None:
    for layout in layouts:
        extra = LAYOUTS[layout]
        coded = layout.startswith("codes")
        dtype = "bf16" if coded else "fp32"
        run = Run(stage=extra.get("zero_optimization", {}).get("stage", 3), dtype=dtype, accumulation=2, extra=extra)
        for name, build in MODELS.items():
            limit = CODED if coded else limits_of(run)
            check_training(build, rows, summed, run, label=f"{name}, {layout},", limit=limit)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_rows_and_no_elements(every: bool) -> None:
    fast = ("flat", "node", "host", "codes, secondary copy")
    ranks.run_ranks(_trained, WORLD, tuple(LAYOUTS) if every else fast, env={"LOCAL_WORLD_SIZE": "2"})
