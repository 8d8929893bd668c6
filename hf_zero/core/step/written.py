"""Find gradients and parameter values that scripts have written. Written gradients replace those of a backward."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Sequence
from typing import NoReturn

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.param_states import write_param
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.read_gradients import ShownGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.step.agreement import SharedFact, agree
from hf_zero.core.units.checksums import checksum
from hf_zero.core.units.guards import unsaved_beside
from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.marks import is_part, tp_shard_of
from hf_zero.core.units.registration import loose_params, take_written_loose
from hf_zero.core.units.sharded_parameter import gradients_of, refusal, set_gradient
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import adopt_writes
from hf_zero.errors import StateError


def have_written(reducer: Reducer) -> bool:
    """Return whether a script has written ``grad`` of any parameter. Local."""
    return next(_written(reducer), None) is not None


def take_written(reducer: Reducer, collectives: Collectives, everyone: Collectives) -> None:
    """Move each written ``param.grad`` to the gradients of the coming step, where it replaces those of backward; collective.

    As with gradients of a backward, each rank has the gradients of its own samples, times the loss scale, and the step uses the mean over
    ranks.

    Args:
        reducer: Reducer of all trainable units.
        collectives: Network of all data-parallel ranks.
        everyone: Network of all ranks of the engine.

    Raises:
        StateError: On every rank, if a parameter is sharded, or some ranks that hold a parameter have not written its gradient.
    """
    written = list(_written(reducer))
    names = [(entry.unit.layout.slots[index].name, entry.unit.reshards) for entry, index in written]
    by_rank: list[list[tuple[str, bool]]] = everyone.gather_objects(names, "written gradients")
    _require_whole([[name for name, sharded in line if sharded] for line in by_rank])
    held = None
    if parts_differ(collectives, everyone):
        somewhere = {name for line in by_rank for name, _ in line}
        own = [slot.name for entry in reducer.gradients for slot in entry.unit.layout.slots if slot.name in somewhere]
        held = everyone.gather_objects(own, "written gradients")
    _require_same([[name for name, _ in line] for line in by_rank], held)
    for entry, index in written:
        param = entry.unit.params[index]
        (grad,) = gradients_of([param])
        if param is None or grad is None:
            continue
        set_gradient(param, None)
        write_gradient(entry, index, _mean(entry, grad, collectives if entry.exchange.reduces else None))


def _mean(entry: UnitGradients, grad: torch.Tensor, collectives: Collectives | None) -> torch.Tensor:
    """Return the mean of the ranks' ``grad``, a copy in the accumulation dtype; collective. Without ``collectives``, return this rank's
    own.
    """
    whole = (grad.to_dense() if grad.is_sparse else grad).detach().to(entry.exchange.policy.accumulation_dtype, copy=True)
    if collectives is not None and collectives.world > 1:
        whole = whole.contiguous()
        collectives.all_reduce(whole, f"{entry.unit.name}: written gradient").wait()
        whole.div_(collectives.world)
    return whole


def written_gradient(entry: UnitGradients, index: int, shown: ShownGradients, collectives: Collectives) -> torch.Tensor | None:
    """Return the written gradient of one parameter that the coming step will use; collective.

    Args:
        entry: Gradients of its unit.
        index: Position in the unit.
        shown: The shown gradients, which are distinguished from written ones.
        collectives: Network of all ranks whose gradients are in the mean.

    Returns:
        The mean over ranks, of the parameter's shape, with the loss scale; None if no rank has written a gradient.

    Raises:
        StateError: On every rank, if the parameter is sharded, or only some ranks have written a gradient.
    """
    param = entry.unit.params[index]
    written = param is not None and shown.is_written(param)
    if not collectives.any_rank(written, "written gradients"):
        return None
    by_rank: list[list[str]] = collectives.gather_objects([entry.unit.layout.slots[index].name] * written, "written gradients")
    if entry.unit.reshards:
        _require_whole(by_rank)
    _require_same(by_rank)
    (grad,) = gradients_of([param])
    return None if grad is None else _mean(entry, grad, collectives)


def note_added(reducer: Reducer, factor: float) -> None:
    """Record the written gradients to which the coming backward will add, if the sum would differ from PyTorch's; local.

    [Note: a gradient written between micro-steps] In plain PyTorch a written gradient replaces those of earlier micro-steps, and the next
    backward adds to it. Here the sums, which may be sharded, already contain the earlier gradients: the step raises.

    Args:
        reducer: Reducer of all trained units.
        factor: Factor of the backward's gradients.
    """
    for entry, index in _written(reducer):
        if factor != 1.0 or entry.collected.used[index]:
            reducer.added_to[entry.unit.layout.slots[index].name] = None


def refuse_added(reducer: Reducer, collectives: Collectives) -> NoReturn:
    """Raise the error of the first gradient that ``note_added`` has recorded on any of the ranks; collective.

    Raises:
        StateError: Always, on every rank.
    """
    by_rank: list[list[str]] = collectives.gather_objects(list(reducer.added_to), "written gradients")
    raise StateError(
        f"{next(name for line in by_rank for name in line)}.grad was written by the script between micro-steps of an optimizer step, and "
        "the next backward has added to it. The gradients of earlier micro-steps would count too, whereas in plain PyTorch the "
        "assignment replaces them. Write it after the last backward, before step(); zero_grad() drops the accumulated gradients"
    )


def write_gradient(gradients: UnitGradients, index: int, value: torch.Tensor) -> None:
    """Set the gradient that the coming step uses for parameter ``index``.

    Args:
        gradients: Gradients of its unit.
        index: Position in the unit.
        value: Gradient of the parameter's full shape, times the loss scale; the same on all ranks, or this rank's own if nothing is
            reduced.
    """
    if not gradients.exchange.reduces:
        slot = gradients.unit.layout.slots[index]
        gradients.reduced()[slot.range.start : slot.range.stop].copy_(value.reshape(-1))
        return
    write_param(gradients.unit, index, gradients.writable(index), value)


def drop_gradients(reducer: Reducer, cleared: Container[int]) -> None:
    """Zero the gradients of the coming step for the parameters with the ids ``cleared``; every rank must call it."""
    for entry in reducer.gradients:
        collected = entry.collected
        if not (entry.has_local or collected.late or entry.shard is not None):
            continue
        for index, (param, slot) in enumerate(zip(entry.unit.params, entry.unit.layout.slots, strict=True)):
            if param is not None and id(param) in cleared:
                write_gradient(entry, index, torch.zeros(slot.shape, device=entry.unit.collectives.topology.device))
                collected.used[index] = False


def _written(reducer: Reducer) -> Iterator[tuple[UnitGradients, int]]:
    for entry in reducer.gradients:
        for index in reducer.shown.written_of(entry.unit.params):
            yield entry, index


def _require_whole(by_rank: Sequence[Sequence[str]]) -> None:
    """Raise the error of the first sharded parameter in ``by_rank``, the names of each rank, if there is one."""
    first = next((line[0] for line in by_rank if line), None)
    if first is not None:
        raise StateError(
            f"{first}.grad was written by the script, but at stage 3 a rank has only parts of parameters. Call "
            "hf_zero.utils.safe_set_full_grad(param, gradient) between backward and step(), or use stage 0, 1 or 2"
        )


def _require_same(by_rank: Sequence[Sequence[str]], held: Sequence[Container[str]] | None = None) -> None:
    """Raise if a gradient was written on some of the ranks that hold its parameter only; local.

    Args:
        by_rank: Names of the written gradients of each rank.
        held: Names of the parameters that each rank holds; None if all ranks hold the same.
    """
    for name in dict.fromkeys(name for line in by_rank for name in line):
        holders = [rank for rank in range(len(by_rank)) if held is None or name in held[rank]]
        writers = [rank for rank in holders if name in by_rank[rank]]
        if writers != holders:
            raise StateError(
                f"{name}.grad was written by the script on rank(s) {', '.join(map(str, writers))} of {len(by_rank)} only, but the engine "
                "averages gradients over all ranks: write the gradients of the same parameters on every rank, with zeros on ranks that "
                "have nothing to add"
            )


def saved_empty(units: Sequence[Unit]) -> str:
    """Return the error for parameters that the script has saved without values and not gathered since, and forget them; "" for none.

    Args:
        units: Units of the engine that steps; those of engines that do not train are looked at too.
    """
    units = [*units, *unsaved_beside()]
    names = [unit.layout.slots[index].name for unit in units for index in sorted(unit.unsaved)]
    for unit in units:
        unit.unsaved.clear()
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return str(refusal(names[0] + more, "a state dict without values was saved, and that file cannot be loaded")) if names else ""


class WrittenValues:
    """Values of parameters that a script has written, copied to shards and masters once before each step. See docs/parameters.md.

    A rank cannot raise alone. So a digest, which the ranks compare in the vote of the step, contains the writes that this rank refuses, and
    the parameters that it has seen written inside forwards or inside contexts that did not compare them at their end.

    [Note: written parts] With tensor parallelism, pipelines and experts, ranks have parts of the model that differ, so their digests
    differ too. The vote then finds whether any rank has written or refused something. If so, the ranks exchange their records, and each
    record must be the same on all ranks that hold the same part of the parameter.

    [Note: written whole] A rank may write to a parameter that all ranks have whole, and write the former values back (an evaluation with
    averaged weights on rank 0). So records of such writes hold no values: if the vote finds that any rank has written, the ranks compare
    the present values. Different values are an error where the optimizer's state is sharded: each element would take the value of the
    rank that owns it. At stage 0 each rank keeps its own values, as under DDP.

    Attributes:
        refused: Error of a write that is refused; empty if there is none.
        noted: Answer of this rank for the vote, whether the ranks must exchange records or compare present values.

    Args:
        units: All units of the engine, in the same order on all ranks that hold them.
        network: Network of the ranks that hold the engine's parameters that belong to no unit.
        everyone: Network of all ranks of the engine.
        idle: No backward of the forwards so far can follow.
        refused: Error of an earlier write; empty if there is none.
    """

    def __init__(self, units: Sequence[Unit], network: Collectives, everyone: Collectives, idle: bool, refused: str = "") -> None:
        self.refused = refused
        self._units, self._network = units, network
        self._records: dict[str, int] = {}
        self._touched = set[str]()
        for unit in units:
            try:
                adopt_writes(unit, idle)
                unit.derived.require_current(unit.name)
            except StateError as error:
                self.refused = self.refused or str(error)
            found = sorted(unit.written.take().items())
            self._records.update({_part_of(unit.layout.slots[index].name, unit.params[index]): record for index, record in found})
            if unit.written.touched:
                self._touched.update(unit.written.touched)
                unit.written.touched.clear()
        written = take_written_loose(network)
        loose = dict(loose_params(network)) if written else {}
        self._records.update({_part_of(name, loose.get(name)): record for name, record in sorted(written.items())})
        self._apart = parts_differ(network, everyone)
        self.noted = [int(bool(self.refused or self._records if self._apart else self._touched))]

    def alike(self) -> list[SharedFact]:
        """Return the digest as a fact for a vote, with an error that names parameter and ranks; empty if ranks hold other parameters."""
        digest = zlib.crc32(repr((self.refused, self._records)).encode()) if self.refused or self._records else 0
        return [] if self._apart else [SharedFact([digest], self.refuse)]

    def refuse(self, collectives: Collectives) -> NoReturn:
        """Raise the error of a write that was refused on any of the ranks, or was made on some ranks only; collective.

        Raises:
            StateError: Always, on all ranks.
        """
        self.compare(collectives)
        raise StateError("the ranks have written different parameters, see docs/parameters.md")

    def settle(self, noted: Sequence[int], collectives: Collectives) -> None:
        """Compare the records of all ranks if ``noted``, the result of the vote, says that a rank has any; collective."""
        if any(noted):
            self.compare(collectives)
            if not self._apart:
                self._compare_values(collectives)

    def compare(self, collectives: Collectives) -> None:
        """Compare the records of all ranks, [Note: written parts]; collective.

        Raises:
            StateError: On all ranks, if a write was refused on any of them, or was made on some of the ranks that hold a parameter only.
        """
        by_rank: list[tuple[str, dict[str, int]]] = collectives.gather_objects((self.refused, self._records), "written parameters")
        for rank, (refused, _) in enumerate(by_rank):
            if refused:
                raise StateError(f"{refused} (rank {rank})")
        written = dict.fromkeys(part for _, records in by_rank for part in records)
        held: list[Container[str]] = [written] * len(by_rank)
        if self._apart:
            held = collectives.gather_objects([part for part in self._held() if part in written], "held parameters")
        for part in written:
            holders = [rank for rank, parts in enumerate(held) if part in parts]
            records = {rank: by_rank[rank][1].get(part) for rank in holders}
            if len(set(records.values())) > 1:
                first = next(record for record in records.values() if record is not None)
                writers = [rank for rank, record in records.items() if record == first]
                raise _written_apart(part, writers, len(by_rank), self._apart)

    def _compare_values(self, collectives: Collectives) -> None:
        """Compare the present values of the parameters that any rank has written, [Note: written whole]; collective.

        Raises:
            StateError: On all ranks, if ranks have different values.
        """
        by_rank: list[list[str]] = collectives.gather_objects(sorted(self._touched), "written parameters")
        names = dict.fromkeys(name for line in by_rank for name in line)
        whole = [unit for unit in self._units if unit.state is UnitState.UNSHARDED]
        views = {slot.name: (unit, index) for unit in whole for index, slot in enumerate(unit.layout.slots) if slot.name in names}
        sums = {name: checksum(unit.whole.view(index)) for name, (unit, index) in views.items()}
        found: list[list[int | None]] = collectives.gather_objects([sums.get(name) for name in names], "written parameters")
        for name, *values in zip(names, *found, strict=True):
            if len({value for value in values if value is not None}) > 1:
                raise _written_apart(name, [rank for rank, line in enumerate(by_rank) if name in line], len(by_rank), False)

    def _held(self) -> Iterator[str]:
        """Yield the parts of parameters that this rank holds."""
        for unit in self._units:
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                yield _part_of(slot.name, param)
        for name, loose in loose_params(self._network):
            yield _part_of(name, loose)

    def agree(self, collectives: Collectives) -> None:
        """Compare the records outside of a step; collective.

        Raises:
            StateError: On all ranks, if a write was refused, or made on some ranks only.
        """
        if collectives.world > 1:
            self.settle(agree(collectives, self.alike(), self.noted), collectives)
        if self.refused:
            raise StateError(self.refused)


def parts_differ(data: Collectives, everyone: Collectives) -> bool:
    """Return whether some ranks of an engine hold parameters, or parts of them, that other ranks do not hold; local.

    Args:
        data: Network of the data-parallel axis.
        everyone: Network of all ranks of the engine.
    """
    return everyone.world != data.world or data.topology.expert is not None


def _written_apart(part: str, writers: Sequence[int], world: int, apart: bool) -> StateError:
    """Return the error of a parameter that ranks have written with different values; ``apart``: ranks hold different parts of the model."""
    inside = "" if apart else ", or inside `with hf_zero.zero.GatheredParameters([parameter], modifier_rank=0):`"
    return StateError(
        f"parameter {part} was written on rank(s) {', '.join(map(str, writers))} of {world}, and not written, or written with other values "
        "or at another time, on the remaining ranks that hold it: the ranks would train different models. Write the same values "
        f"on all ranks{inside}. If an optimizer of the script's own updates it, call its step() after the backward that completes an "
        "optimizer step: until then the gradient is each rank's own. nn.Embedding(max_norm=...) writes the rows that its rank looks up: "
        "normalize them in the forward instead (torch.nn.functional.normalize), or all rows after step()"
    )


def _part_of(name: str, param: torch.Tensor | None) -> str:
    """Return the name of a parameter, followed by the indices that this rank holds if it has only a part."""
    part = tp_shard_of(param) if param is not None and is_part(param) else None
    if part is None:
        return name
    return f"{name}[{', '.join(f'{run.start}:{run.stop}' for run in part.ranges)}, dimension {part.dim}]"
