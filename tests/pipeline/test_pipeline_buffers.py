"""Buffers that later stages of a pipeline change are in checkpoints, in models that are written, and where ``generate`` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from tests.support import ranks, residual_layers

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "pipeline": {"stages": 2, "micro_batches": 1},
}


class Layer(nn.Module):
    """A layer with running statistics, a number among them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.norm(torch.tanh(self.up(hidden)).transpose(1, 2)).transpose(1, 2)


def _build(seed: int) -> nn.Module:
    return residual_layers.build(seed, Layer, count=4, width=8, tokens=16)


def _batch(step: int) -> dict[str, Tensor]:
    return residual_layers.batch(step, rows=4, tokens=16)


def _engine(seed: int) -> Any:
    model = _build(seed)
    return hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG)[0]


def check_buffers(folder: str) -> None:
    """Two steps, a checkpoint, two more after a load into another model: parameters and buffers are those of plain PyTorch."""
    plain = _build(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    first, second = _engine(0), None
    for step in range(4):
        plain(**_batch(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            first.save_checkpoint(folder, tag="both")
            first.destroy()
            dist.barrier()
            second = _engine(1)
            second.load_checkpoint(folder, tag="both")
        engine = second or first
        engine.backward(engine(**_batch(step))["loss"])
        engine.step()
    assert second is not None
    residual_layers.require_written(second, folder, plain, "after four steps:")
    second.destroy()


def test_buffers_of_later_stages(tmp_path: Path) -> None:
    ranks.run_ranks(check_buffers, 2, str(tmp_path))
