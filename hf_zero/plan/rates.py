"""How fast the hardware is: what is given, measured, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_zero.plan.costs import Costs, Part

GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"


@dataclass(frozen=True)
class Rate:
    """One number.

    Attributes:
        value: Per second; of latencies, seconds.
        source: given, measured or assumed.
    """

    value: float
    source: str = ASSUMED


# What is taken where nothing is said: a data-centre device of 2020 on which half of its peak is reached, and one core of a server.
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
    "latency": "seconds of a collective of next to nothing",
    "operation": "seconds of an operation on next to nothing",
}


@dataclass(frozen=True)
class Rates:
    """The hardware of a roofline.

    Attributes:
        table: By the names of ``WHAT``.
        ranks_per_node: Who share the memory and the disk of a node.
        on_host: Ranks compute on CPUs.
    """

    table: Mapping[str, Rate]
    ranks_per_node: int
    on_host: bool

    def __getitem__(self, name: str) -> float:
        """Return the value of one rate."""
        return self.table[name].value

    def seconds(self, costs: Costs) -> float:
        """Return seconds of an optimizer step.

        [Note: roofline] On a device computing, sending and copying overlap in the micro-steps, so the longest of them counts; in the
        update too, but not the one with the other. What is waited for before anything else is computed (the sums of tensor parallelism,
        the exchanges of sequences and experts) overlaps with nothing. On CPUs the same processors do all of it, so everything is added
        up. What overlaps costs a hundredth on top, which orders what is else alike.
        """
        micro = tuple(seconds * (1 + costs.bubble) for seconds in self._part(costs.micro))
        alone = self._alone(costs.micro) * (1 + costs.bubble), self._alone(costs.update)
        together = micro, self._part(costs.update) + self._away(costs)
        if self.on_host:
            return sum(map(sum, together))
        return sum(alone) + sum(max(part) + 0.01 * (sum(part) - max(part)) for part in together)

    def _part(self, part: Part) -> tuple[float, ...]:
        """Return seconds of what overlaps."""
        compute = part.flops / (self["tflops"] * 1e12) + part.read / self["memory"]
        launches, sending = part.operations * self["operation"], self._sending(part.calls, part.node, part.network)
        if self.on_host:
            return compute, launches, sending
        return max(compute, launches), sending - self._alone(part), part.moved / self["host-link"]

    def _alone(self, part: Part) -> float:
        return self._sending(part.calls_alone, part.node_alone, part.network_alone)

    def _sending(self, calls: float, node: float, network: float) -> float:
        return calls * self["latency"] + node / self["node-link"] + network / self["link"]

    def _away(self, costs: Costs) -> tuple[float, ...]:
        """Return the update of what rests on the host or in files: each byte is read and written once."""
        near = self.ranks_per_node
        return (
            2 * (costs.on_host + costs.on_disk * (not self.on_host)) * near / self["host-memory"],
            2 * (costs.on_disk + costs.file_parameters) * near / self["disk"],
        )


def rates_of(given: Mapping[str, float | None], measured: Mapping[str, float], ranks_per_node: int, on_host: bool) -> Rates:
    """What is given wins over what is measured, and that over what is assumed.

    Args:
        given: By the names of ``WHAT``; None is not said.
        measured: By the same names.
        ranks_per_node: Who share the memory and the disk of a node.
        on_host: Ranks compute on CPUs.
    """
    table = {name: Rate(value) for name, value in (_HOST if on_host else _DEVICE).items()}
    table |= {name: Rate(value, MEASURED) for name, value in measured.items()}
    table |= {name: Rate(value, GIVEN) for name, value in given.items() if value is not None}
    return Rates(table, ranks_per_node, on_host)
