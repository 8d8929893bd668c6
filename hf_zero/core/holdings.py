"""List the tensors that an engine keeps, by purpose and by tier: for plans, for log lines while training, and for reports of failures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from hf_zero.core.optimizer.common_states import states_by_param
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.units.shard import has_memory, strided_parts
from hf_zero.core.units.sharded_parameter import gradients_of
from hf_zero.core.units.unit import Unit

KINDS = ("parameters", "gradients", "masters", "moments", "gathered", "activations", "logits", "communication", "other")
"""Purposes of memory."""
TIERS = ("device", "host", "disk")
"""Tiers of memory."""


@dataclass(frozen=True)
class Holding:
    """One tensor that an engine keeps.

    Attributes:
        kind: One of ``KINDS``.
        tensor: The tensor; several holdings may show the same memory, and the last one decides its purpose.
        on_disk: Whether the tensor is a mapped part of a file.
    """

    kind: str
    tensor: torch.Tensor
    on_disk: bool = False


def holdings(units: Sequence[Unit], optimizer: ShardedOptimizer | None) -> Iterator[Holding]:
    """Yield the parameters, masters and moments that units and their optimizer keep; local, and does not wait for a running update.

    Args:
        units: Units of one engine.
        optimizer: The engine's optimizer; None if nothing is trained.
    """
    for unit in units:
        gathered = unit.reshards and not unit.pinned
        yield Holding("gathered" if gathered else "parameters", unit.whole.flat)
        if unit.secondary.part is not None:
            yield Holding("parameters", unit.secondary.part)
        shard, master = unit.own.resting()
        if master is not None and master is not shard:
            yield Holding("masters", master, optimizer is not None and id(unit) in optimizer.state_store.in_files)
        yield Holding("parameters", shard, unit.shard_storage.on_disk)
    if optimizer is not None:
        yield from _moments(optimizer)


def _moments(optimizer: ShardedOptimizer) -> Iterator[Holding]:
    for state in states_by_param(optimizer.inner).values():
        yield from (Holding("moments", value) for value in state.values() if isinstance(value, torch.Tensor))
    for segment in optimizer.segments:
        on_disk = id(segment.unit) in optimizer.state_store.in_files
        yield from (Holding("moments", value, on_disk) for _, value in segment.elementwise())


def loose_tensors(module: torch.nn.Module) -> Iterator[Holding]:
    """Yield the parameters that belong to no unit, and the buffers."""
    yield from (Holding("parameters", param) for param in module.parameters() if param.numel())
    yield from (Holding("other", part) for buffer in module.buffers() for part in strided_parts(buffer))


def gradients(entries: Sequence[UnitGradients], module: torch.nn.Module) -> Iterator[Holding]:
    """Yield gradients that are being collected, in flight, or reduced, and gradients that autograd still keeps in ``param.grad``."""
    pools = {id(entry.collected.pool): entry.collected.pool for entry in entries}
    for tensors in (*(entry.tensors() for entry in entries), *(pool.tensors() for pool in pools.values())):
        yield from (Holding("gradients", tensor) for tensor in tensors)
    yield from (Holding("gradients", grad) for grad in gradients_of(module.parameters()) if grad is not None)


def bytes_by_kind(held: Iterable[Holding]) -> Counter[tuple[str, str]]:
    """Return bytes by tier and kind. Shared memory counts once; if an engine trains on CPUs, its device counts as the host."""
    found: dict[int, Holding] = {}
    for holding in held:
        if holding.tensor.numel() and has_memory(holding.tensor):
            found[holding.tensor.untyped_storage()._cdata] = holding
    books: Counter[tuple[str, str]] = Counter()
    for holding in found.values():
        tier = "disk" if holding.on_disk else "host" if holding.tensor.device.type == "cpu" else "device"
        books[tier, holding.kind] += holding.tensor.untyped_storage().nbytes()
    return books


def alive(engine: Any) -> Counter[tuple[str, str]]:
    """Return the bytes that ``engine`` keeps now, by tier and kind; without activations and work space, which no part of the engine
    keeps.
    """
    entries = engine.stepper.reducer.gradients if engine.stepper is not None else ()
    kept = holdings(engine.units, engine.optimizer)
    averages = (Holding("moments", tensor) for each in engine.averages.kept.values() for tensor in each.tensors())
    return bytes_by_kind(chain(loose_tensors(engine.module), kept, averages, gradients(entries, engine.module)))


def bytes_on_disk(units: Sequence[Unit], optimizer: ShardedOptimizer | None) -> int:
    """Return the bytes of units and their optimizer that are in files."""
    return sum(held.tensor.nbytes for held in holdings(units, optimizer) if held.on_disk)


def taken(device: torch.device) -> int:
    """Return the bytes that tensors take on ``device`` now; for the CPU, this process' memory (0 if the system does not report it)."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).memory_allocated(device))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
