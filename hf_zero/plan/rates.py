"""Estimate the seconds of a step from rates of the hardware that are given, measured or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_zero.plan.costs import Costs, Part

GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"


@dataclass(frozen=True)
class Rate:
    """One rate of the hardware.

    Attributes:
        value: Amount per second; for "latency" and "operation", seconds.
        source: given, measured or assumed.
    """

    value: float
    source: str = ASSUMED


# Assumed rates: a data-centre device of 2020 at half of its peak, and one core of a server.
_DEVICE = {
    "tflops": 150.0,
    "memory": 1.5e12,
    "node-link": 200e9,
    "link": 20e9,
    "host-link": 20e9,
    "host-memory": 150e9,
    "disk": 3e9,
    "latency": 20e-6,
    "operation": 5e-6,
}
_HOST = {
    **_DEVICE,
    "tflops": 0.05,
    "memory": 8e9,
    "node-link": 2e9,
    "link": 1e9,
    "host-memory": 50e9,
    "latency": 200e-6,
    "operation": 10e-6,
}
WHAT = {
    "tflops": "10^12 operations per second of a rank's matrix products",
    "memory": "bytes per second of a rank's device memory",
    "node-link": "bytes per second that a rank sends inside its node",
    "link": "bytes per second that a rank sends to other nodes",
    "host-link": "bytes per second between a device and the host",
    "host-memory": "bytes per second of a node's memory, for all its ranks",
    "disk": "bytes per second of a node's disk, for all its ranks",
    "latency": "seconds of a collective with almost no data",
    "operation": "seconds of an operation on almost no data",
}


@dataclass(frozen=True)
class Rates:
    """Rates of the hardware, for a roofline estimate.

    Attributes:
        table: Rates by the names of ``WHAT``.
        ranks_per_node: Number of ranks that share the memory and the disk of a node.
        on_host: Whether ranks compute on CPUs.
    """

    table: Mapping[str, Rate]
    ranks_per_node: int
    on_host: bool

    def __getitem__(self, name: str) -> float:
        """Return the value of the rate ``name``."""
        return self.table[name].value

    def seconds(self, costs: Costs) -> float:
        """Return the estimated seconds of an optimizer step with ``costs``.

        [Note: roofline] On a device, computation, communication and copies overlap within the micro-steps, so the longest of them counts;
        likewise within the update, which does not overlap with the micro-steps. Collectives whose result is needed at once (the sums of
        tensor parallelism, the exchanges of sequences and experts) overlap with nothing. On CPUs the same processors do all work, so all
        times are added. A hundredth of the hidden times is added, too, to order candidates that are equal otherwise.
        """
        micro = tuple(seconds * (1 + costs.bubble) for seconds in self._part_seconds(costs.micro))
        alone = self._exposed_seconds(costs.micro) * (1 + costs.bubble), self._exposed_seconds(costs.update)
        together = micro, self._part_seconds(costs.update) + self._offload_seconds(costs)
        if self.on_host:
            return sum(map(sum, together))
        return sum(alone) + sum(max(part) + 0.01 * (sum(part) - max(part)) for part in together)

    def _part_seconds(self, part: Part) -> tuple[float, ...]:
        """Return the seconds of the activities of ``part`` that overlap with each other; without collectives that overlap with nothing."""
        compute = part.flops / (self["tflops"] * 1e12) + part.read / self["memory"]
        launches, sending = part.operations * self["operation"], self._sending(part.calls, part.node, part.network)
        if self.on_host:
            return compute, launches, sending
        return max(compute, launches), sending - self._exposed_seconds(part), part.moved / self["host-link"]

    def _exposed_seconds(self, part: Part) -> float:
        return self._sending(part.calls_alone, part.node_alone, part.network_alone)

    def _sending(self, calls: float, node: float, network: float) -> float:
        return calls * self["latency"] + node / self["node-link"] + network / self["link"]

    def _offload_seconds(self, costs: Costs) -> tuple[float, ...]:
        """Return the seconds of the update of offloaded states, by memory and by disk: each byte is read and written once."""
        near = self.ranks_per_node
        return (
            2 * (costs.on_host + costs.on_disk * (not self.on_host)) * near / self["host-memory"],
            2 * (costs.on_disk + costs.file_parameters) * near / self["disk"],
        )


def rates_of(given: Mapping[str, float | None], measured: Mapping[str, float], ranks_per_node: int, on_host: bool) -> Rates:
    """Return the rates to use: given ones, else measured ones, else assumed ones.

    Args:
        given: Rates of the user by the names of ``WHAT``; None if not given.
        measured: Measured rates by the names of ``WHAT``.
        ranks_per_node: Number of ranks that share the memory and the disk of a node.
        on_host: Whether ranks compute on CPUs.
    """
    table = {name: Rate(value) for name, value in (_HOST if on_host else _DEVICE).items()}
    table |= {name: Rate(value, MEASURED) for name, value in measured.items()}
    table |= {name: Rate(value, GIVEN) for name, value in given.items() if value is not None}
    return Rates(table, ranks_per_node, on_host)
