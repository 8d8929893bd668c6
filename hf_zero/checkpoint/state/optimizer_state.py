"""Save and load a sharded optimizer's state: rows laid out like the masters, single numbers, param groups matched by parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hf_zero.checkpoint.files.catalog import Catalog, Located
from hf_zero.checkpoint.files.rows import Entry, Piece
from hf_zero.checkpoint.files.tensor_reader import Copy
from hf_zero.checkpoint.format.names import DTYPES, state_kind
from hf_zero.checkpoint.format.plausible import check_alike, check_group, has_known_values, missing_settings
from hf_zero.checkpoint.format.records import OptimizerRecord, ScalarRecord
from hf_zero.checkpoint.format.values import Decoder, Encoder, encode_scalar
from hf_zero.checkpoint.state.own_entries import KEY, give_entries, own_entries
from hf_zero.checkpoint.state.param_groups import EXECUTION_KEYS, differences, names_in_group, sources_of_groups, update_group
from hf_zero.checkpoint.state.takeover import Takeover
from hf_zero.checkpoint.state.training_state import TensorAxis
from hf_zero.core.optimizer.clones import row_names, state_at_start
from hf_zero.core.optimizer.common_states import common_states, set_common_states
from hf_zero.core.optimizer.segments import OwnedSegment
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.units.layout import FROZEN, ParamSlot
from hf_zero.core.units.names import has_left
from hf_zero.errors import CheckpointError
from hf_zero.observe import warn_once

# -- to files ---------------------------------------------------------------------------------------------------------


def flat_states(optimizer: ShardedOptimizer) -> list[str]:
    """Return the names of the states with one element per parameter element on this rank, in a fixed order."""
    numbers = _shaped_numbers(optimizer)
    return sorted({name for segment in optimizer.segments for name in _rows(optimizer, segment, numbers)})


def state_entries(optimizer: ShardedOptimizer, state: str) -> list[Entry]:
    """Return ``state`` laid out like the master shards, one entry per unit that has this state on this rank; gaps are zeros.

    Raises:
        CheckpointError: A tensor has neither its segment's shape nor a single element, or the tensors of a unit differ in dtype.
    """
    entries = []
    numbers = _shaped_numbers(optimizer)
    for unit in optimizer.units:
        pieces: list[Piece] = []
        end, dtype = 0, None
        for segment in sorted(optimizer.segments.of(unit), key=lambda segment: segment.range.start):
            value = _rows(optimizer, segment, numbers).get(state)
            if value is None:
                continue
            count = segment.range.numel
            if value.shape != (count,):
                raise CheckpointError(
                    f"the optimizer state {state!r} of unit {unit.name} has shape {tuple(value.shape)} for "
                    f"{count} elements; only states with one number per element, or a single number, can be saved"
                )
            if dtype not in (None, value.dtype):
                raise CheckpointError(
                    f"the optimizer state {state!r} of unit {unit.name} has types {dtype} and {value.dtype}; expected one type"
                )
            dtype = value.dtype
            pieces += [segment.range.start - end, value]
            end = segment.range.stop
        if dtype is not None:
            pieces.append(unit.layout.shard_numel - end)
            entries.append(Entry(unit.name, dtype, (unit.layout.shard_numel,), tuple(pieces)))
    return entries


def scalars(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """Return this rank's single-number states by segment: unit, group and encoded values, and the parameters of a segment that was cut;
    the values of a cut segment without states are None.
    """
    found = []
    shaped = _shaped_numbers(optimizer)
    for segment in optimizer.segments:
        what = f"the optimizer state of unit {segment.unit.name}, group {segment.group}"
        states = _states(optimizer, segment)
        numbers = states.keys() - _rows(optimizer, segment, shaped).keys()
        values = {name: encode_scalar(value, f"{what}, {name!r}") for name, value in states.items() if name in numbers} if states else None
        if states or optimizer.cut_segments:
            params = [slot.name for slot in slots_in(segment)] if optimizer.cut_segments else []
            found.append({"unit": segment.unit.name, "group": segment.group, "values": values, "params": params})
    return found


def merge_scalars(by_rank: Sequence[Sequence[dict[str, Any]]]) -> tuple[ScalarRecord, ...]:
    """Return one record per unit and group, or per parameter where these differ, from all ranks.

    Raises:
        CheckpointError: Ranks have different numbers for one parameter, so the optimizer's state depends on how a unit is divided.
    """
    merged: dict[
        tuple[str, int], dict[str, Any]
    ] = {}  # (unit, group) -> values by parameter; the key "" is for all parameters of an uncut segment
    for rank, found in enumerate(by_rank):
        for entry in found:
            key = (entry["unit"], entry["group"])
            for param in entry["params"] or [""]:
                known = merged.setdefault(key, {}).setdefault(param, entry["values"])
                if known != entry["values"]:
                    what = param or f"group {key[1]} of unit {key[0]}"
                    raise CheckpointError(
                        f"the optimizer keeps {entry['values']} for {what} on rank {rank} and {known} on another rank; a state that "
                        "differs between the shards of one parameter cannot be saved"
                    )
    records = []
    for (unit, group), values in merged.items():
        first = next(iter(values.values()))
        if any(value != first for value in values.values()):
            records += [ScalarRecord(name, group, value) for name, value in values.items() if not has_left(name)]
        elif first is not None:
            records.append(ScalarRecord(unit, group, first))
    return tuple(records)


def _states(optimizer: ShardedOptimizer, segment: OwnedSegment) -> Mapping[str, Any]:
    """Return the states of a segment between updates: rows of the segment's length and single numbers; empty before the first step."""
    optimizer.state_store.settle()
    return segment.state


def _rows(optimizer: ShardedOptimizer, segment: OwnedSegment, numbers: Set[str]) -> dict[str, torch.Tensor]:
    """Return the states of a segment with one element per parameter element; ``numbers`` is the result of ``_shaped_numbers``."""
    return {
        name: value
        for name, value in _states(optimizer, segment).items()
        if isinstance(value, torch.Tensor) and value.ndim and not (value.numel() == 1 and name in numbers)
    }


def _shaped_numbers(optimizer: ShardedOptimizer) -> set[str]:
    """Return the names of single-number states that the optimizer keeps as tensors of shape (1,); local.

    In a segment of one element, a state per element has this shape too. Longer segments distinguish the two; without any, the optimizer
    class is tried on a small tensor.
    """
    numbers, rows, unclear = set[str](), set[str](), dict[str, int]()
    for segment in optimizer.segments:
        for name, value in _states(optimizer, segment).items():
            if not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            if segment.range.numel == 1:
                unclear[name] = segment.group
            else:
                (numbers if value.numel() == 1 else rows).add(name)
    for name in unclear.keys() - rows - numbers:
        known = row_names(optimizer.inner, unclear[name])
        if known is not None and name not in known:
            numbers.add(name)
    return numbers


def common_record(optimizer: ShardedOptimizer, encoder: Encoder) -> dict[str, Any]:
    """Return the encoded states that the optimizer keeps under keys that are no parameters (a count of steps), and its own entries.

    Raises:
        CheckpointError: A key is no text, or a value is neither a number, a tensor of one number, nor a dict of such values.
    """
    optimizer.state_store.settle()
    found = {}
    keys: Iterable[Any] = dict.keys(optimizer.inner.state)
    for other in keys:
        if not isinstance(other, (torch.Tensor, str)) or (isinstance(other, str) and other.startswith("$")):
            raise CheckpointError(
                f"optimizer.state has the key {other!r}, and only tensors of the param groups and texts can be saved: keep the state of a "
                "parameter in self.state[param]"
            )
    for key, value in common_states(optimizer.inner).items():
        what = f"optimizer.state[{key!r}]"
        if isinstance(value, dict):
            found[key] = {str(name): encode_scalar(number, f"{what}[{name!r}]") for name, number in value.items()}
        else:
            found[key] = encode_scalar(value, what)
    own = own_entries(optimizer.inner, encoder)
    return {**found, KEY: own} if own else found


# -- from files -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentPlan:
    """The loaded optimizer states of one segment.

    Attributes:
        segment: The segment.
        flat: States with one element per parameter element, (elements of the segment,) each, by name; the plan's ``copies`` fill them.
        numbers: Single-number states by name.
    """

    segment: OwnedSegment
    flat: dict[str, torch.Tensor]
    numbers: dict[str, Any]


class GroupsPlan:
    """A map of the saved param groups to the present ones.

    The constructor reads no tensors and changes nothing. ``copies`` fill new tensors; ``apply`` installs them in the optimizer.

    Attributes:
        optimizer: Optimizer whose groups and state are restored.
        copies: Ranges of files to read, with the tensors to fill.
        whole: Whether the optimizer keeps states of whole parameters instead of segments.

    Args:
        optimizer: Optimizer whose groups and state are restored.
        catalog: Contents of the checkpoint.
        decoder: Decoder of the values in the index.

    Raises:
        CheckpointError: The checkpoint has no optimizer, or its param groups contradict the present ones.
    """

    whole = False

    def __init__(self, optimizer: ShardedOptimizer, catalog: Catalog, decoder: Decoder) -> None:
        record = catalog.index.optimizer
        if record is None:
            raise CheckpointError(
                "the checkpoint was saved by an engine without optimizer; pass load_optimizer_states=False to load the weights alone"
            )
        self.optimizer = optimizer
        self.copies: list[Copy] = []
        self._catalog = catalog
        self._record: OptimizerRecord = record
        self._decoder = decoder
        self._numbers = record.numbers()
        self._takeover = Takeover(optimizer, record, catalog, self.whole)
        sources = sources_of_groups(optimizer, record.groups, catalog)
        self._groups = [self._match(index, source) for index, source in enumerate(sources)]
        self._warn_of_split_groups(sources)
        self._common: dict[str, Any] | None = None if self._takeover.foreign else decoder.decode(record.common)

    def warn_of_fresh(self, names: Sequence[str]) -> None:
        """Warn once that the optimizer states of the parameters ``names`` start from zero; do nothing without names."""
        if names:
            warn_once(f"the checkpoint has no optimizer state for {len(names)} parameters ({names[0]}, ...): their state starts from zero")

    def _warn_of_split_groups(self, sources: Sequence[int | None]) -> None:
        """Warn of present param groups with different settings that all get the settings of one saved group."""
        first: dict[int, int] = {}
        for index, source in enumerate(sources):
            before = first.setdefault(source, index) if source is not None else index
            one, other = (self._replaced(number) for number in (before, index))
            if one != other:
                warn_once(
                    f"param groups {before} and {index} of this optimizer were one group when the checkpoint was saved, and take over its "
                    f"hyper-parameters; their own settings are lost: {differences(one, other)}. Set them again after the load"
                )

    def _replaced(self, index: int) -> dict[str, Any]:
        """Return the settings of the present param group ``index`` that saved ones replace."""
        group = self.optimizer.param_groups[index]
        return {key: group.get(key) for key in self._groups[index] if not isinstance(group.get(key), torch.Tensor)}

    def _match(self, index: int, source: int | None) -> dict[str, Any]:
        """Return the hyper-parameters of the saved group ``source`` for the present param group ``index``; none without a source."""
        if source is None:
            return {}
        first, group = self._record.groups[source], self.optimizer.param_groups[index]
        names = {self._catalog.canonical(name) for name in names_in_group(self.optimizer.units, index)}
        for other in (saved for saved in self._record.groups if names & set(saved.params)):
            if self._takeover.settings(group, other.values) != self._takeover.settings(group, first.values):
                raise CheckpointError(
                    f"param group {index} of this optimizer holds parameters of saved groups with different settings: "
                    f"{differences(first.values, other.values)} ({first.params[0]} and {other.params[0]}). "
                    "Build the optimizer with the groups it was saved with, or pass load_optimizer_states=False"
                )
        values: dict[str, Any] = self._decoder.decode(first.values)
        taken = self._takeover.settings(group, {key: value for key, value in values.items() if key not in EXECUTION_KEYS})
        if has_known_values(self.optimizer.inner):
            check_group(taken, f"param group {index}")
            check_alike({key: value for key, value in group.items() if key != "params"}, taken, f"param group {index}")
        self._takeover.check_switches(group, taken, f"param group {index}")
        lost = sorted(missing_settings(group, values)) if self._takeover.same_class and values else []
        if lost:
            raise CheckpointError(f"param group {index}: the checkpoint lacks the keys {', '.join(lost)}; it has {sorted(values)}")
        return taken

    def files(self) -> set[str]:
        """Return the names of the files that this rank reads in addition to those of ``copies``."""
        return set()

    def apply(self) -> None:
        """Set the hyper-parameters of the param groups, and states under keys that are no parameters, to the saved values; local."""
        for group, values in zip(self.optimizer.param_groups, self._groups, strict=True):
            update_group(group, values)
        if self._common is not None:
            self.optimizer.state_store.settle()
            entries = self._common.pop(KEY, None)
            set_common_states(self.optimizer.inner, self._common)
            if entries:
                give_entries(self.optimizer.inner, entries)


class OptimizerPlan(GroupsPlan):
    """A map of the saved optimizer state to the segments of this rank.

    Args:
        optimizer: Optimizer whose state is restored.
        tensor: This rank's place on the tensor-parallel axis.
        catalog: Contents of the checkpoint.
        decoder: Decoder of the values in the index.

    Raises:
        CheckpointError: The checkpoint has no optimizer, or its param groups contradict the present ones.
    """

    def __init__(self, optimizer: ShardedOptimizer, tensor: TensorAxis, catalog: Catalog, decoder: Decoder) -> None:
        super().__init__(optimizer, catalog, decoder)
        self._tensor = tensor
        cut_by_history(self.optimizer, self._history)
        self._segments = [self._plan(segment) for segment in optimizer.segments]
        names = [name for index in range(len(optimizer.param_groups)) for name in names_in_group(optimizer.units, index)]
        self.warn_of_fresh([name for name in names if not self._trained(name)])

    def _trained(self, name: str) -> bool:
        found = self._catalog.find(name)
        return found is not None and found.trained and not self._record.params

    # -- states

    def _plan(self, segment: OwnedSegment) -> SegmentPlan:
        located = [(slot, found) for slot in slots_in(segment) if (found := self._catalog.find(slot.name)) is not None]
        trained = [(slot, found) for slot, found in located if found.trained and self._takeover.takes(slot.name)]
        flat: dict[str, torch.Tensor] = {}
        for state in self._record.states:
            dtypes = {dtype for _, found in trained if (dtype := self._catalog.dtype(found, state_kind(state))) is not None}
            if dtypes:
                whole = len(trained) == len(slots_in(segment))
                flat[state] = self._room(segment, state, DTYPES[sorted(dtypes)[0]], whole)
                for slot, found in trained:
                    self._copy(segment, slot, found, state, flat[state])
        numbers = self._numbers_of(trained)
        if flat and not self._switched(segment.group):
            self._takeover.check_complete(segment.group, {*flat, *numbers}, trained[0][0].name)
        return SegmentPlan(segment, flat, numbers)

    def _switched(self, index: int) -> bool:
        """Return whether the saved settings switch something of the present param group ``index`` on or off (``amsgrad``, a momentum of 0),
        so that the present settings need other states than the saved ones, which are taken over.
        """
        group = self.optimizer.param_groups[index]
        saved = {key: value for key, value in self._groups[index].items() if key not in ("lr", "initial_lr")}
        plain = (bool, int, float)
        return any(isinstance(group.get(key), plain) and bool(group[key]) != bool(value) for key, value in saved.items())

    def _room(self, segment: OwnedSegment, state: str, dtype: torch.dtype, whole: bool) -> torch.Tensor:
        """Return the tensor that a saved state is read into; it is zero unless ``whole``, which says that reads fill every element."""
        # Use the present tensor where possible, so that moments are not in memory twice.
        present = _states(self.optimizer, segment).get(state)
        fits = isinstance(present, torch.Tensor) and present.shape == segment.tensor.shape and present.dtype == dtype
        return present if whole and fits and present is not None else self.optimizer.state_store.new_state(segment, state, dtype)

    def _copy(self, segment: OwnedSegment, slot: ParamSlot, found: Located, state: str, target: torch.Tensor) -> None:
        start = segment.unit.owned.start + segment.range.start  # first element of the segment inside the unit
        part = slot.range.intersect(segment.range.shift(segment.unit.owned.start))
        if self._catalog.dtype(found, state_kind(state)) is not None:
            place = target[part.start - start : part.stop - start]
            wanted = self._tensor.tp_shard_of(slot.name, slot.shape)
            self.copies += self._catalog.copies(found, state_kind(state), wanted, part.start - slot.offset, place)

    def _found_numbers(self, slot: ParamSlot) -> Any:
        """Return the saved single-number states of a parameter; None if it has none."""
        found = self._catalog.find(slot.name)
        if found is None or not found.trained or found.unit is None or not self._takeover.takes(slot.name):
            return None
        return self._numbers(found.unit.name, found.group, self._catalog.canonical(slot.name))

    def _history(self, slot: ParamSlot) -> Any:
        """Return a value that differs between parameters with different numbers of updates: single-number states and whether rows exist."""
        found = self._catalog.find(slot.name)
        if found is None or not found.trained or not self._takeover.takes(slot.name):
            return None, False
        has_rows = any(self._catalog.dtype(found, state_kind(state)) is not None for state in self._record.states)
        return self._found_numbers(slot), has_rows

    def _numbers_of(self, trained: Sequence[tuple[ParamSlot, Located]]) -> dict[str, Any]:
        chosen = next((values for slot, _ in trained if (values := self._found_numbers(slot)) is not None), None)
        return self._decoder.decode(chosen) if chosen is not None else {}

    def apply(self) -> None:
        """Set the optimizer's param groups and states to the saved values; local."""
        super().apply()
        self.optimizer.state_store.settle()
        for plan in self._segments:
            segment, group = plan.segment, self.optimizer.param_groups[plan.segment.group]
            on_device = bool(group.get("capturable") or group.get("fused"))
            numbers = {name: placed(value, segment.tensor, on_device) for name, value in plan.numbers.items()}
            fresh = {} if numbers or plan.flat else state_at_start(segment.inner, segment.group, segment.tensor)
            segment.install({**fresh, **numbers, **plan.flat})
        self.optimizer.state_store.adopt_states()


def slots_in(segment: OwnedSegment) -> list[ParamSlot]:
    """Return the slots of the parameters that have elements in the segment."""
    inside = segment.range.shift(segment.unit.owned.start)
    return [slot for slot in segment.unit.layout.slots if slot.group == segment.group and slot.range.intersect(inside).numel]


def cut_by_history(optimizer: ShardedOptimizer, history: Callable[[ParamSlot], Any]) -> None:
    """Cut segments between parameters that the saved optimizer has updated a different number of times; local, equal on all ranks.

    Args:
        optimizer: The optimizer to cut.
        history: Returns a value that differs between such parameters.
    """
    starts: dict[int, list[int]] = {}
    for segment in optimizer.segments:
        first = segment.unit.owned.start + segment.range.start
        for before, slot in pairwise(slots_in(segment)):
            if history(before) != history(slot):
                starts.setdefault(id(segment.tensor), []).append(slot.offset - first)
    for unit in optimizer.units:
        trained = [slot for slot in unit.layout.slots if slot.group != FROZEN and slot.numel]
        if any(one.group == other.group and history(one) != history(other) for one, other in pairwise(trained)):
            optimizer.cut(starts)
            return


def placed(value: Any, like: torch.Tensor, on_device: bool) -> Any:
    """Return a single-number state on the device of ``like`` if the optimizer needs it there, else unchanged.

    Fused and capturable kernels read ``step`` on the device (``on_device``). A tensor of shape (1,) also moves there, because torch mixes
    only 0-dim host tensors with tensors of a device.
    """
    return value.to(like.device) if isinstance(value, torch.Tensor) and (on_device or value.ndim) else value
