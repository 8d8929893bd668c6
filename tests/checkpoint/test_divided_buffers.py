"""Buffers that tensor-parallel ranks divide are whole in checkpoints and in models that are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu

import hf_zero
from tests.support import ranks, residual_layers

SPLIT = {"tensor_parallel": {"autotp_size": 2}}


class Layer(nn.Module):
    """A layer that keeps an average of its inner values, whose dimension tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, hidden: Tensor) -> Tensor:
        inside = gelu(self.up(self.norm(hidden)))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(inside.mean((0, 1)), 0.1)
        return hidden + self.down(inside - self.mean)


def _build(seed: int) -> nn.Module:
    return residual_layers.build(seed, Layer, count=2, width=16, tokens=32)


def _batch(step: int) -> dict[str, Tensor]:
    return residual_layers.batch(step, rows=2, tokens=32)


def _engine(seed: int, sections: dict[str, Any]) -> Any:
    model = _build(seed)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}, **sections}
    return hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]


def check_divided(folder: str) -> None:
    """Two steps, and a checkpoint, which loads whole and in parts; whole buffers of a checkpoint load in parts, too."""
    plain = _build(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = _engine(0, SPLIT)
    for step in range(2):
        plain(**_batch(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(**_batch(step))["loss"])
        engine.step()
    assert engine.module.layers[0].mean.shape == (16,)
    for tag, sections in (("parts", {}), ("whole", SPLIT), ("parts again", SPLIT)):
        residual_layers.require_written(engine, f"{folder}/model of {tag}", plain, tag)
        own = engine.module.layers[0].mean.clone()
        engine.save_checkpoint(folder, tag=tag)
        engine.destroy()
        dist.barrier()
        engine = _engine(1, sections)
        engine.load_checkpoint(folder, tag=tag)
        if tag == "parts again":
            assert torch.equal(engine.module.layers[0].mean, own)
    engine.destroy()


def test_divided_buffers(tmp_path: Path) -> None:
    ranks.run_ranks(check_divided, 2, str(tmp_path))
