"""Measure how tokens spread over experts and over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.expert_parallel.dispatch import Shares
from hf_zero.observe import log_rank0

_PREFIX = "Train/Experts/"


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
