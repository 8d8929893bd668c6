"""Our own folders as a source of conversions, and as their target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_zero.checkpoint.commit import folders
from hf_zero.checkpoint.commit.targets import Target, target_of
from hf_zero.checkpoint.convert.source import FROZEN, Progress, Source, SourceParam, SourceTensor, read_only
from hf_zero.checkpoint.files.catalog import Catalog, Located
from hf_zero.checkpoint.files.rows import Elsewhere, Entry, whole
from hf_zero.checkpoint.files.tensor_reader import RangeReader
from hf_zero.checkpoint.files.tensor_writer import write_tensor_file
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import (
    CHUNK_BYTES,
    CONVERTED,
    DTYPES,
    INDEX_FILE,
    MASTER,
    MODULE,
    VALUES_FILE,
    dtype_name,
    shard_file,
    state_kind,
)
from hf_zero.checkpoint.format.records import FileRecord, GroupRecord, LooseRecord, OptimizerRecord, ParamRecord, ScalarRecord, UnitRecord
from hf_zero.checkpoint.format.values import Decoder, Encoder, encode_scalar
from hf_zero.checkpoint.state.beside import divided
from hf_zero.errors import CheckpointError
from hf_zero.observe import warn_once
from hf_zero.system.object_store import Place
from hf_zero.system.reading import reading


def read_checkpoint(folder: Place) -> Source:
    """Open the folder with the files of one tag, see ``folders.files_of``.

    Raises:
        CheckpointError: It is damaged.
    """
    path = str(folder / INDEX_FILE)
    index = Index.from_json(folders.read_index(folder), path)
    catalog, reader = Catalog(index), RangeReader(folder, index.files)
    reader.check_sizes()
    decoder = Decoder(lambda name: reader.whole(VALUES_FILE, name), path)
    params = []
    numbers = index.optimizer.numbers() if index.optimizer else lambda *_: None
    group_of = {name: number for number, group in enumerate(index.optimizer.groups if index.optimizer else ()) for name in group.params}
    for name in sorted(catalog.names):
        found = catalog.find(name)
        if found is None:
            continue
        value = SourceTensor(name, found.shape, _row(catalog, reader, found, None))
        if not found.trained or found.unit is None:
            params.append(SourceParam(value, value.row.dtype))
            continue
        kinds = {state: state_kind(state) for state in (index.optimizer.states if index.optimizer else ())}
        states = {state: _row(catalog, reader, found, kind) for state, kind in kinds.items() if catalog.dtype(found, kind) is not None}
        single = decoder.decode(numbers(found.unit.name, found.group, name) or {})
        params.append(SourceParam(value, DTYPES[found.unit.dtype], group_of.get(name, FROZEN), states, single))
    buffers = []
    for name, file in index.buffers.items():
        record = reader.record(file, name)
        buffers.append(SourceTensor(name, record.shape, _buffer_row(reader, file, name)))
    optimizer = index.optimizer
    if optimizer is not None and optimizer.params:
        warn_once(
            f"{folder}: the weights are converted, but not the state of {optimizer.name}, which holds whole parameters instead of shards"
        )
    return Source(
        what=f"the checkpoint {folder}",
        params=tuple(params),
        buffers=tuple(buffers),
        aliases=dict(index.aliases),
        optimizer=optimizer.name if optimizer is not None else None,
        groups=tuple(decoder.decode(group.values) for group in optimizer.groups) if optimizer is not None else (),
        values={
            "scheduler": decoder.decode(index.scheduler),
            "scaler": decoder.decode(index.scaler),
            "spikes": decoder.decode(index.spikes),
            "client_state": divided(decoder.decode(index.client_state))[0],
            "extra_state": decoder.decode(index.extra_state),
            "entries": decoder.decode(index.entries),
        },
        counters=dict(index.counters),
        stage=index.stage,
    )


def _row(catalog: Catalog, reader: RangeReader, found: Located, kind: str | None) -> Elsewhere:
    def read(first: int, target: torch.Tensor) -> None:
        try:
            copies = list(catalog.copies(found, kind, found.whole, first, target))
        except CheckpointError as error:
            raise CheckpointError(f"{reader.folder}: {error}") from error
        reader.read(copies)

    numel = found.whole.numel
    return Elsewhere(DTYPES[catalog.dtype(found, kind) or "F32"], numel, read, read_only)


def _buffer_row(reader: RangeReader, file: str, name: str) -> Elsewhere:
    record = reader.record(file, name)

    def read(first: int, target: torch.Tensor) -> None:
        target.copy_(reader.whole(file, name).reshape(-1)[first : first + target.numel()])

    dtype = DTYPES[record.dtype]
    return Elsewhere(dtype, record.nbytes // dtype.itemsize, read, read_only)


def write_checkpoint(source: Source, save_dir: Place, tag: str | None, progress: Progress) -> Place:
    """Write ``source`` as a checkpoint that ``load_checkpoint`` and ``resume_from_checkpoint`` accept; complete or not at all.

    Args:
        source: Model and state to write.
        save_dir: Folder of the checkpoints of a run.
        tag: Name; ``global_step{N}`` when None.
        progress: Called with the number of bytes written.

    Returns:
        The folder.

    Raises:
        CheckpointError: A value cannot be saved, or the target is in the way.
        OSError: The file system refuses.
    """
    name = folders.check_tag(tag or f"global_step{source.counters.get('global_steps', 0)}")
    encoder, index = planned_index(source, name)
    target = target_of(save_dir, name)
    target.begin()
    try:
        files = _write_files(source, target, encoder, progress)
        index = replace(index, files=files)
        index.check(source.what)
        return target.commit(index, latest=True)
    except BaseException:
        target.abandon()
        raise


def planned_index(source: Source, tag: str) -> tuple[Encoder, Index]:
    """Return the future index without its files, and the encoder that holds the tensors of its values.

    Raises:
        CheckpointError: A value cannot be saved, or the source has numbers that no run can have saved; names the source.
    """
    with reading(source.what, CheckpointError):
        encoder = Encoder()
        values = {key: encoder.encode(value, f"{source.what}: {key}") for key, value in source.values.items()}
        groups = [encoder.encode(group, f"{source.what}: param_groups[{number}]") for number, group in enumerate(source.groups)]
        index = _index(source, tag, {**values, "groups": groups})
        index.check_meaning(source.what)
        return encoder, index


def _is_trained(param: SourceParam) -> bool:
    return param.group != FROZEN


_MODULE_FILE = shard_file(MODULE, 0, 1)


def _write_files(source: Source, target: Target, encoder: Encoder, progress: Progress) -> dict[str, FileRecord]:
    entries: dict[str, list[Entry]] = {}
    for param in source.params:
        if _is_trained(param):
            rows = {MASTER: param.value.row, **{state_kind(state): row for state, row in param.states.items()}}
            for kind, row in rows.items():
                entries.setdefault(shard_file(kind, 0, 1), []).append(Entry(param.name, row.dtype, (row.numel(),), (row,)))
    loose = [param.value for param in source.params if not _is_trained(param)] + list(source.buffers)
    entries[_MODULE_FILE] = [Entry(tensor.name, tensor.row.dtype, tensor.shape, (tensor.row,)) for tensor in loose]
    entries[VALUES_FILE] = [whole(name, tensor) for name, tensor in encoder.tensors.items()]
    with target.files(True) as disk:
        files = {name: write_tensor_file(target.folder / name, found, progress, disk) for name, found in entries.items() if found}
        disk.sync()
    return files


def _index(source: Source, tag: str, values: dict[str, Any]) -> Index:
    trained = [param for param in source.params if _is_trained(param)]
    units, scalars = [], []
    for param in trained:
        record = ParamRecord(param.name, param.value.shape, 0, param.group)
        dtype = dtype_name(param.dtype, param.name)
        units.append(UnitRecord(param.name, MASTER, dtype, 1, param.value.row.numel(), 0, (record,)))
        if param.numbers:
            numbers = {key: encode_scalar(value, f"{param.name}, {key!r}") for key, value in param.numbers.items()}
            scalars.append(ScalarRecord(param.name, param.group, numbers))
    optimizer = None
    if source.optimizer is not None:
        states = tuple(sorted({state for param in trained for state in param.states}))
        names = [tuple(param.name for param in trained if param.group == number) for number in range(len(source.groups))]
        groups = tuple(GroupRecord(members, group) for members, group in zip(names, values["groups"], strict=True))
        optimizer = OptimizerRecord(source.optimizer, states, groups, tuple(scalars))
    return Index(
        library=CONVERTED,
        tag=tag,
        world=1,
        tensor_world=1,
        stage=source.stage,
        chunk_bytes=CHUNK_BYTES,
        units=tuple(units),
        loose=tuple(LooseRecord(param.name, _MODULE_FILE, param.value.shape) for param in source.params if not _is_trained(param)),
        buffers={buffer.name: _MODULE_FILE for buffer in source.buffers},
        extra_state=values.get("extra_state") or {},
        entries=values.get("entries") or {},
        aliases=dict(source.aliases),
        excluded=(),
        optimizer=optimizer,
        scheduler=values.get("scheduler"),
        scaler=values.get("scaler") or {},
        counters=dict(source.counters),
        client_state=values.get("client_state") or {},
        spikes=values.get("spikes"),
    )
