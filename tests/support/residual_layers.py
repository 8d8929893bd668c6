"""A small model of tokens around residual layers of a test's own, and the comparison of what an engine writes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class ResidualNet(nn.Module):
    """A table of tokens, layers, and a head.

    Args:
        layers: The layers, from (batch, tokens, width) to the same shape.
        width: Width of a token.
        tokens: Size of the vocabulary.
    """

    def __init__(self, layers: list[nn.Module], width: int, tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, tokens)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


def build(seed: int, layer: Callable[[], nn.Module], count: int, width: int, tokens: int) -> nn.Module:
    """Return a model in training mode with ``count`` layers, drawn with ``seed``."""
    torch.manual_seed(seed)
    return ResidualNet([layer() for _ in range(count)], width, tokens).train()


def batch(step: int, rows: int, tokens: int) -> dict[str, Tensor]:
    """Return ``rows`` sequences of 6 tokens, which are their own labels; the same on every rank."""
    drawn = torch.randint(0, tokens, (rows, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": drawn, "labels": drawn}


def require_written(engine: Any, folder: str, plain: nn.Module, what: str) -> None:
    """Check that the state dict and the file that ``engine`` writes have the values of ``plain``; collective."""
    from safetensors.torch import load_file

    found = engine._consolidated_16bit_state_dict()
    engine.save_16bit_model(folder, "model.safetensors")
    for written in (found, load_file(f"{folder}/model.safetensors")) if found is not None else ():
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(written[name], value, rtol=1e-4, atol=1e-5, msg=f"{what} {name}")
