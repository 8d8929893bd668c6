"""torch.distributed.checkpoint: folders with ``.metadata``, under the names that ``get_state_dict`` of torch gives.

``model.<name>`` are parameters and buffers, ``optim.state.<name>.<state>`` the states of a parameter, ``optim.param_groups`` the groups.
A folder that we wrote also has ``hf_zero``: counters, scheduler, client state and the like.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from hf_zero.checkpoint.convert.pickles import require_trust
from hf_zero.checkpoint.convert.source import FROZEN, Progress, Source, SourceParam, SourceTensor, read_only
from hf_zero.checkpoint.tensor_file import Elsewhere
from hf_zero.errors import CheckpointError

_METADATA = ".metadata"
_OURS = "hf_zero"  # an object with what the names above have no place for
_MODEL = ("model.", "module.", "state_dict.model.", "app.model.")
_OPTIMIZER = ("optim.", "optimizer.", "optimizers.", "state_dict.optimizer.", "app.optim.", "app.optimizer.")


def is_dcp(folder: Path) -> bool:
    """Whether ``folder`` is one of torch.distributed.checkpoint."""
    return (folder / _METADATA).is_file()


# -- writing ------------------------------------------------------------------------------------------------------------


class _Streaming(DefaultSavePlanner):
    """Gives the elements of a tensor when they are written, and not before: the state dict is of meta tensors."""

    def __init__(self, rows: dict[str, SourceTensor], progress: Progress) -> None:
        super().__init__(flatten_state_dict=False)
        self._rows = rows
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor or object of an item."""
        found = self._rows.get(write_item.index.fqn)
        if found is None:
            return super().resolve_data(write_item)
        values = torch.empty(found.row.numel(), dtype=found.row.dtype)
        found.row.read(found.row.start, values)
        self._progress(values.nbytes)
        return values.view(found.shape)


def write_dcp(source: Source, folder: Path, progress: Progress) -> None:
    """Writes ``source`` for ``torch.distributed.checkpoint.load``; holds the tensor that is being written.

    Raises:
        CheckpointError: The folder has such a checkpoint already, or it cannot be written.
    """
    if is_dcp(folder):
        raise CheckpointError(f"{folder} holds a checkpoint already; choose another folder")
    rows = {f"model.{tensor.name}": tensor for tensor in (*(param.value for param in source.params), *source.buffers)}
    state: dict[str, Any] = {}
    for param in source.params:
        for key, row in param.states.items():
            name = f"optim.state.{param.name}.{key}"
            rows[name] = SourceTensor(name, param.value.shape, row)
        for key, value in param.numbers.items():
            state[f"optim.state.{param.name}.{key}"] = value
    if source.optimizer is not None:
        members = [[param.name for param in source.params if param.group == number] for number in range(len(source.groups))]
        state["optim.param_groups"] = [{**group, "params": names} for group, names in zip(source.groups, members, strict=True)]
    state[_OURS] = {
        "optimizer": source.optimizer,
        "values": source.values,
        "counters": source.counters,
        "stage": source.stage,
        "aliases": source.aliases,
        "buffers": [buffer.name for buffer in source.buffers],
        "dtypes": {param.name: param.dtype for param in source.params},
    }
    state.update({name: torch.empty(tensor.shape, dtype=tensor.row.dtype, device="meta") for name, tensor in rows.items()})
    try:
        with _alone():
            save(state, storage_writer=FileSystemWriter(folder), planner=_Streaming(rows, progress), no_dist=True)
    except Exception as error:  # torch wraps whatever happened
        raise CheckpointError(f"cannot write {folder}: {error}") from error


# -- reading ------------------------------------------------------------------------------------------------------------


def read_dcp(folder: Path, trust_pickle: bool) -> Source:
    """Opens a folder; parameters and optimizer states are found by the names that torch gives them.

    Raises:
        CheckpointError: Pickles are not allowed (``.metadata`` is one), or no parameter is found.
    """
    require_trust(trust_pickle, folder / _METADATA, "by PyTorch, as everything that torch.distributed.checkpoint writes")
    try:
        metadata: Metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # whatever a broken pickle raises
        raise CheckpointError(f"cannot read {folder / _METADATA}: {error}") from error
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    optimizer = {name: _after(name, _OPTIMIZER) for name in tensors}
    values = {name: _after(name, _MODEL) or name for name in tensors if not optimizer[name]}
    states: dict[str, dict[str, str]] = {}
    for stored, inner in optimizer.items():
        if inner and inner.startswith("state."):
            param, _, state = inner.removeprefix("state.").rpartition(".")
            states.setdefault(param, {})[state] = stored
    params, buffers = [], []
    groups, group_of = _groups(folder, metadata)
    own = _object(folder, _OURS) if isinstance(metadata.state_dict_metadata.get(_OURS), BytesStorageMetadata) else {}
    for stored, name in values.items():
        value = _tensor(folder, stored, name, tensors[stored])
        if name in own.get("buffers", ()):
            buffers.append(value)
            continue
        flat, numbers = {}, {}
        for state, place in states.get(name, {}).items():
            entry = tensors[place]
            if tuple(entry.size) == value.shape and value.shape:
                flat[state] = _tensor(folder, place, place, entry).row
            else:
                numbers[state] = _tensor(folder, place, place, entry).row.fetch().reshape(tuple(entry.size))
        group = group_of.get(name, 0 if flat or numbers else FROZEN)
        params.append(SourceParam(value, own.get("dtypes", {}).get(name, value.row.dtype), group, flat, numbers))
    return Source(
        what=f"the distributed checkpoint {folder}",
        params=tuple(params),
        buffers=tuple(buffers),
        aliases=own.get("aliases", {}),
        values=own.get("values", {}),
        counters=own.get("counters", {}),
        stage=own.get("stage", 0),
        optimizer=own.get("optimizer", "" if states else None),
        groups=tuple(groups if groups else [{}] if states else []),
    ).require_any()


def _after(name: str, prefixes: tuple[str, ...]) -> str:
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), "")


def _tensor(folder: Path, stored: str, name: str, entry: TensorStorageMetadata) -> SourceTensor:
    """A tensor that is read whole when its first window is wanted, and dropped when another is read."""
    shape, dtype = tuple(entry.size), entry.properties.dtype
    held: list[torch.Tensor] = []

    def read(first: int, target: torch.Tensor) -> None:
        if not held:
            whole = torch.empty(shape, dtype=dtype)
            with _alone():
                load({stored: whole}, storage_reader=FileSystemReader(folder), no_dist=True)
            held.append(whole)
        target.copy_(held[0].reshape(-1)[first : first + target.numel()])
        if first + target.numel() == held[0].numel():
            held.clear()

    return SourceTensor(name, shape, Elsewhere(dtype, math.prod(shape), read, read_only))


def _groups(folder: Path, metadata: Metadata) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Hyper-parameters by group, and the group of each parameter, where they were saved as one object; else nothing."""
    name = next((name for name, entry in metadata.state_dict_metadata.items() if _is_groups(name, entry)), None)
    if name is None:
        return [], {}
    found = _object(folder, name)
    if not isinstance(found, list) or not all(isinstance(group, dict) for group in found):
        return [], {}
    group_of = {param: number for number, group in enumerate(found) for param in group.get("params", ()) if isinstance(param, str)}
    return [{key: value for key, value in group.items() if key != "params"} for group in found], group_of


def _object(folder: Path, name: str) -> Any:
    box: dict[str, Any] = {name: None}
    with _alone():
        load(box, storage_reader=FileSystemReader(folder), no_dist=True)
    return box[name]


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that there is no process group: none is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _is_groups(name: str, entry: Any) -> bool:
    return isinstance(entry, BytesStorageMetadata) and _after(name, _OPTIMIZER) == "param_groups"
