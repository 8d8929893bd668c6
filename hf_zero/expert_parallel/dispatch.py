"""Tokens to their experts and the results back.

Source of the scheme: Lepikhin et al. 2020, "GShard", arXiv 2006.16668, section 3.2; without capacities: nothing is padded, no token is
dropped. The ranks tell each other how many tokens come for each expert (one small all-to-all), then send them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.expert_parallel.exchange import SharedTokens, exchange, tie
from hf_zero.system.planning import has_values

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens (n, width), counts (ranks, experts here)) -> results (n, width). Tokens lie by rank of origin, and by expert within one. There
may be none, for one expert or for all: their weights get gradients of zero ([Note: gradients of idle experts])."""


@dataclass(eq=False)
class Shares:
    """Which experts each rank of a group holds: equal runs of neighbours.

    Attributes:
        collectives: The ranks that hold all experts together.
        count: Number of experts.
        shared: How ranks that have the same tokens send a part each; None where every rank has tokens of its own.
        watched: Whether somebody asks for ``seen``.
        seen: (experts,) choices of each expert by this rank's tokens in training, since somebody has taken them.
    """

    collectives: Collectives
    count: int
    shared: SharedTokens | None = None
    watched: bool = False
    seen: torch.Tensor | None = None

    @property
    def here(self) -> int:
        """Return the number of experts on each rank."""
        return self.count // self.collectives.world

    @property
    def first(self) -> int:
        """Return the index of the first expert on this rank."""
        return self.here * self.collectives.rank

    def __deepcopy__(self, memo: dict[int, object]) -> Shares:
        return self  # of a copied layer they are the same ranks


@dataclass(frozen=True, eq=False)
class Told:
    """Message of this rank about its tokens, and the pending messages of the other ranks.

    Attributes:
        counts: (ranks, experts on each) tokens that this rank has for them.
        coming: Of (ranks, experts here), what each rank has for this one.
    """

    counts: torch.Tensor
    coming: Pending


def tell(shares: Shares, counts: torch.Tensor, label: str) -> Told:
    """Send every rank the number of tokens for its experts, while the tokens are sorted; collective.

    Args:
        shares: Experts that each rank holds.
        counts: (experts,) tokens of this rank for each; on the host or the device.
        label: Name of the layer.
    """
    if shares.watched and torch.is_grad_enabled():
        shares.seen = counts.clone() if shares.seen is None else shares.seen.add_(counts)
    told = counts.view(shares.collectives.world, shares.here).contiguous()
    return Told(told, shares.collectives.exchange(told, f"{label}: tokens for each expert"))


def send_to_experts(shares: Shares, rows: torch.Tensor, told: Told, trained: bool, label: str, compute: Compute) -> torch.Tensor:
    """Return the results of ``rows``, each computed where its expert is; collective.

    Args:
        shares: Experts that each rank holds.
        rows: (n or more, width) tokens, by rising expert; n is the sum of the counts that were told.
        told: How many of them are for each expert.
        trained: Backward comes through here.
        label: Name of the layer.
        compute: Runs the experts of this rank.

    Returns:
        (n, width), in the order of ``rows``.
    """
    group, coming = shares.collectives, told.coming.received()
    if not has_values(coming):
        sends, receives = _evenly(len(rows), group.world, group.rank)
    else:
        sends, receives = torch.stack([told.counts.sum(dim=1), coming.sum(dim=1)]).tolist()  # the one time that the host waits
    tokens = exchange(group, rows[: sum(sends)], sends, receives, f"{label}: tokens")
    results = compute(tokens, coming)
    if torch.is_grad_enabled() and tokens.requires_grad:
        results = tie(results, tokens)
    return exchange(group, results, receives, sends, f"{label}: results", trained)


def tokens_of_each(counts: torch.Tensor, rows: int) -> list[int]:
    """Return the number of tokens of each expert here, on the host, which waits for the device.

    Args:
        counts: (ranks, experts here); a plan knows none, and takes them for even.
        rows: Their sum.
    """
    here = counts.shape[1]
    return list(counts.sum(dim=0).tolist()) if has_values(counts) else _evenly(rows, here, 0)[0]


def _evenly(rows: int, world: int, rank: int) -> tuple[list[int], list[int]]:
    """Return the rows that ``rank`` sends to and receives from each of ``world`` equal ranks, where tokens spread evenly."""
    sends = [rows // world + (peer < rows % world) for peer in range(world)]
    return sends, [sends[rank]] * world


def combine(results: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's results.

    Args:
        results: (n, width), by expert; n is at most tokens x choices.
        order: (tokens x choices,) where row i of ``results`` belongs, in its first n entries; the rest have no expert, and give zero.
        weights: (tokens, choices).

    Returns:
        (tokens, width), in the wider of the two types.
    """
    placed = results.new_zeros((order.numel(), results.shape[1])).index_copy_(0, order[: len(results)], results)
    return (placed.view(*weights.shape, results.shape[1]) * weights.unsqueeze(-1)).sum(dim=1)
