"""Send tokens to the ranks of their experts, and the results back; measure how tokens spread over experts and ranks.

Source of the scheme: Lepikhin et al. 2020, "GShard", arXiv 2006.16668, section 3.2; without capacities, so nothing is padded and no token
is dropped. The ranks first exchange the numbers of tokens per expert (one small all-to-all), then the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.expert_parallel.exchange import SharedTokens, exchange, tie
from hf_zero.observe import log_rank0
from hf_zero.system.planning import has_values

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens (n, width), counts (ranks, experts here)) -> results (n, width). Tokens are ordered by rank of origin, then by expert. If an
expert gets no tokens, its weights get gradients of zero ([Note: gradients of idle experts])."""
_PREFIX = "Train/Experts/"


@dataclass(eq=False)
class Shares:
    """The assignment of experts to the ranks of a group: each rank holds an equal number of consecutive experts.

    Attributes:
        collectives: The ranks that hold all experts together.
        count: Number of experts.
        shared: Division of tokens among ranks that all have them; None if every rank has its own tokens.
        watched: Whether tokens are counted in ``seen``.
        seen: (experts,) number of this rank's tokens in training that chose each expert, since ``ExpertLoad`` last took it.
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
        return self  # a copied layer has the same ranks


@dataclass(frozen=True, eq=False)
class ExchangedCounts:
    """The numbers of tokens per expert that this rank has sent, and the pending numbers from the other ranks.

    Attributes:
        counts: (ranks, experts on each rank) number of this rank's tokens for each expert.
        coming: Pending tensor (ranks, experts on this rank) with the number of tokens that each rank has for this rank's experts.
    """

    counts: torch.Tensor
    coming: Pending


def exchange_counts(shares: Shares, counts: torch.Tensor, label: str) -> ExchangedCounts:
    """Send every rank the number of tokens for its experts, asynchronously, while the caller sorts the tokens; collective.

    Args:
        shares: Experts that each rank holds.
        counts: (experts,) number of this rank's tokens for each expert; on the host or the device.
        label: Name of the layer.
    """
    if shares.watched and torch.is_grad_enabled():
        shares.seen = counts.clone() if shares.seen is None else shares.seen.add_(counts)
    sent = counts.view(shares.collectives.world, shares.here).contiguous()
    return ExchangedCounts(sent, shares.collectives.exchange(sent, f"{label}: tokens for each expert"))


def send_to_experts(
    shares: Shares, rows: torch.Tensor, exchanged: ExchangedCounts, trained: bool, label: str, compute: Compute
) -> torch.Tensor:
    """Send tokens to the ranks of their experts and return the results; collective.

    Args:
        shares: Experts that each rank holds.
        rows: (n or more, width) tokens in the order of their experts; n is the sum of ``exchanged.counts``.
        exchanged: Numbers of tokens for each expert, from ``exchange_counts``.
        trained: Whether backward will run through this layer.
        label: Name of the layer.
        compute: Function that runs the experts of this rank.

    Returns:
        Results (n, width), in the order of ``rows``.
    """
    group, coming = shares.collectives, exchanged.coming.received()
    if not has_values(coming):
        sends, receives = _evenly(len(rows), group.world, group.rank)
    else:
        sends, receives = torch.stack([exchanged.counts.sum(dim=1), coming.sum(dim=1)]).tolist()  # the only wait of the host
    tokens = exchange(group, rows[: sum(sends)], sends, receives, f"{label}: tokens")
    results = compute(tokens, coming)
    if torch.is_grad_enabled() and tokens.requires_grad:
        results = tie(results, tokens)
    return exchange(group, results, receives, sends, f"{label}: results", trained)


def tokens_of_each(counts: torch.Tensor, rows: int) -> list[int]:
    """Return the number of tokens of each expert here, on the host, which waits for the device.

    Args:
        counts: (ranks, experts on this rank) numbers of tokens; without values (in a plan) tokens are assumed to spread evenly.
        rows: Sum of ``counts``.
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
        results: (n, width) results in the order of experts; n is at most tokens x choices.
        order: (tokens x choices,) of which entry i < n is the position (token, choice) of row i of ``results``; positions without a row
            have no expert, and count as zero.
        weights: (tokens, choices) weights of the choices.

    Returns:
        Sums (tokens, width), in the wider of the types of ``results`` and ``weights``.
    """
    placed = results.new_zeros((order.numel(), results.shape[1])).index_copy_(0, order[: len(results)], results)
    return (placed.view(*weights.shape, results.shape[1]) * weights.unsqueeze(-1)).sum(dim=1)


class ExpertLoad:
    """A counter of the training tokens of each expert, which reports the imbalance every few optimizer steps.

    Between two reports it sends nothing and does not wait for the device. A recomputed forward counts again.

    Args:
        layers: Assignment of experts to ranks, by the name of the layer.
        networks: Collectives of axes that together cover all ranks.
        every: Optimizer steps between two reports.
        each: Whether to report the tokens of each expert too.
    """

    def __init__(self, layers: Mapping[str, Shares], networks: Sequence[Collectives], every: int, each: bool = False) -> None:
        self._layers, self._networks, self._every, self._each = layers, networks, every, each
        for shares in layers.values():
            shares.watched, shares.seen = True, None

    def measure(self, step: int) -> dict[str, float]:
        """Return the imbalance of each layer since the last report, and the largest of all layers.

        The imbalance is the largest number of tokens of an expert divided by the mean over experts, and the same for ranks; 1 is even. The
        dict is empty unless a report is due at ``step``; a report is collective.
        """
        if step % self._every:
            return {}
        tokens, found = self._tokens(), {}
        for name, counts in tokens.items():
            of_ranks = counts.view(-1, self._layers[name].here).sum(dim=1)
            found[f"{_PREFIX}{name}/imbalance"] = _imbalance(counts)
            found[f"{_PREFIX}{name}/imbalance_of_ranks"] = _imbalance(of_ranks)
            if self._each:
                found.update({f"{_PREFIX}{name}/tokens/{index}": float(count) for index, count in enumerate(counts.tolist())})
                log_rank0("step=%d, %s: tokens of its experts: %s", step, name, " ".join(map(str, counts.tolist())))
        worst = max(tokens, key=lambda name: found[f"{_PREFIX}{name}/imbalance"])
        highest = found[f"{_PREFIX}{worst}/imbalance"]
        ranks = max(found[f"{_PREFIX}{name}/imbalance_of_ranks"] for name in tokens)
        text = "step=%d, experts: largest tokens / mean tokens is %.2f per expert (%s: %s), %.2f per rank"
        log_rank0(text, step, highest, worst, _spread(tokens[worst]), ranks)
        return {f"{_PREFIX}imbalance": highest, f"{_PREFIX}imbalance_of_ranks": ranks, **found}

    def _tokens(self) -> dict[str, torch.Tensor]:
        """Return the number of tokens (experts,) of all ranks since the last report, by layer name, on the host; collective."""
        device = self._networks[0].topology.device
        seen = [self._take(shares, device) for shares in self._layers.values()]
        total = torch.cat(seen)
        for network in self._networks:
            network.all_reduce(total, "tokens of experts").wait()
        return dict(zip(self._layers, total.cpu().split([len(part) for part in seen]), strict=True))

    @staticmethod
    def _take(shares: Shares, device: torch.device) -> torch.Tensor:
        seen, shares.seen = shares.seen, None
        return torch.zeros(shares.count, dtype=torch.int64, device=device) if seen is None else seen.to(device)


def _imbalance(counts: torch.Tensor) -> float:
    mean = float(counts.double().mean())
    return float(counts.max()) / mean if mean else 1.0


def _spread(counts: torch.Tensor) -> str:
    """Return a text with the expert that had the most tokens, and the number of experts that had none."""
    busiest, idle = int(counts.argmax()), int((counts == 0).sum())
    return f"expert {busiest} had {int(counts[busiest])} of {int(counts.sum())} tokens, {idle} of {len(counts)} experts none"
