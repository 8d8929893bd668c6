"""Compute the global gradient norm over shards and the clipping factor, and find the first gradient that is not finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_zero import native
from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.script_clipping import EPSILON
from hf_zero.core.step.equal_copies import EqualCopies
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, tp_shard_of
from hf_zero.core.units.unit import Unit
from hf_zero.native.library import ELEMENT_TYPES, library

# torch's CPU norm sums in fp32: over a flat unit of 6 million elements its error is 1.7e-4, in pieces of this size 2e-7.
_CHUNK_NUMEL = 1 << 16
_COPIED = 1 << 24  # elements that are copied to fp32 at a time, unless one shard has more


@dataclass(frozen=True)
class ModelAxis:
    """Data for a norm if several ranks together hold one model (tensor parallelism).

    Attributes:
        collectives: Network of the model axis.
        copies: For each unit, the ranges of this rank's shard that several ranks of the axis hold alike, each with the number of these
            ranks; they count once.
        alike: For each unit, the number of ranks of the axis that hold the same remaining elements.
        equal: Compares the copies that all ranks which hold layers together have.
    """

    collectives: Collectives
    copies: tuple[tuple[tuple[Range, int], ...], ...]
    alike: tuple[int, ...]
    equal: EqualCopies = field(default_factory=EqualCopies)


def model_axis(units: Sequence[Unit], collectives: Collectives, tensor: int | None = None, equal: EqualCopies | None = None) -> ModelAxis:
    """Return the copies among the parameters of ``units``: parameters that are not slices of larger ones, and slices that overlap.

    Args:
        units: Units, in the model's order.
        collectives: Network of the model axis, or of the ranks that together hold all experts, which may be several model axes.
        tensor: Number of ranks of one model axis among these; None means all.
        equal: See ``ModelAxis``.
    """
    ranks = tensor or collectives.world
    alike = tuple(1 if unit.collectives.topology.of_experts else collectives.world // ranks for unit in units)
    return ModelAxis(collectives, tuple(_copies(unit, ranks) for unit in units), alike, equal or EqualCopies())


def _copies(unit: Unit, ranks: int) -> tuple[tuple[Range, int], ...]:
    found = []
    for param, slot in zip(unit.params, unit.layout.slots, strict=True):
        if param is None:
            continue
        part = tp_shard_of(param)
        alike = [(slot.range, ranks)] if part is None else [(run.shift(slot.range.start), count) for run, count in _runs(part, slot.shape)]
        owned = [(run.intersect(unit.owned).shift(-unit.owned.start), count) for run, count in alike]
        found += [(run, count) for run, count in owned if run.numel]
    return tuple(found)


def _runs(part: TpShard, shape: Sequence[int]) -> list[tuple[Range, int]]:
    """Return the ranges of ``part`` in its flat tensor that several ranks hold, sorted, each with the number of ranks."""
    inner = math.prod(shape[part.dim + 1 :])
    row = shape[part.dim] * inner
    rows = range(math.prod(shape[: part.dim])) if part.copies else ()
    return [(Range(outer * row + run.start * inner, outer * row + run.stop * inner), count) for outer in rows for run, count in part.copies]


def global_norm(
    shards: Sequence[torch.Tensor],
    collectives: Collectives,
    sharded: bool,
    model: ModelAxis | None = None,
    threads: int | None = None,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the 2-norm of all gradients together; collective if ``sharded`` or ``model``, or with ``beside``.

    Args:
        shards: This rank's gradients, one 1D tensor per unit.
        collectives: The axis of ranks that share the units.
        sharded: Whether each rank holds another part; otherwise all ranks hold the same gradients.
        model: The ranks that together hold one model, if there are several.
        threads: Largest number of threads over host memory; None is torch's number. The result does not depend on it.
        beside: (n,) float64 on the device of the axis, which is replaced by its sum over ``collectives``; it travels in the norm's message
            if there is one over this axis.

    Returns:
        0-dim fp32 tensor, the same on every rank.
    """
    if beside is not None and not (sharded and (shards or model is not None)):
        collectives.all_reduce(beside, "loss").wait()
        beside = None
    if not shards and model is None:
        return torch.zeros((), dtype=torch.float32, device=collectives.topology.device)
    device = collectives.topology.device
    sums = _sum_of_squares(shards, device, threads).reshape(1) if model is None else _sums_over_model(shards, model, device, threads)
    if sharded:
        together = sums if beside is None else torch.cat([sums, beside])
        collectives.all_reduce(together, "gradient norm").wait()
        sums = together[: len(sums)]
        if beside is not None:
            beside.copy_(together[len(sums) :])
    if model is not None and model.equal.size:
        model.equal.note(sums[1:])
    return sums[0].sqrt().float()


def _sums_over_model(shards: Sequence[torch.Tensor], model: ModelAxis, device: torch.device, threads: int | None) -> torch.Tensor:
    """Return the sum of squares over the model axis, each element once; collective.

    Returns:
        (1 + n,) float64: the sum, and the sum of the n numbers of ``model.equal.message``.
    """
    by_count: dict[int, list[torch.Tensor]] = defaultdict(list, {1: []})  # a pipeline stage may have no trained parameters
    for shard, copies, alike in zip(shards, model.copies, model.alike, strict=True):
        for part, count in copies:
            by_count[count * alike].append(shard[part.start : part.stop])
        by_count[alike] += _rest(shard, [part for part, _ in copies])
    squares = {count: _sum_of_squares(tensors, device, threads) for count, tensors in by_count.items()}
    once = torch.stack([square / count for count, square in squares.items()]).sum().reshape(1)
    if model.equal.size:
        once = torch.cat([once, model.equal.message(squares.get(model.equal.count), device)])
    model.collectives.all_reduce(once, "gradient norm").wait()
    return once


def _rest(shard: torch.Tensor, parts: Sequence[Range]) -> list[torch.Tensor]:
    """Return the ranges of ``shard`` outside ``parts``, which are sorted and disjoint."""
    starts = [0, *(part.stop for part in parts)]
    stops = [*(part.start for part in parts), shard.numel()]
    return [shard[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop]


def _sum_of_squares(tensors: Sequence[torch.Tensor], device: torch.device, threads: int | None) -> torch.Tensor:
    """Return the sum of squares, 0-dim, in double precision, on ``device``; some tensors may be on the host (offload)."""
    away = [tensor for tensor in tensors if tensor.device.type != device.type]
    if away:
        here = [tensor for tensor in tensors if tensor.device.type == device.type]
        return _sum_of_squares(here, device, threads) + _sum_of_squares(away, away[0].device, threads).to(device)
    if device.type == "cpu" and library() is not None and all(tensor.dtype in ELEMENT_TYPES for tensor in tensors):
        threads = threads or torch.get_num_threads()
        return torch.tensor(sum(native.squared_norm(tensor, threads=threads) for tensor in tensors), dtype=torch.float64)
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(_norms(pieces)).double().square().sum()


def _pieces(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return shard.split(_CHUNK_NUMEL) if shard.device.type == "cpu" else (shard,)


def _norms(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the fp32 norm of each piece. Pieces of other dtypes are copied to fp32, about ``_COPIED`` elements at a time, never all
    together.
    """
    if all(piece.dtype == torch.float32 for piece in pieces):
        return list(torch._foreach_norm(list(pieces)))
    norms: list[torch.Tensor] = []
    waiting: list[torch.Tensor] = []
    copied = 0
    for piece in pieces:
        if waiting and copied + piece.numel() > _COPIED:
            norms += torch._foreach_norm([value.float() for value in waiting])
            waiting, copied = [], 0
        waiting.append(piece)
        copied += piece.numel()
    return norms + list(torch._foreach_norm([value.float() for value in waiting]))


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that reduces ``norm`` to ``max_norm``; 1 if the norm is below, or, on the host, if ``max_norm`` is 0."""
    if max_norm <= 0:
        return torch.ones((), dtype=norm.dtype)  # on the host, so that it can be read without waiting for a device
    return torch.clamp(max_norm / (norm + EPSILON), max=1.0)


def first_non_finite(
    units: Sequence[Unit], shards: Sequence[torch.Tensor], collectives: Collectives, model: ModelAxis | None = None, whole: bool = False
) -> str:
    """Return the name of the first parameter, in the model's order, with a gradient that is not finite on any rank; collective.

    Args:
        units: The units.
        shards: This rank's gradients, one 1D tensor per unit.
        collectives: The axis of ranks that share the units.
        model: As in ``global_norm``.
        whole: Whether the gradients are those of complete units, not of shards.
    """
    found: tuple[int, str] | None = None
    position = 0
    for unit, shard in zip(units, shards, strict=True):
        for index, slot in enumerate(unit.layout.slots):
            position += 1
            part = shard[slot.range.start : slot.range.stop] if whole else unit.shard_part(index, shard)
            if found is None and part.numel() and not bool(torch.isfinite(part).all()):
                found = (position, slot.name)
    answers = collectives.gather_objects(found, "non-finite gradient")
    if model is not None:
        answers = [entry for line in model.collectives.gather_objects(answers, "non-finite gradient") for entry in line]
    everywhere = [entry for entry in answers if entry is not None]
    return min(everywhere)[1] if everywhere else "none found (the norm itself overflowed)"
