"""Route tokens: choose the experts of each token and their weights, and drop tokens of experts with too many.

Sources: Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, section 2.2 (one expert, capacity, loss); Lepikhin et al. 2020,
"GShard", arXiv 2006.16668, algorithm 1 (two experts); Kim et al. 2021, "Scalable and Efficient MoE Training", arXiv 2109.10465, section 3.2
(random token selection); DeepSpeed's documentation of `deepspeed.moe`. The results equal DeepSpeed's, random numbers included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_zero.errors import ConfigError


class Routes(NamedTuple):
    """The assignment of tokens to experts.

    Attributes:
        loss: Auxiliary loss that balances experts, 0-dim.
        experts: Indices of the chosen experts, (tokens, choices) int64.
        kept: Whether the expert has room for a choice, (tokens, choices) bool.
        weights: Weights of the choices, (tokens, choices) fp32; 0 for choices that are not kept.
        places: Position of the token among the tokens that its expert takes, (tokens, choices) int64; undefined if not kept.
        counts: Number of tokens that chose each expert before any is dropped, (experts,) int64.
    """

    loss: torch.Tensor
    experts: torch.Tensor
    kept: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor


def gumbel_noise(like: torch.Tensor) -> torch.Tensor:
    """Return samples of the standard Gumbel distribution with shape and device of ``like``; the argmax of logits plus these samples is a
    draw.
    """
    zero, one = torch.tensor(0.0, device=like.device), torch.tensor(1.0, device=like.device)
    noise: torch.Tensor = torch.distributions.Gumbel(zero, one).rsample(like.shape)
    return noise


def one_choice(
    logits: torch.Tensor, capacity: int | None, used: torch.Tensor | None = None, noisy: bool = False, random_tokens: bool = True
) -> Routes:
    """Route each token to its best expert, weighted by the expert's probability.

    Args:
        logits: (tokens, experts) fp32.
        capacity: Tokens that an expert takes; None is all.
        used: (tokens,) 1 for tokens that are routed, 0 for padding; None is all.
        noisy: Whether the expert is drawn at random instead of the best one.
        random_tokens: If an expert has too many tokens, keep random ones instead of the first that torch.topk finds.
    """
    gates = F.softmax(logits, dim=1)
    chosen = torch.argmax(logits + gumbel_noise(logits) if noisy else gates, dim=1)
    mask = F.one_hot(chosen, gates.shape[1])
    if used is not None:
        mask = mask * used.reshape(-1, 1).to(mask.dtype)
    counts = mask.sum(dim=0)
    loss = (gates.mean(dim=0) * mask.float().mean(dim=0)).sum() * gates.shape[1]
    drawn = mask * torch.rand(mask.shape, device=mask.device) if random_tokens else mask
    if capacity is not None:
        mask = mask * _largest(drawn, capacity)
    chosen = chosen.unsqueeze(1)
    kept = mask.gather(1, chosen).bool()
    return Routes(loss, chosen, kept, gates.gather(1, chosen) * kept, (mask.cumsum(dim=0) - 1).gather(1, chosen), counts)


def two_choices(logits: torch.Tensor, capacity: int | None, sampled: bool = True) -> Routes:
    """Route each token to its best expert and a second one, weighted by their shares; second choices come after all first ones.

    Args:
        logits: (tokens, experts) fp32.
        capacity: First and second choices that an expert takes; None is all.
        sampled: Whether the second expert is drawn at random instead of the second best one.
    """
    gates = F.softmax(logits, dim=1)
    first = torch.argmax(gates, dim=1)
    masks = [F.one_hot(first, gates.shape[1])]
    others = logits + gumbel_noise(logits) if sampled else logits
    second = torch.argmax(others.masked_fill(masks[0].bool(), float("-inf")), dim=1)
    masks.append(F.one_hot(second, gates.shape[1]))
    counts = masks[0].sum(dim=0) + masks[1].sum(dim=0)
    loss = (gates.mean(dim=0) * masks[0].float().mean(dim=0)).mean() * gates.shape[1] ** 2
    places = [masks[0].cumsum(dim=0) - 1, masks[1].cumsum(dim=0) - 1 + masks[0].sum(dim=0, keepdim=True)]
    chosen = torch.stack([first, second], dim=1)
    place = torch.stack([found.gather(1, chosen[:, n : n + 1]).squeeze(1) for n, found in enumerate(places)], dim=1)
    kept = torch.ones_like(chosen, dtype=torch.bool) if capacity is None else place < capacity
    return Routes(loss, chosen, kept, _shares(gates.gather(1, chosen) * kept), place, counts)


def several_choices(logits: torch.Tensor, choices: int, capacity: int | None, keep: str = "probs") -> Routes:
    """Route each token to its ``choices`` best experts, weighted by their shares.

    Args:
        logits: (tokens, experts) fp32.
        choices: Number of experts per token.
        capacity: Tokens that an expert takes; None is all.
        keep: Tokens that an expert with too many keeps: "probs" for those with the largest probability, "position" for the first.

    Raises:
        ConfigError: ``keep`` is neither.
    """
    if keep not in ("probs", "position"):
        raise ConfigError(f'drop_policy is {keep!r}; "probs" and "position" are allowed')
    gates = F.softmax(logits, dim=1)
    top, chosen = torch.topk(gates, k=choices, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(dim=0)
    loss = (gates.mean(dim=0) * mask.float().mean(dim=0)).mean() * gates.shape[1] ** 2 / choices
    if capacity is not None and keep == "probs":
        mask = mask & _largest(torch.zeros_like(gates).scatter(1, chosen, top), capacity).bool()
    places = mask.cumsum(dim=0) - 1
    if capacity is not None and keep == "position":
        mask = mask & (places < capacity)
    kept = mask.gather(1, chosen)
    return Routes(loss, chosen, kept, _shares(top * kept), places.gather(1, chosen), counts)


def _largest(values: torch.Tensor, limit: int) -> torch.Tensor:
    """Return an int64 mask: 1 for the ``limit`` largest entries of each column, 0 for the others."""
    indices = torch.topk(values, k=min(limit, len(values)), dim=0).indices
    return torch.zeros(values.shape, dtype=torch.int64, device=values.device).scatter_(0, indices, 1)


def _shares(weights: torch.Tensor) -> torch.Tensor:
    """Return each token's weights divided by their sum; zeros where all weights are 0."""
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
