"""What a plan comes to in numbers that grow in a line with the number of blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from hf_zero.core.holdings import TIERS
from hf_zero.plan.prediction import Prediction
from hf_zero.plan.run import MicroStep

_OWNED = ("masters", "moments")


@dataclass(frozen=True)
class Part:
    """What a rank does in one part of an optimizer step.

    Attributes:
        flops: Operations of matrix products, convolutions and attention.
        read: Bytes that other operations read and wrote.
        moved: Bytes between device and host.
        operations: How many operations.
        node: Bytes sent inside the node.
        network: Bytes sent to others.
        calls: Collectives.
        node_alone: Of ``node`` what nothing is computed beside.
        network_alone: The same of ``network``.
        calls_alone: The same of ``calls``.
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
    """What a rank holds and does.

    Attributes:
        device: Bytes at the peak of the device.
        host: Of the host.
        disk: Of its files.
        micro: All micro-steps of an optimizer step.
        update: What is behind them.
        on_host: Bytes of masters and moments that rest on the host, away from the device.
        on_disk: Those that rest in files.
        file_parameters: Bytes of parameters in files.
        bubble: How long a rank waits for other stages of a pipeline, as a share of its micro-steps.
        owned: Bytes of masters and moments, wherever they rest.
        parameters: Bytes of the parameters that stay, wherever they rest.
        elements: Parameters of the whole model.
        trained: Those that are trained.
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
    """Return the numbers of a plan; of a pipeline each of the stage that has most of it."""
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
    """What follows for ``blocks`` more blocks than in the last of three plans (or two) whose sizes differ by one block each.

    [Note: few blocks] Blocks that are alike take alike bytes and operations, so what a moment of a step holds is a line over the number of
    blocks, and what is sent and computed is one too. A peak is the largest of such lines: convex. Where three sizes in a row lie
    on a line, the peak of a larger model is on that line or above it. So what is said not to fit does not; what is said to fit is
    planned whole before it is shown. Where three have lain on a line for some samples, two say it for others.

    Returns:
        None where the three do not lie on a line.
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
