"""Saving: every rank writes its shards into a hidden folder, rank 0 adds the index and gives the folder its name.

The last part happens in the background when the caller has a ``Background``: training goes on while a copy is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.commit import agreement, folders, node_local, staging
from hf_zero.checkpoint.commit.background import Background, Task, Written
from hf_zero.checkpoint.commit.file_exchange import beside, send_files, to_next_node
from hf_zero.checkpoint.commit.store_saves import StoreSave
from hf_zero.checkpoint.commit.targets import Target, target_of
from hf_zero.checkpoint.contents import contents_of
from hf_zero.checkpoint.files.rows import Entry, whole
from hf_zero.checkpoint.files.tensor_writer import write_tensor_file
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import CHUNK_BYTES, dtype_name, state_kind, values_file
from hf_zero.checkpoint.format.plausible import has_known_values
from hf_zero.checkpoint.format.records import FileRecord, OptimizerRecord
from hf_zero.checkpoint.format.values import Encoder
from hf_zero.checkpoint.state import optimizer_state, param_groups
from hf_zero.checkpoint.state.module_entries import entries_of
from hf_zero.checkpoint.state.training_state import TrainingState
from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.observe import note, span, warn_once
from hf_zero.system import own_files
from hf_zero.system.object_store import Place, place_of
from hf_zero.system.process import Process
from hf_zero.system.secrets import without_credentials


@dataclass(frozen=True)
class SaveRequest:
    """Request to save a checkpoint; rank 0's request counts, except for the client state.

    Attributes:
        save_dir: Folder of all checkpoints of a run, or its URL in an object store.
        tag: Name of this one.
        client_state: The caller's values on this rank.
        latest: Point ``latest`` at it.
        exclude_frozen: Leave frozen parameters out.
        direct: Bypass the page cache where the file system lets that be.
        node_local: Every node has a disk of its own, and ``save_dir`` is this rank's.
        tag_validation: Reaction when ranks give different tags: an error ("fail"), a warning ("warn") or none ("ignore").
        number: Of this save.
        may_pickle: Pickle values of the client state that nothing else can keep.
        former: Tag of a checkpoint in the same folder whose files are overwritten. All ranks know that it is complete on no node.
    """

    save_dir: str
    tag: str
    client_state: Mapping[str, Any]
    latest: bool = True
    exclude_frozen: bool = False
    direct: bool = True
    node_local: bool = False
    tag_validation: str = "warn"
    number: str = field(default_factory=staging.save_number)
    may_pickle: bool = False
    former: str = ""


def save_checkpoint(state: TrainingState, request: SaveRequest, background: Background | None = None) -> Place:
    """Write ``<save_dir>/<tag>/``, complete or not at all; collective.

    Nothing is written if a value cannot be saved. If a rank fails, all ranks raise, and the former checkpoint stays.

    Args:
        state: State to save.
        request: Folder, tag and further values.
        background: Writes a copy after this function has returned; its previous save is waited for first.

    Returns:
        The folder. With ``background`` it is there when the next ``finish`` of that returns.

    Raises:
        CheckpointError: On every rank, with the same text, naming path and cause; also for the previous save in the background.
        ConfigError: On every rank: they give different tags, which ``tag_validation`` forbids.
    """
    net = state.everyone
    if background is not None:
        background.finish(net)
    with span("save_checkpoint", request.tag):
        save = _Save(state)
        told = _agree(state, save, request)
        request = save.request
        what = _what(request)
        if request.node_local and background is not None:
            agreement.quickly(net, what, lambda: save.copy(background))
            files = beside(net)
            background.start(Task(what, save.target, everywhere=lambda: _save_on_nodes(files, save, told, twice=True)), told)
            return place_of(request.save_dir) / request.tag
        if request.node_local:
            return _save_on_nodes(net, save, told)
        handed = False  # to the thread, which may still write
        try:
            if background is None or background.limited:  # files are written before this returns, so the folder must be there
                agreement.on_first(net, what, save.begin)
            if background is not None:
                agreement.quickly(net, what, lambda: save.copy(background))
                handed = True
                background.start(Task(what, save.target, write=partial(save.write_beside, told), commit=save.commit), told)
                return place_of(request.save_dir) / request.tag
            written = agreement.on_all(net, what, save.write_files)
            agreement.on_first(net, what, lambda: save.commit(told, written))
        except BaseException:  # an interrupt too
            if net.rank == 0 and not handed:
                save.target.abandon()
            raise
    return place_of(request.save_dir) / request.tag


def _what(request: SaveRequest) -> str:
    return f"saving checkpoint {request.tag!r} to {without_credentials(request.save_dir)}{' on every node' if request.node_local else ''}"


def _save_on_nodes(net: Collectives, save: _Save, told: list[dict[str, Any]], twice: bool = False) -> Path:
    """Write the agreed files to every node's disk, and with ``twice`` to that of the next node too; see [Note: node-local checkpoints]."""
    request = save.request
    if not isinstance(save.folder, Path):
        raise CheckpointError(
            f"{_what(request)}: checkpoint.use_node_local_storage is true, and every node reaches this place; set it to false"
        )
    what, place = _what(request), (Path(request.save_dir), request.tag)
    try:
        disks = node_local.begin(net, what, place, request.number, [rank_told["process"] for rank_told in told])
        written = agreement.on_all(net, what, save.write_files)
        agreement.quickly(net, what, disks.only(save.remove_former))  # before files of other nodes need its room
        node_local.share(net, disks, what, save.folder, [own.files for own in written])
        if twice:
            sizes = [{name: record.nbytes for name, record in own.files.items() if not node_local.is_shared(name)} for own in written]
            send_files(net, what, save.folder, to_next_node(disks.leaders, sizes))
        text = agreement.on_first(net, what, lambda: save.index(told, written).to_json())
        node_local.complete(net, disks, what, place, save.folder, text, request.latest)
    except BaseException:  # an interrupt too
        save.target.abandon()
        raise
    return place[0] / place[1]


def _agree(state: TrainingState, save: _Save, request: SaveRequest) -> list[dict[str, Any]]:
    """Prepare a save on every rank; return each rank's description of its part. Collective: all exchange is in one message."""
    net = state.everyone
    told = agreement.on_all(net, _what(request), lambda: save.prepare(request))
    asked = told[0]["request"]
    _compare_tags([rank_told["request"]["tag"] for rank_told in told], request.tag_validation)
    if any(rank_told["request"]["exclude_frozen"] != asked["exclude_frozen"] for rank_told in told):  # one has prepared another checkpoint
        mended = replace(request, exclude_frozen=asked["exclude_frozen"])
        told = agreement.on_all(net, _what(request), lambda: save.prepare(mended))
    if request.node_local:
        asked = {**asked, "save_dir": request.save_dir}
    save.settle(replace(request, **asked), differs=told[net.rank]["digest"] != told[0]["digest"])
    return told


def _compare_tags(tags: list[str], validation: str) -> None:
    if validation == "ignore" or len(set(tags)) == 1:
        return
    other = next(rank for rank, tag in enumerate(tags) if tag != tags[0])
    text = f"save_checkpoint(tag=...): rank {other} gives the tag {tags[other]!r}, rank 0 {tags[0]!r}"
    if validation == "fail":
        raise ConfigError(f"{text}; checkpoint.tag_validation is fail, so nothing is saved. Give every rank the same tag")
    warn_once(f"{text}; all ranks write to the tag of rank 0")


# -- before a byte is written -------------------------------------------------------------------------------------------


class _Values:
    """Values as JSON; their tensors go to files of their own. The client state is every rank's, the rest is rank 0's."""

    def __init__(self, may_pickle: bool) -> None:
        self.client = Encoder(may_pickle)
        self.client_state: Any = None
        self.encoder = self.client  # names of tensors must differ within rank 0's file
        self.fields: dict[str, Any] = {}

    def take(self, state: TrainingState, request: SaveRequest) -> str:
        """Encodes everything that is no array of the model or the optimizer; returns a digest of the client state.

        Raises:
            CheckpointError: A value cannot be saved; names it.
        """
        entries = entries_of(state.module)  # on every rank, because a module's own code may be collective
        self.client_state = self.client.encode(dict(request.client_state), "client_state")
        digest = _digest(self.client_state, self.client.tensors)
        if state.everyone.rank == 0:
            encode = self.encoder.encode
            optimizer = state.optimizer
            self.fields = {
                "scheduler": encode(state.scheduler.state_dict(), "lr_scheduler") if state.scheduler is not None else None,
                "scaler": encode(state.scaler.state_dict(), "loss_scaler"),
                "spikes": encode(state.spikes.state_dict(), "spikes") if state.spikes is not None else None,
                "extra_state": {
                    name: encode(module.get_extra_state(), f"extra state of module {name!r}")
                    for name, module in state.modules_with_extra_state()
                },
                "entries": dict(self._entries(entries)),
                "own_classes": tuple(
                    part
                    for part, owner in (("optimizer", optimizer and optimizer.inner), ("scheduler", state.scheduler))
                    if owner is not None and not has_known_values(owner)
                ),
                "groups": param_groups.group_records(optimizer, self.encoder) if optimizer is not None else (),
                "common": optimizer_state.common_record(optimizer, self.encoder) if optimizer is not None else {},
            }
        return digest

    def _entries(self, entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield entries of modules, encoded; warn of those that cannot be saved."""
        for name, value in entries.items():
            try:
                yield name, self.encoder.encode(value, f"entry {name} of the state dict")
            except CheckpointError as error:
                warn_once(f"{error}. The checkpoint lacks it")


def _digest(value: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest that is equal for equal values."""
    found = hashlib.sha256(repr(value).encode())
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return found.hexdigest()


def _check(state: TrainingState, request: SaveRequest, values: _Values) -> dict[str, Any]:
    """Refuse values and states that cannot be saved, and units that share a name; return the request of this rank."""
    if state.everyone.rank == 0:
        folders.check_tag(request.tag)
    names = [unit.name for unit in state.units]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CheckpointError(f"several units are named {', '.join(twice)}")
    if state.optimizer is not None:
        if state.optimizer.state_store.broken:
            raise CheckpointError(state.optimizer.state_store.broken)
        optimizer_state.scalars(state.optimizer)
        for name in optimizer_state.flat_states(state.optimizer):
            dtypes = [entry.dtype for entry in optimizer_state.state_entries(state.optimizer, name)]
            for dtype in dtypes:
                dtype_name(dtype, f"{state_kind(name)}")
    for name, tensor in (*state.loose_params(), *state.buffers().items()):
        dtype_name(tensor.dtype, name)
    asked = {name: getattr(request, name) for name in ("save_dir", "tag", "latest", "exclude_frozen", "number")}
    return {"digest": values.take(state, request), "request": asked}


# -- writing ------------------------------------------------------------------------------------------------------------


class _Save:
    """One rank's part of one save.

    Args:
        state: State to save; ``settle`` drops it.

    Attributes:
        request: Rank 0's, with this rank's client state.
        files: Files to write.
        head: The index without the entries that other ranks add; on rank 0.
    """

    request: SaveRequest
    head: Index | None

    def __init__(self, state: TrainingState) -> None:
        self.files: dict[str, list[Entry]] = {}
        self._state: TrainingState | None = state
        self._client_state: Any = None
        self._direct: dict[str, FileRecord] = {}
        self._asks_later = False
        self._rank = state.everyone.rank

    def prepare(self, request: SaveRequest) -> dict[str, Any]:
        """Refuse values that cannot be saved, encode values, and plan the files; write nothing. Return the data that other ranks must
        know.
        """
        if self._state is None:
            raise CheckpointError("a save is prepared once")
        self._values = _Values(request.may_pickle)
        told = _check(self._state, request, self._values)
        self._contents = contents_of(self._state, request.exclude_frozen)
        return {
            **told,
            "units": self._contents.units,
            "loose": self._contents.loose,
            "buffers": self._contents.buffers,
            "scalars": self._contents.scalars,
            "states": self._contents.states,
            "params": self._contents.params,
            "dropped": self._contents.dropped,
            "process": Process.own(),
        }

    def settle(self, request: SaveRequest, differs: bool) -> None:
        """Complete the files for the ``request`` that all ranks agreed on; ``differs``: this rank's client state is not rank 0's."""
        state, self._state = self._state, None
        if state is None:
            raise CheckpointError("a save is prepared once")
        self.request = request
        tensors = self._values.client.tensors if differs or self._rank == 0 else {}
        self.files = {**self._contents.files, values_file(self._rank): [whole(name, tensor) for name, tensor in tensors.items()]}
        self._client_state = self._values.client_state if differs else None
        self.head = _head(state, request, self._values) if self._rank == 0 else None
        del self._contents, self._values  # they hold the arrays

    @cached_property
    def target(self) -> Target:
        """Return the target of the save; created where all ranks get an error of it."""
        return target_of(place_of(self.request.save_dir), self.request.tag, self.request.number)

    @property
    def folder(self) -> Place:
        """Return the folder that is being written."""
        return self.target.folder

    def begin(self) -> None:
        """Prepare the target; on rank 0."""
        self.target.begin()
        note("checkpoint_begun", self.request.tag)

    def copy(self, background: Background) -> None:
        """Copy the values; values that do not fit into the copy are written to disk before this returns. Rank 0 makes the folder before,
        unless that is done; a store is asked by ``write_beside``, because it takes its time to answer.
        """
        self._asks_later = isinstance(self.target, StoreSave) and not background.limited
        if self.head is not None and not (background.limited or self._asks_later or self.request.node_local):
            self.begin()
        direct, self.files = background.copy(self.files)
        self._direct = self._write(direct)

    def write_beside(self, told: list[dict[str, Any]]) -> Written:
        """Write this rank's files while training goes on; ``told`` has the processes of all ranks."""
        if self._asks_later and isinstance(self.target, StoreSave):
            self.target.begin_on(self._rank, [one["process"] for one in told])
            note("checkpoint_begun", self.request.tag)
        return self.write_files()

    def write_files(self) -> Written:
        """Write this rank's files and force them to the disk."""
        records = {**self._direct, **self._write(self.files)}
        self.files = {}
        return Written(records, self._client_state)

    def _write(self, files: Mapping[str, list[Entry]]) -> dict[str, FileRecord]:
        with self.target.files(self.request.direct, self.request.former) as disk:

            def write(name: str, entries: list[Entry]) -> FileRecord:
                record = write_tensor_file(self.folder / name, entries, disk=disk)
                note("checkpoint_file", f"{self.request.tag}: {name}")
                return record

            records = disk.each({name: partial(write, name, entries) for name, entries in files.items() if entries})
            disk.sync()
        return records

    def remove_former(self) -> None:
        """Remove the rest of the former checkpoint, after every rank has reused its own files of it."""
        if self.request.former:
            own_files.remove_private(Path(self.request.save_dir) / self.request.former)

    def index(self, told: list[dict[str, Any]], written: list[Written]) -> Index:
        """Return the whole index, from the descriptions and reports of all ranks; on rank 0."""
        if self.head is None:
            raise CheckpointError("only rank 0 completes a checkpoint")
        return _index(self.head, told, written)

    def commit(self, told: list[dict[str, Any]], written: list[Written]) -> str:
        """Write index, marker, name, and last of all ``latest``; on rank 0."""
        self.remove_former()
        return str(self.target.commit(self.index(told, written), self.request.latest))


# -- index ------------------------------------------------------------------------------------------------------------


def _head(state: TrainingState, request: SaveRequest, values: _Values) -> Index:
    """Return the index without the other ranks' entries."""
    fields = dict(values.fields)
    groups, common = fields.pop("groups"), fields.pop("common")
    name = type(state.optimizer.inner).__name__ if state.optimizer is not None else ""
    return Index(
        library=_version(),
        tag=request.tag,
        world=state.everyone.world,
        tensor_world=state.parts,
        stage=state.stage,
        chunk_bytes=CHUNK_BYTES,
        units=(),
        loose=(),
        buffers={},
        aliases=state.aliases(),
        excluded=(),
        optimizer=OptimizerRecord(name, (), groups, (), common=common) if state.optimizer is not None else None,
        counters=dict(state.counters),
        client_state=values.client_state,
        **fields,
    )


def _index(head: Index, told: list[dict[str, Any]], written: list[Written]) -> Index:
    """Return the whole index, from the descriptions that all ranks have sent of their parts."""
    optimizer = head.optimizer
    if optimizer is not None:
        states = sorted({name for rank_told in told for name in rank_told["states"]})
        numbers = optimizer_state.merge_scalars([rank_told["scalars"] for rank_told in told])
        params = tuple(record for rank_told in told for record in rank_told["params"])
        everyones = [unit for rank_told in told for unit in rank_told["units"]]
        groups = param_groups.complete_groups(optimizer.groups, everyones)
        optimizer = replace(optimizer, groups=groups, states=tuple(states), scalars=numbers, params=params)
    # Every data-parallel rank describes the units of its tensor-parallel rank alike.
    units = {(unit.tensor_rank, unit.name): unit for rank_told in reversed(told) for unit in rank_told["units"]}
    return replace(
        head,
        units=tuple(units[key] for key in sorted(units, key=lambda key: key[0])),
        loose=tuple(loose for rank_told in told for loose in rank_told["loose"]),
        buffers={name: file for rank_told in told for name, file in rank_told["buffers"].items()},
        excluded=tuple(dict.fromkeys(name for rank_told in told for name in rank_told["dropped"])),
        optimizer=optimizer,
        client_states={str(rank): own.client_state for rank, own in enumerate(written) if own.client_state is not None},
        files={name: record for own in written for name, record in own.files.items()},
    )


def _version() -> str:
    try:
        return metadata.version("hf_zero")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0"
