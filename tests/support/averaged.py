"""A small model whose weights are averaged: parameters in blocks, statistics, a frozen layer; one training step; and all its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hf_zero
from hf_zero.utils import safe_get_full_fp32_param


class Net(nn.Module):
    """Model with blocks, statistics of a normalisation, an integer counter, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 33)
        self.norm = nn.BatchNorm1d(33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Linear(33, 33) for _ in range(2)])
        self.head = nn.Linear(33, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.frozen(self.norm(self.entry(inputs)))
        for block in self.blocks:
            found = functional.gelu(block(found))
        return self.head(found)


def build() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net()


def step(engine: Any, number: int, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(4, 6, generator=generator).to(dtype)
    engine.backward(functional.mse_loss(engine(inputs).float(), torch.randn(4, 3, generator=generator)))
    engine.step()


def weights(engine: Any) -> dict[str, Tensor]:
    """Return the whole parameters in the training dtype, the masters, and the buffers; collective."""
    named = dict(engine.module.named_parameters())
    with hf_zero.zero.GatheredParameters(list(named.values())):
        found = {name: param.detach().clone() for name, param in named.items()}
    found |= {f"{name} (master)": value.clone() for name, param in named.items() if (value := safe_get_full_fp32_param(param)) is not None}
    return found | {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), f"{what}: {name}"
