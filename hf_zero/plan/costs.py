"""Costs of a planned step as numbers that grow linearly with the number of blocks."""

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
