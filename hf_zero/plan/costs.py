"""Count the costs of a planned step, which grow linearly with the number of blocks, and estimate its seconds from rates of the hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from hf_zero.core.holdings import TIERS
from hf_zero.plan.prediction import Prediction
from hf_zero.plan.run import MicroStep

_OWNED = ("masters", "moments")
GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"


@dataclass(frozen=True)
class Part:
    """Work of a rank in one part of an optimizer step.

    Attributes:
        flops: Floating-point operations of matrix products, convolutions and attention.
        read: Bytes that other operations read and wrote.
        moved: Bytes copied between device and host.
        operations: Number of operations.
        node: Bytes sent inside the node.
        network: Bytes sent to other nodes.
        calls: Number of collectives.
        node_alone: Bytes of ``node`` whose collectives overlap with no computation.
        network_alone: Bytes of ``network`` whose collectives overlap with no computation.
        calls_alone: Number of collectives that overlap with no computation.
    """

    flops: float
    read: float
    moved: float
    operations: float
    node: float
    network: float
    calls: float
    node_alone: float = 0.0
    network_alone: float = 0.0
    calls_alone: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Memory and work of a rank in one optimizer step.

    Attributes:
        device: Peak bytes on the device.
        host: Peak bytes on the host.
        disk: Peak bytes in files.
        micro: Work of all micro-steps of an optimizer step.
        update: Work of the update after them.
        on_host: Bytes of masters and moments that are offloaded to the host.
        on_disk: Bytes of masters and moments that are offloaded to files.
        file_parameters: Bytes of parameters that are offloaded to files.
        bubble: Time that a rank waits for other pipeline stages, as a share of the time of its micro-steps.
        owned: Bytes of masters and moments on all tiers.
        parameters: Bytes of permanent parameters on all tiers.
        elements: Number of parameters of the whole model.
        trained: Number of parameters that are trained.
    """

    device: float
    host: float
    disk: float
    micro: Part
    update: Part
    on_host: float
    on_disk: float
    file_parameters: float
    bubble: float = 0.0
    owned: float = 0.0
    parameters: float = 0.0
    elements: float = 0.0
    trained: float = 0.0


def costs_of(prediction: Prediction) -> Costs:
    """Return the costs of a prediction; for a pipeline, each number from the stage where it is largest."""
    stages, peaks = prediction.stages, prediction.peaks
    host, disk = peaks["host"].alive, peaks["disk"].alive
    away = 0 if prediction.cluster.on_host else sum(host["host", kind] for kind in _OWNED)
    files = sum(disk["disk", kind] for kind in _OWNED)
    kinds = prediction.by_kind()
    owned = sum(kinds[kind] for kind in _OWNED)
    sizes = [peaks[tier].nbytes for tier in TIERS]
    micro, update = _part([one.accumulated() for one in stages]), _part([one.update for one in stages])
    rest = disk["disk", "parameters"], stages[0].bubble, owned, kinds["parameters"], *stages[0].parameters
    return Costs(sizes[0], sizes[1], sizes[2], micro, update, away, files, *rest)


def _part(steps: Iterable[MicroStep]) -> Part:
    rows = [(*astuple(step.work), *astuple(step.sent)) for step in steps]
    return Part(*map(max, zip(*rows, strict=True)))


def extrapolated(costs: Sequence[Costs], blocks: int) -> Costs | None:
    """Return the costs of a larger model by linear extrapolation from plans of smaller ones.

    [Note: few blocks] Equal blocks take equal bytes and operations, so the memory at each moment of a step is linear in the number of
    blocks, and so are the bytes sent and the operations. A peak is the maximum of such lines, a convex function. If the peaks of three
    consecutive sizes are on a line, the peak of a larger model is on this line or above it. So a model that does not fit by extrapolation
    does not fit; one that fits is planned with all blocks before it is shown. If three sizes were on a line for one micro-batch size, two
    suffice for the others. If one of every n blocks is recomputed, the same holds for groups of n blocks.

    Args:
        costs: Costs of two or three models; each has one block (or one group) more than the one before.
        blocks: Number of blocks (or groups) to add to the last of them.

    Returns:
        The costs; None if three models are not on a line.
    """
    found = []
    for *before, b, c in zip(*map(_flat, costs), strict=True):
        if before and not math.isclose(c - b, b - before[0], rel_tol=1e-9, abs_tol=1e-9 * max(1.0, abs(c))):
            return None
        found.append(c + blocks * (c - b))
    width = len(Part.__dataclass_fields__)
    micro, update, away = Part(*found[3 : 3 + width]), Part(*found[3 + width : 3 + 2 * width]), found[3 + 2 * width :]
    return Costs(found[0], found[1], found[2], micro, update, *away)


def _flat(costs: Costs) -> list[float]:
    device, host, disk, micro, update, *rest = astuple(costs)
    return [device, host, disk, *micro, *update, *rest]


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
