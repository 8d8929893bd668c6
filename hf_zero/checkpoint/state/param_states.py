"""Save and load optimizer states of whole parameters; the rank that owns a parameter saves its states, of any shape and type.

[Note: states in codes] Some states are tensors of a library's own class, such as torchao's moments in 8 and 4 bits. A checkpoint has the
plain tensors inside such a state and the name of its class. No class is looked up by that name: the present optimizer makes a state of its
own for the parameter, of its own class and block size, and takes the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hf_zero.checkpoint.files.catalog import Catalog, Located
from hf_zero.checkpoint.files.rows import Entry, whole
from hf_zero.checkpoint.files.tensor_reader import RangeReader
from hf_zero.checkpoint.format.names import DTYPES, state_kind
from hf_zero.checkpoint.format.records import ParamStateRecord
from hf_zero.checkpoint.format.values import Decoder, Encoder
from hf_zero.checkpoint.state.optimizer_state import GroupsPlan
from hf_zero.core.optimizer.clones import state_after_a_step, state_at_start
from hf_zero.core.optimizer.param_states import WholeParam
from hf_zero.core.optimizer.whole_tensors import WholeTensorOptimizer
from hf_zero.core.units.marks import inner_tensors, is_wrapped
from hf_zero.errors import CheckpointError

_KIND = "hf_zero_state_class"
_TENSORS = "tensors"


def param_states(
    optimizer: WholeTensorOptimizer, file: str, replica: int = 0, replicas: int = 1
) -> tuple[tuple[ParamStateRecord, ...], list[Entry]]:
    """Return this rank's share of the states: records for the index, and entries of ``file``; copies no tensor.

    Args:
        optimizer: Optimizer whose states are saved.
        file: File that this rank writes.
        replica: Index of this rank among the ranks that keep the same states; it writes every ``replicas``-th state.
        replicas: Number of ranks that keep the same states.

    Raises:
        CheckpointError: A state holds an object that cannot be saved; the message names parameter and key.
    """
    encoder = Encoder()
    records = []
    for number, entry in enumerate(optimizer.whole):
        if entry.writes and entry.state and number % replicas == replica:
            values = encoder.encode(unwrapped(entry.state), f"optimizer.state[{entry.slot.name}]")
            records.append(ParamStateRecord(entry.slot.name, file, values))
    return tuple(records), [whole(name, tensor) for name, tensor in encoder.tensors.items()]


class ParamStatesPlan(GroupsPlan):
    """A map of the saved optimizer state to the parameters that this rank updates.

    States that were saved as shards (by another optimizer, or by a conversion) are joined to whole tensors.

    Args:
        optimizer: Optimizer whose state is restored.
        catalog: Contents of the checkpoint.
        decoder: Decoder of the values in the index.
        reader: Reader of the checkpoint's files.

    Raises:
        CheckpointError: The checkpoint has no optimizer, or its param groups contradict the present ones.
    """

    optimizer: WholeTensorOptimizer
    whole = True

    def __init__(self, optimizer: WholeTensorOptimizer, catalog: Catalog, decoder: Decoder, reader: RangeReader) -> None:
        super().__init__(optimizer, catalog, decoder)
        self._reader = reader
        records = {record.param: record for record in self._record.params}
        self._whole: dict[str, ParamStateRecord] = {}
        self._flat: dict[str, dict[str, Any]] = {}
        fresh = []
        for entry in optimizer.whole:
            if not self._takeover.takes(entry.slot.name):
                continue
            found = catalog.find(entry.slot.name)
            record = records.get(catalog.canonical(entry.slot.name))
            if record is not None:
                self._whole[entry.slot.name] = record
            elif found is not None and found.trained and self._record.states:
                self._flat[entry.slot.name] = self._join(entry, found)
            elif found is None or not found.trained or records:
                fresh.append(entry.slot.name)
        self.warn_of_fresh(fresh)

    def files(self) -> set[str]:
        """Return the names of the files with states of whole parameters that this rank reads."""
        return {record.file for record in self._whole.values() if record.file in self._reader.files}

    def _join(self, entry: WholeParam, found: Located) -> dict[str, Any]:
        """Return the states of one parameter that was saved as shards: empty tensors that ``copies`` fill, and its single numbers."""
        name = self._catalog.canonical(entry.slot.name)
        numbers = self._numbers(found.unit.name, found.group, name) if found.unit is not None else None
        state: dict[str, Any] = dict(self._decoder.decode(numbers)) if numbers is not None else {}
        for name in self._record.states:
            dtype = self._catalog.dtype(found, state_kind(name))
            if dtype is not None:
                row = torch.empty(entry.slot.numel, dtype=DTYPES[dtype], device=entry.param.device)
                self.copies += self._catalog.copies(found, state_kind(name), found.whole, 0, row)
                state[name] = row.view(entry.slot.shape)
        return state

    def apply(self) -> None:
        """Set the optimizer's param groups and states to the values that were read; local.

        Raises:
            CheckpointError: A file is damaged.
        """
        super().apply()
        for entry in self.optimizer.whole:
            name = entry.slot.name
            group = self.optimizer.param_groups[entry.slot.group]
            state = self._state(name) or state_at_start(self.optimizer.inner, entry.slot.group, entry.param)
            state = _placed(state, entry.param.device, bool(group.get("capturable") or group.get("fused")))
            entry.install(wrapped(state, self.optimizer.inner, entry))

    def _state(self, name: str) -> dict[str, Any]:
        record = self._whole.get(name)
        if record is None:
            return self._flat.get(name, {})
        decoder = Decoder(lambda tensor: self._reader.whole(record.file, tensor), f"the optimizer state of {name}")
        return dict(decoder.decode(record.values))


def _placed(state: dict[str, Any], device: torch.device, fused: bool) -> dict[str, Any]:
    """Return ``state`` with its tensors on ``device``; as in torch's ``load_state_dict``, ``step`` stays on the host unless ``fused``."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    return {key: value if key == "step" and not fused else tree_map_only(torch.Tensor, move, value) for key, value in state.items()}


def unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter with plain tensors only, see [Note: states in codes]; copies no tensor."""
    return {key: _opened(value) if isinstance(value, torch.Tensor) and is_wrapped(value) else value for key, value in state.items()}


def _opened(value: torch.Tensor) -> dict[str, Any]:
    return {_KIND: type(value).__name__, _TENSORS: inner_tensors(value)}


def wrapped(state: dict[str, Any], inner: torch.optim.Optimizer, entry: WholeParam) -> dict[str, Any]:
    """Return a loaded state of one parameter as the present optimizer keeps it, see [Note: states in codes]; local.

    Args:
        state: The state, as ``unwrapped`` returned it.
        inner: The present optimizer.
        entry: The parameter.

    Raises:
        CheckpointError: The present optimizer keeps a tensor of another class, or tensors of other shapes in it.
    """
    codes = {key: value for key, value in state.items() if isinstance(value, dict) and _KIND in value}
    if not codes:
        return state
    own = state_after_a_step(inner, entry.slot.group, entry.param)
    for key, saved in codes.items():
        present = own.get(key)
        if not isinstance(present, torch.Tensor) or type(present).__name__ != saved[_KIND]:
            raise CheckpointError(
                f"the checkpoint has the optimizer state {key!r} of {entry.slot.name} as a {saved[_KIND]}, and {type(inner).__name__} "
                f"keeps a {type(present).__name__}: use the optimizer that saved it, or pass load_optimizer_states=False"
            )
        _fill(inner_tensors(present), saved[_TENSORS], f"the optimizer state {key!r} of {entry.slot.name}")
    return {key: own[key] if key in codes else value for key, value in state.items()}


def _fill(present: Mapping[str, torch.Tensor], saved: Mapping[str, Any], what: str) -> None:
    """Copy ``saved`` into the tensors inside a state.

    Raises:
        CheckpointError: Names or shapes differ, as they do with another block size.
    """
    shapes = {name: tuple(value.shape) for name, value in present.items()}
    found = {name: tuple(value.shape) for name, value in saved.items()}
    if shapes != found:
        raise CheckpointError(
            f"{what} has tensors of the shapes {found} in the checkpoint, and {shapes} with the present optimizer: set the block_size "
            "that it was saved with, or pass load_optimizer_states=False"
        )
    for name, value in present.items():
        value.copy_(saved[name])
