"""Layers with lists of experts, in the forms that remote code has: which tokens chose an expert is looked up in other ways."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.experts import Expert

WIDTH, COUNT, CHOICES, VOCAB = 16, 4, 2, 64


class Layer(nn.Module):
    """A router and experts; forms say how the two meet."""

    choices = CHOICES

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = nn.ModuleList(Expert(WIDTH) for _ in range(COUNT))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1, dtype=torch.float).topk(self.choices, dim=-1)
        return self.mixed(tokens, weights.to(tokens.dtype), chosen).view_as(hidden)

    def mixed(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """(n, width) of the tokens (n, width) and the experts that they chose, (n, choices)."""
        raise NotImplementedError


class Masks(Layer):
    """Truth values pick tokens and take results: backward has to know them too."""

    def mixed(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        repeated, flat = tokens.repeat_interleave(self.choices, dim=0), chosen.flatten()
        results = torch.empty_like(repeated)
        for index, expert in enumerate(self.experts):
            results[flat == index] = expert(repeated[flat == index])
        return (results.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class Counts(Layer):
    """Tokens are sorted by expert, and counted."""

    def mixed(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        counts = chosen.new_zeros((len(chosen), COUNT)).scatter_(1, chosen, 1).sum(dim=0).tolist()
        order = chosen.flatten().argsort()
        parts = tokens[order // self.choices].split(counts)
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
        return (torch.empty_like(results).index_copy(0, order, results).view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class Switch(Layer):
    """One expert for each token, whose places are looked up."""

    choices = 1

    def mixed(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed = tokens.clone()
        for index, expert in enumerate(self.experts):
            if (chosen == index).any():
                places = (chosen == index).nonzero()[:, 0]
                mixed[places] = expert(tokens[places]) * weights[places]
        return mixed


class Model(nn.Module):
    """An embedding, two layers of one form, and a head."""

    def __init__(self, form: type[Layer]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(form() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def build(form: str) -> nn.Module:
    """The model with layers of ``form``."""
    return Model({"masks": Masks, "counts": Counts, "switch": Switch}[form])
