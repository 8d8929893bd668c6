"""Blocks so small that a step over many of them consists of the host's work alone."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 16


class Block(nn.Module):
    """Four parameters, two of them in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().mean()
