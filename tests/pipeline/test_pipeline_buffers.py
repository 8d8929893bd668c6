"""Buffers that later stages of a pipeline change are in checkpoints, in models that are written, and where ``generate`` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hf_zero
from tests.support import ranks

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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


def _build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net().train()


def _batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


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
    found = second._consolidated_16bit_state_dict()
    second.save_16bit_model(folder, "model.safetensors")
    if found is not None:
        from safetensors.torch import load_file

        for written in (found, load_file(f"{folder}/model.safetensors")):
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(written[name], value, rtol=1e-4, atol=1e-5, msg=name)
    second.destroy()


def test_buffers_of_later_stages(tmp_path: Path) -> None:
    ranks.run_ranks(check_buffers, 2, str(tmp_path))
