"""How tokens spread over experts, and over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.expert_parallel.dispatch import Shares
from hf_zero.observe import log_rank0


class ExpertLoad:
    """Adds up which experts the tokens of training choose, and tells of it every few optimizer steps.

    In between nothing is sent and no device is waited for. A forward that is recomputed counts again.

    Args:
        layers: Who holds which experts, by the name of the layer.
        collectives: All data-parallel ranks.
        every: Optimizer steps between two records.
    """

    def __init__(self, layers: Mapping[str, Shares], collectives: Collectives, every: int) -> None:
        self._layers, self._collectives, self._every = layers, collectives, every
        for shares in layers.values():
            shares.watched, shares.seen = True, None

    def measure(self, step: int) -> dict[str, float]:
        """The imbalance since the last record, of each layer and the largest of all: the most chosen expert's tokens over the mean, and
        those of the rank with the most over the mean of ranks; 1 is even. Empty unless ``step`` is one to tell of; collective then.
        """
        if step % self._every:
            return {}
        device, found = self._collectives.topology.device, {}
        seen = [self._take(shares, device) for shares in self._layers.values()]
        total = torch.cat(seen)
        self._collectives.all_reduce(total, "tokens of experts").wait()
        for (name, shares), counts in zip(self._layers.items(), total.cpu().split([len(part) for part in seen]), strict=True):
            found[f"Train/Experts/{name}/imbalance"] = _imbalance(counts)
            found[f"Train/Experts/{name}/imbalance_of_ranks"] = _imbalance(counts.view(-1, shares.here).sum(dim=1))
        name = max((key for key in found if key.endswith("/imbalance")), key=found.__getitem__)
        ranks = max(value for key, value in found.items() if key.endswith("/imbalance_of_ranks"))
        layer = name.removeprefix("Train/Experts/").removesuffix("/imbalance")
        log_rank0("step=%d, experts: the most tokens over the mean are %.2f (%s), of a rank %.2f", step, found[name], layer, ranks)
        return {"Train/Experts/imbalance": found[name], "Train/Experts/imbalance_of_ranks": ranks, **found}

    @staticmethod
    def _take(shares: Shares, device: torch.device) -> torch.Tensor:
        seen, shares.seen = shares.seen, None
        return torch.zeros(shares.count, dtype=torch.int64, device=device) if seen is None else seen.to(device)


def _imbalance(counts: torch.Tensor) -> float:
    mean = float(counts.double().mean())
    return float(counts.max()) / mean if mean else 1.0
