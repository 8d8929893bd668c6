"""Plan candidates, each at most once, with all blocks of the model or with a few."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_zero.errors import HfZeroError
from hf_zero.plan.candidates import Candidate, Space, Tier
from hf_zero.plan.costs import Costs, extrapolated
from hf_zero.plan.few_blocks import Blocks
from hf_zero.plan.inputs import Cluster, Hardware, Load
from hf_zero.plan.prediction import host_limit
from hf_zero.plan.workers import Task, Workers
from hf_zero.system.sizes import size_text


class TimeIsUp(Exception):
    """Raised instead of a plan after the time at which the search ends; the engine's refusals are another kind of error."""


@dataclass
class Planner:
    """Source of the costs of candidates; it keeps the result of each plan.

    Attributes:
        space: The search space.
        blocks: Repeated blocks of the model.
        cluster: Number and place of the ranks.
        hardware: Limits and rates of the hardware.
        sequence: Tokens per sample.
        attention: sdpa, flash or eager.
        settle: Function that completes a configuration for a plan, from the configuration and the micro-batch size.
        on_progress: Function that is called when a part of the search begins, with its name and the progress (0 to 1) at its begin and end.
        workers: Processes that run the engine.
        until: Time of ``time.monotonic`` after which no plan begins.
    """

    space: Space
    blocks: Blocks
    cluster: Cluster
    hardware: Hardware
    sequence: int
    attention: str
    settle: Callable[[Mapping[str, Any], int], dict[str, Any]]
    on_progress: Callable[[str, float, float], None] = lambda text, done, after: None
    workers: Workers = field(default_factory=Workers)
    until: float = float("inf")
    _costs: dict[tuple[Candidate, bool], Costs] = field(default_factory=dict)
    _plans: dict[tuple[Candidate, int], Costs | HfZeroError] = field(default_factory=dict)  # key: candidate, number of blocks
    _least: dict[Candidate, Costs | HfZeroError] = field(default_factory=dict)
    _on_a_line: set[tuple[int, Tier, int]] = field(default_factory=set)

    def costs(self, candidate: Candidate, whole: bool = False) -> tuple[Costs, bool]:
        """Return the costs of ``candidate``, and whether they come from a plan with all blocks; plans it if necessary.

        Args:
            candidate: The candidate.
            whole: Whether to plan with all blocks instead of extrapolating.

        Raises:
            HfZeroError: The engine refuses the configuration.
            TimeIsUp: A plan is necessary, but the search has ended.
        """
        for known in (True, *(() if whole else (False,))):
            if (candidate, known) in self._costs:
                return self._costs[candidate, known], known
        self.prepare([candidate], whole)
        sizes = self._sizes(candidate, whole)
        plans = [self._plans[candidate, count] for count in sizes]
        refused = next((plan for plan in plans if isinstance(plan, HfZeroError)), None)
        if refused is not None:
            raise refused
        costs = [plan for plan in plans if isinstance(plan, Costs)]
        known = sizes == (self.blocks.count,)
        found = costs[0] if known else extrapolated(costs, (self.blocks.count - sizes[-1]) // _step(candidate))
        if found is None:
            return self.costs(candidate, whole=True)
        if not known:
            self._on_a_line.add(_line_key(candidate))
        self._costs[candidate, known] = found
        return found, known

    def least(self, candidate: Candidate) -> Costs:
        """Return a lower bound of the costs of ``candidate``: for a pipeline, those of its last stage; otherwise ``costs``.

        Raises:
            HfZeroError: The engine refuses the configuration.
        """
        if candidate.family.layout.pipeline == 1 or self._is_known(candidate, whole=True):
            return self.costs(candidate)[0]
        if candidate not in self._least:
            self._least[candidate] = self._run([replace(self._task(candidate, self.blocks.count), last=True)])[0]
        found = self._least[candidate]
        if isinstance(found, HfZeroError):
            raise found
        return found

    def prepare(self, candidates: Sequence[Candidate], whole: bool = False) -> None:
        """Plan unknown ``candidates`` in parallel; ``costs`` raises later for candidates that the engine refuses.

        Args:
            candidates: The candidates.
            whole: Whether to plan with all blocks.
        """
        wanted = [(one, count) for one in candidates if not self._is_known(one, whole) for count in self._sizes(one, whole)]
        wanted = sorted((plan for plan in dict.fromkeys(wanted) if plan not in self._plans), key=lambda plan: plan[1])
        if wanted:
            self._plans.update(zip(wanted, self._run([self._task(*plan) for plan in wanted]), strict=True))

    def known(self) -> Iterator[tuple[Candidate, Costs]]:
        """Yield the planned candidates with their costs."""
        return ((candidate, costs) for (candidate, _), costs in self._costs.items())

    def _run(self, tasks: list[Task]) -> list[Costs | HfZeroError]:
        if time.monotonic() > self.until:
            raise TimeIsUp
        return self.workers.costs(tasks)

    def _is_known(self, candidate: Candidate, whole: bool) -> bool:
        return (candidate, True) in self._costs or (not whole and (candidate, False) in self._costs)

    def _sizes(self, candidate: Candidate, whole: bool) -> tuple[int, ...]:
        """Return the numbers of blocks of the models to plan for ``candidate``."""
        layout, counts = candidate.family.layout, None
        if not whole and layout.pipeline == 1:  # stages of a pipeline may have unequal numbers of blocks
            shards = layout.shard_group or self.cluster.ranks // layout.tensor
            counts = self.blocks.counts(self._config(candidate), layout.tensor, shards, _step(candidate))
        if counts is None:
            return (self.blocks.count,)
        return counts[:2] if _line_key(candidate) in self._on_a_line else counts

    def _config(self, candidate: Candidate) -> dict[str, Any]:
        return self.settle(self.space.config(candidate), candidate.micro_batch)

    def _task(self, candidate: Candidate, count: int) -> Task:
        wish = self.blocks.wish if count == self.blocks.count else self.blocks.few(count)
        wish = replace(wish, checkpointing=candidate.family.recomputes, moves=candidate.family.moves)
        return Task(wish, self._config(candidate), self.cluster, Load(candidate.micro_batch, self.sequence), self.attention)

    @property
    def main_tier(self) -> str:
        """Return the tier where ranks compute: host or device."""
        return "host" if self.cluster.on_host else "device"

    def excess(self, costs: Costs) -> float:
        """Return the peak of ``costs`` over the memory of the tier where ranks compute; 0 without a limit."""
        on_host = self.cluster.on_host
        limit = host_limit(self.cluster, self.hardware) if on_host else self.hardware.memory
        return (costs.host if on_host else costs.device) / limit if limit is not None else 0.0

    def shortage(self, costs: Costs) -> tuple[str, str]:
        """Return the tier whose memory ``costs`` exceed, and a text with both numbers; empty texts if all fits."""
        near, device, host = self.cluster.near, self.hardware.memory, host_limit(self.cluster, self.hardware)
        if device is not None and not self.cluster.on_host and costs.device > device:
            return "device", f"{size_text(costs.device)} of device memory at the peak, a device has {size_text(device)}"
        if host is not None and costs.host > host:
            return "host", f"{near} x {size_text(costs.host)} of host memory at the peak, a node has {size_text(near * host)}"
        return "", ""


def _line_key(candidate: Candidate) -> tuple[int, Tier, int]:
    """Return the key of candidates whose costs are all linear in the number of blocks, or all not."""
    return candidate.family.stage, candidate.family.tier, _step(candidate)


def _step(candidate: Candidate) -> int:
    """Return the number of blocks after which one computes as the first does."""
    return max(1, candidate.family.recomputes)
