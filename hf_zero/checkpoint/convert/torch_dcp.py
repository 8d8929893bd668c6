"""Read and write checkpoints of torch.distributed.checkpoint, with the item names of torch's ``get_state_dict``.

``model.<name>`` are parameters and buffers, ``optim.state.<name>.<state>`` the states of a parameter, ``optim.param_groups`` the param
groups. A folder that hf_zero wrote also has the item ``hf_zero``: counters, scheduler, client state and similar values, as JSON and
tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from hf_zero.checkpoint.convert.dcp_files import METADATA, DcpFolder
from hf_zero.checkpoint.convert.source import FROZEN, Progress, Source, SourceParam, SourceTensor, read_only
from hf_zero.checkpoint.files.rows import Elsewhere
from hf_zero.checkpoint.format.names import DTYPES, dtype_name
from hf_zero.checkpoint.format.records import read_record
from hf_zero.checkpoint.format.values import Decoder, Encoder
from hf_zero.errors import CheckpointError
from hf_zero.observe import warn_once
from hf_zero.system import own_files
from hf_zero.system.reading import parse_json, reading, shown

_OURS = "hf_zero"  # item for values that torch's names do not cover
_MODEL = ("model.", "module.", "state_dict.model.", "app.model.")
_OPTIMIZER = ("optim.", "optimizer.", "optimizers.", "state_dict.optimizer.", "app.optim.", "app.optimizer.")


# -- writing ------------------------------------------------------------------------------------------------------------


class _Streaming(DefaultSavePlanner):
    """A planner that reads the elements of a tensor only when they are written; the state dict consists of meta tensors."""

    def __init__(self, rows: dict[str, SourceTensor], progress: Progress) -> None:
        super().__init__(flatten_state_dict=False)
        self._rows = rows
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the tensor or object to write for an item."""
        found = self._rows.get(write_item.index.fqn)
        if found is None:
            return super().resolve_data(write_item)
        values = torch.empty(found.row.numel(), dtype=found.row.dtype)
        found.row.read(found.row.start, values)
        self._progress(values.nbytes)
        return values.view(found.shape)


@dataclass(frozen=True)
class _Own:
    """The record of the values that torch's names do not cover; further attributes as in ``Source``.

    Attributes:
        values: Encoded plain values by name.
        buffers: Names of the tensors that are buffers.
        dtypes: Dtype of each parameter in training, as safetensors names it, by parameter name.
    """

    optimizer: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    stage: int = 0
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    dtypes: dict[str, str] = field(default_factory=dict)


def _own(source: Source) -> dict[str, Any]:
    encoder = Encoder()
    own = _Own(
        optimizer=source.optimizer,
        values={key: encoder.encode(value, key) for key, value in source.values.items()},
        counters=dict(source.counters),
        stage=source.stage,
        aliases=dict(source.aliases),
        buffers=tuple(buffer.name for buffer in source.buffers),
        dtypes={param.name: dtype_name(param.dtype, param.name) for param in source.params},
    )
    return {"json": json.dumps(asdict(own), allow_nan=False), "tensors": encoder.tensors}


def write_dcp(source: Source, folder: Path, progress: Progress) -> None:
    """Write ``source`` in the format of ``torch.distributed.checkpoint.load``; one tensor at a time is in memory.

    Raises:
        CheckpointError: The folder is not empty or cannot be written.
    """
    _require_empty(folder)
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
    state[_OURS] = _own(source)
    state.update({name: torch.empty(tensor.shape, dtype=tensor.row.dtype, device="meta") for name, tensor in rows.items()})
    try:
        own_files.make_folders(folder)
        with _without_group_warning(), own_files.for_library(folder, last=METADATA) as inside:
            save(state, storage_writer=FileSystemWriter(inside), planner=_Streaming(rows, progress), no_dist=True)
    except Exception as error:  # torch wraps every error in its own class
        raise CheckpointError(f"cannot write {folder}: {error}") from error


def _require_empty(folder: Path) -> None:
    """Raise CheckpointError if the folder is not empty, because its files would become parts of the checkpoint or be overwritten."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; choose another name")
    found = sorted(os.listdir(folder)) if folder.is_dir() else []
    if METADATA in found:
        raise CheckpointError(f"{folder} holds a checkpoint already; choose another folder")
    if found:
        raise CheckpointError(f"{folder} is not empty (it holds {shown(found[0])}); choose another folder")


@contextmanager
def _without_group_warning() -> Iterator[None]:
    """Suppress torch's warning that there is no process group, because none is needed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


# -- reading ------------------------------------------------------------------------------------------------------------


def read_dcp(folder: Path) -> Source:
    """Open a folder as a conversion's source; find parameters and optimizer states by torch's names, and run no code from pickles.

    Raises:
        CheckpointError: The folder is damaged, has no parameters, or lacks a parameter of an optimizer state; the message names the item.
    """
    with reading(folder, CheckpointError):
        return _Reader(folder).source().require_any()


class _Reader:
    """A reader that sorts the items of a folder by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = DcpFolder(folder)
        self.path = folder
        self.own = self._own()
        self.values: dict[str, str] = {}  # parameter or buffer -> stored name
        self.states: dict[str, dict[str, str]] = {}  # parameter -> state -> stored name
        self.settings: dict[int, dict[str, str]] = {}  # param group -> hyper-parameter -> stored name
        self.groups_item: str | None = None
        for stored in [*self.folder.tensors, *self.folder.objects]:
            inner = _after(stored, _OPTIMIZER)
            if inner:
                self._sort(stored, inner)
            elif stored in self.folder.tensors:
                name = _after(stored, _MODEL) or stored
                if name in self.values:
                    raise CheckpointError(f"{folder}: {stored} and {self.values[name]} are the same parameter {name}")
                self.values[name] = stored
        lost = sorted(set(self.states) - set(self.values))
        if lost and len(lost) == len(self.states):
            warn_once(f"{folder} has optimizer states by number ({lost[0]}) instead of by parameter name; they are not converted")
            self.states, self.settings, self.groups_item = {}, {}, None
        elif lost:
            raise CheckpointError(f"{folder} holds the optimizer state of {lost[0]}, but has no such parameter")

    def _sort(self, stored: str, inner: str) -> None:
        """Record the stored name of an optimizer item in ``states``, ``settings`` or ``groups_item``."""
        group = re.fullmatch(r"param_groups\.(\d{1,6})\.(.+)", inner)
        if inner.startswith("state."):
            param, _, state = inner.removeprefix("state.").rpartition(".")
            self.states.setdefault(param, {})[state] = stored
        elif group is not None:
            self.settings.setdefault(int(group[1]), {})[group[2]] = stored
        elif inner == "param_groups" and stored in self.folder.objects:
            self.groups_item = stored
        elif stored in self.folder.tensors:
            raise CheckpointError(f"{self.path}: {stored} is not a name that torch gives to optimizer tensors")

    def _own(self) -> _Own:
        if _OURS not in self.folder.objects:
            return _Own()
        found = self.folder.object(_OURS)
        data = parse_json(found["json"])
        own = read_record(_Own, data, f"{self.path}: {_OURS}")
        decoder = Decoder(lambda name: found["tensors"][name], f"{self.path}: {_OURS}")
        return replace(own, values={key: decoder.decode(value) for key, value in own.values.items()})

    def source(self) -> Source:
        """Return the folder as the source of a conversion."""
        groups, group_of = self._groups()
        params, buffers = [], []
        for name, stored in self.values.items():
            value = self._tensor(stored, name)
            if name in self.own.buffers:
                buffers.append(value)
                continue
            flat, numbers = self._states_of(name, value.shape)
            group = group_of.get(name, FROZEN)
            if group == FROZEN and (flat or numbers):
                if groups:
                    raise CheckpointError(f"{self.path}: {name} has optimizer state, but is in no param group")
                group = 0
            dtype = DTYPES[self.own.dtypes[name]] if name in self.own.dtypes else value.row.dtype
            params.append(SourceParam(value, dtype, group, flat, numbers))
        return Source(
            what=f"the distributed checkpoint {self.path}",
            params=tuple(params),
            buffers=tuple(buffers),
            aliases=self.own.aliases,
            values=self.own.values,
            counters=self.own.counters,
            stage=self.own.stage,
            optimizer=self.own.optimizer if self.own.optimizer is not None else "" if self.states else None,
            groups=tuple(groups if groups else [{}] if self.states else []),
        )

    def _states_of(self, name: str, shape: tuple[int, ...]) -> tuple[dict[str, Elsewhere], dict[str, Any]]:
        """Return a parameter's states with one element per parameter element, and its single-number states."""
        flat: dict[str, Elsewhere] = {}
        numbers: dict[str, Any] = {}
        for state, stored in self.states.get(name, {}).items():
            if stored in self.folder.objects:
                numbers[state] = self.folder.object(stored)
            elif self.folder.tensors[stored].shape == shape and shape:
                flat[state] = self._tensor(stored, stored).row
            else:
                numbers[state] = self.folder.tensor(stored)
        return flat, numbers

    def _tensor(self, stored: str, name: str) -> SourceTensor:
        """Return a source tensor that is read whole for its first window and freed after its last window."""
        entry = self.folder.tensors[stored]
        held: list[torch.Tensor] = []

        def read(first: int, target: torch.Tensor) -> None:
            if not held:
                held.append(self.folder.tensor(stored))
            target.copy_(held[0].reshape(-1)[first : first + target.numel()])
            if first + target.numel() == held[0].numel():
                held.clear()

        return SourceTensor(name, entry.shape, Elsewhere(entry.dtype, math.prod(entry.shape), read, read_only))

    def _groups(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Return the hyper-parameters of each param group, and the group of each parameter; both are empty if the folder has none.

        The folder has one object with all param groups, or one item per hyper-parameter.
        """
        found: Any = []
        if self.groups_item is not None:
            found = self.folder.object(self.groups_item)
        elif self.settings:
            found = [{key: self._setting(stored) for key, stored in self.settings.get(n, {}).items()} for n in range(len(self.settings))]
        if not isinstance(found, list) or not all(isinstance(group, dict) for group in found):
            raise CheckpointError(f"{self.path}: the param groups are {shown(found)}, expected a list of dicts")
        group_of: dict[str, int] = {}
        for number, group in enumerate(found):
            for param in group.get("params", ()):
                if param not in self.values or param in group_of:
                    raise CheckpointError(f"{self.path}: param group {number} names {shown(param)}, which is unknown or in another group")
                group_of[param] = number
        return [{key: value for key, value in group.items() if key != "params"} for group in found], group_of

    def _setting(self, stored: str) -> Any:
        return self.folder.tensor(stored) if stored in self.folder.tensors else self.folder.object(stored)


def _after(name: str, prefixes: tuple[str, ...]) -> str:
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), "")
