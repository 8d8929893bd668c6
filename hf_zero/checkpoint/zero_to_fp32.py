#!/usr/bin/env python3
"""Turn a ZeRO checkpoint into whole fp32 weights, on one machine, without process group or GPU.

A copy of this file lies beside every checkpoint. It needs torch, numpy and safetensors, and fsspec if CHECKPOINT_DIR is a URL (s3://...):

    python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--tag global_step100]

CHECKPOINT_DIR holds `latest` and the folders of the checkpoints (a Trainer's checkpoint-100, say). OUTPUT_DIR gets
`model.safetensors`, or several files and `model.safetensors.index.json` when the weights are larger than --max_shard_size;
beside a config.json, from_pretrained reads them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT_VERSION = 1
SMALL_BYTES, INDEX_BYTES = 65536, 16 << 20  # of text that is read whole
CHUNK_BYTES = 65536  # per checksum
ALIGNMENT = 16  # elements: where parameters begin in a unit
_TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16,
    "float16": torch.float16,
}  # fmt: skip
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "I64": torch.int64, "U64": torch.uint64, "I32": torch.int32,
    "U32": torch.uint32, "I16": torch.int16, "U16": torch.uint16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _TYPES.items()}
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


class Checkpoint:
    """Reader of whole parameters from the shards of one checkpoint folder.

    Args:
        checkpoint_dir: Folder that holds the folder of the tag.
        tag: Name of the checkpoint; None: the one that ``latest`` names.
        written: Type of the floating point weights in files that are written.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It is damaged, or of another version; names the file.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str], tag: str | None = None, written: torch.dtype = torch.float32) -> None:
        base = os.fspath(checkpoint_dir)
        self.written = written
        if tag is None:
            latest = os.path.join(base, "latest")
            if not _is_file(latest):
                above, _, name = base.rstrip("/").rpartition("/")
                found = f"{_shown(latest)} does not exist; give the folder that holds the checkpoint, or also its name with --tag"
                if _is_file(os.path.join(base, "complete")):
                    found = f"{_shown(base)} is one checkpoint; give the folder that holds it, {_shown(above or '.')}, and --tag {name!r}"
                raise FileNotFoundError(found)
            with _reading(latest):
                tag = _read_small(latest, SMALL_BYTES).decode("utf-8").strip()
                _require(len(tag) <= 200, f"it names a folder of {len(tag)} characters")
        self.folder = os.path.join(base, str(tag))
        number = _number_in(self.folder)
        self.folder = os.path.join(self.folder, number) if number else self.folder
        self._path = os.path.join(self.folder, "index.json")
        if not _is_file(self._path) or not _is_file(os.path.join(self.folder, "complete")):
            raise FileNotFoundError(f"{_shown(self.folder)} is no complete checkpoint: it lacks index.json or complete")
        self.frozen: set[str] = set()
        self.shapes: dict[str, list[int]] = {}
        # name -> where it lies: several places where tensor-parallel ranks hold slices of it
        self.params: dict[str, list[_Place]] = {}
        with _reading(self._path):
            _require(os.path.basename(str(tag)) == str(tag) not in ("", ".", ".."), f"{tag!r} is no name of a folder")
            self.index = self._read_index()
            self._check_index()
            for loose in self.index["loose"]:
                self.frozen.add(loose["name"])
                self._add(loose, _Place(None, loose["file"], 0, 0, loose["dim"], loose["ranges"]))
            # A name with a dot at its end is the place of a parameter that has left the model.
            within = [(unit, param) for unit in self.index["units"] for param in unit["params"] if param["name"][-1:] != "."]
            for unit, param in within:
                self._add(param, _Place(unit, "", param["offset"], unit["tensor_rank"], param["dim"], param["ranges"]))
                self.frozen |= {param["name"]} if unit["kind"] != "master" else set()
            for name, places in self.params.items():
                self._check_places(name, places)

    def _add(self, param: dict[str, Any], place: _Place) -> None:
        name, shape, known = param["name"], param["shape"], self.params.setdefault(param["name"], [])
        _require(_are_sizes(shape) and shape == self.shapes.setdefault(name, shape), f"the shape of {name} is {shape!r:.80}")
        _require(place.dim is None or (type(place.dim) is int and 0 <= place.dim < len(shape)), f"{name} is cut along {place.dim!r}")
        same_rank = [other for other in known if other.tensor_rank == place.tensor_rank or (other.unit is None) != (place.unit is None)]
        _require(place.unit is None or not same_rank, f"{name} is there twice")
        if not known or known[0].dim is not None:  # one copy of a value that every rank holds is enough
            known.append(place)

    def _read_index(self) -> dict[str, Any]:
        data = _read_small(self._path, INDEX_BYTES)
        marker = _read_small(os.path.join(self.folder, "complete"), SMALL_BYTES).decode("utf-8").strip()
        _require(hashlib.sha256(data).hexdigest() == marker, "its sha256 differs from the one in the file 'complete'")
        values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
        _require(values <= 250_000 + len(data) // 8, f"it has about {values:,} values in {len(data):,} bytes, as no index has")
        index: dict[str, Any] = json.loads(data, object_pairs_hook=_once)
        _require(isinstance(index, dict) and index.get("format") == "hf_zero-checkpoint", "it is no index of a checkpoint")
        version = index.get("version")
        _require(version == FORMAT_VERSION, f"it has version {version!r:.80}, this script reads version {FORMAT_VERSION}")
        return index

    def _check_index(self) -> None:
        """Check sizes and counts against the files that the index lists, before anything is read with them."""
        index, files = self.index, self.index["files"]
        _require(index["chunk_bytes"] == CHUNK_BYTES, f"chunk_bytes is {index['chunk_bytes']!r:.80}, allowed is {CHUNK_BYTES}")
        _require(_are_sizes([index["world"]]), f"world is {index['world']!r:.80}")
        for name, file in files.items():
            _require(os.path.basename(name) == name and name.endswith(".safetensors"), f"{name!r:.80} is no file of a checkpoint")
            for tensor, record in file["tensors"].items():
                nbytes, item = record["nbytes"], _ITEM_BYTES.get(record["dtype"], 0)
                fits = _are_sizes(record["shape"]) and nbytes == math.prod(record["shape"]) * item and item > 0
                fits = fits and nbytes < file["nbytes"] and len(record["crc32"]) == 8 * -(-nbytes // CHUNK_BYTES)
                _require(fits, f"shape, bytes or checksums of {tensor!r} in {name} contradict each other")
        for unit in index["units"]:
            self._check_unit(unit)
        held = {(loose["file"], loose["name"]) for loose in index["loose"]} | {(file, name) for name, file in index["buffers"].items()}
        there = {(name, tensor) for name, file in files.items() if name.startswith("module-") for tensor in file["tensors"]}
        units = {(unit["kind"], unit["name"]) for unit in index["units"]}
        cut = {(name.split("-")[0], tensor) for name, file in files.items() for tensor in file["tensors"]}
        lost = sorted((kind, tensor) for kind, tensor in cut - units if kind in ("master", "weights"))
        _require(not lost, f"the index has no unit for the tensors {lost[:3]}")
        _require(held == there, f"of {sorted(held ^ there)[:3]} the index lists the tensor or the parameter alone")
        for loose in index["loose"]:
            numel = math.prod(self._record(loose["file"], loose["name"])["shape"])
            _require(_held(loose) == numel, f"{loose['name']} has {numel} elements in {loose['file']}, the index says otherwise")
        known = {param["name"] for part in (*index["units"], {"params": index["loose"]}) for param in part["params"]}
        _require(all(isinstance(name, str) for name in known), "a name of a parameter is no text")
        for group in index["optimizer"]["groups"] if index["optimizer"] is not None else ():
            _require(known >= set(group["params"]), "a param group names a parameter that is not there")
        targets = {*known, *index["excluded"], *index["buffers"]}
        lost = [alias for alias, name in index["aliases"].items() if alias in known or name not in targets]
        _require(not lost, f"the aliases {lost[:3]} lead to no parameter")

    def _check_unit(self, unit: dict[str, Any]) -> None:
        name, world, numel, end = unit["name"], unit["world"], unit["padded_numel"], 0
        fits = _are_sizes([world, numel, unit["tensor_rank"]]) and 1 <= world <= len(self.index["files"]) and numel % world == 0
        _require(fits and unit["kind"] in ("master", "weights"), f"unit {name!r}: {numel!r:.80} elements in {world!r:.80} shards")
        shards = [self._record(self._shard(unit, rank), name) for rank in range(world)]
        alike = all((shard["shape"], shard["dtype"]) == ([numel // world], shards[0]["dtype"]) for shard in shards)
        _require(alike and shards[0]["dtype"] in _ITEM_BYTES, f"unit {name!r}: its shards are not {world} times {numel // world} elements")
        for start, count, param in sorted((param["offset"], _held(param), param["name"]) for param in unit["params"]):
            aligned = -(-end // ALIGNMENT) * ALIGNMENT
            _require(start == aligned, f"unit {name!r}: the parameter {param} is at element {start!r:.80}, its place is {aligned}")
            end = start + count
        _require(
            end <= numel <= -(-end // ALIGNMENT) * ALIGNMENT + world * ALIGNMENT,
            f"unit {name!r}: its parameters end at element {end}, it at {numel}",
        )

    def _check_places(self, name: str, places: list[_Place]) -> None:
        dim, shape = places[0].dim, self.shapes[name]
        _require(all((place.dim is None) == (dim is None) for place in places), f"{name} is whole in one place and cut in another")
        if dim is not None:
            covered = 0
            for start, stop in sorted((start, stop) for place in places for start, stop in place.ranges):
                _require(start <= covered, f"the slices of {name} do not make the whole parameter")
                covered = max(covered, stop)
            _require(covered == shape[dim], f"the slices of {name} do not make the whole parameter")

    def _shard(self, unit: dict[str, Any], rank: int) -> str:
        slices = self.index["world"] // unit["world"]
        suffix = f".tensor-{unit['tensor_rank']:05d}-of-{slices:05d}" if slices > 1 else ""
        return f"{unit['kind']}-{rank:05d}-of-{unit['world']:05d}{suffix}.safetensors"

    def _record(self, file: str, tensor: str) -> dict[str, Any]:
        try:
            record: dict[str, Any] = self.index["files"][file]["tensors"][tensor]
        except KeyError:
            raise ValueError(f"{self.folder}: the index lists no tensor {tensor!r} in {file}") from None
        return record

    def read(self, name: str) -> torch.Tensor:
        """Return parameter or buffer ``name``, whole; floating point as fp32, a buffer of fp64 as it is.

        Raises:
            ValueError: A file is missing or damaged; names it.
        """
        with _reading(self.folder):
            if name not in self.params:
                file = self.index["buffers"][name]
                value = self._tensor(file, name, 0, None)
                return (value if value.dtype == torch.float64 else _as_fp32(value)).reshape(self._record(file, name)["shape"])
            return self._read_param(self.params[name], name, self.shapes[name])

    def _read_param(self, places: list[_Place], name: str, shape: list[int]) -> torch.Tensor:
        if places[0].dim is None:
            return self._read_place(name, places[0], shape)
        whole = torch.empty(shape)  # as large as its slices together, which lie in files
        for place in places:
            local = list(shape)
            local[place.dim] = sum(stop - start for start, stop in place.ranges)
            part = self._read_place(name, place, local)
            taken = 0
            for start, stop in place.ranges:
                whole.narrow(place.dim, start, stop - start).copy_(part.narrow(place.dim, taken, stop - start))
                taken += stop - start
        return whole

    def _read_place(self, name: str, place: _Place, shape: list[int]) -> torch.Tensor:
        unit = place.unit
        if unit is None:
            return _as_fp32(self._tensor(place.file, name, 0, None)).reshape(shape)
        per_rank = unit["padded_numel"] // unit["world"]
        start, stop = place.offset, place.offset + math.prod(shape)
        parts = []
        for rank in range(unit["world"]):
            first, last = max(start, rank * per_rank), min(stop, (rank + 1) * per_rank)
            if last > first:
                parts.append(self._tensor(self._shard(unit, rank), unit["name"], first - rank * per_rank, last - rank * per_rank))
        return _as_fp32(torch.cat(parts) if parts else torch.empty(0)).reshape(shape)

    def _tensor(self, file: str, tensor: str, start: int, stop: int | None) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` of a tensor as a row, with the checksums of all chunks they touch verified."""
        record, path = self._record(file, tensor), os.path.join(self.folder, file)
        numel = math.prod(record["shape"])
        stop = numel if stop is None else stop
        nbytes = self.index["files"][file]["nbytes"]
        if _size(path) != nbytes:
            raise ValueError(
                f"{_shown(path)} is missing or has another size than the {self.index['files'][file]['nbytes']} bytes in the index"
            )
        chunk = CHUNK_BYTES // _ITEM_BYTES[record["dtype"]]  # elements per checksum
        first, last = start // chunk * chunk, min(-(-stop // chunk) * chunk, numel)
        if _is_url(path):
            whole, first = self._fetch(path, record, first, last), first if len(record["shape"]) == 1 else 0
            return self._verified(path, tensor, whole, first, chunk)[start - first : stop - first]
        with _reading(path), safe_open(path, framework="pt") as opened:
            said = opened.get_slice(tensor)
            same = (said.get_dtype(), said.get_shape()) == (record["dtype"], record["shape"])
            _require(same, f"its header says {said.get_dtype()} {said.get_shape()} of {tensor!r}, the index says otherwise")
            whole = opened.get_tensor(tensor).reshape(-1) if len(record["shape"]) != 1 else said[first:last]
        if len(record["shape"]) != 1:
            first = 0
        return self._verified(path, tensor, whole, first, chunk)[start - first : stop - first]

    def _fetch(self, path: str, record: dict[str, Any], first: int, last: int) -> torch.Tensor:
        """Return elements ``first`` to ``last`` of a tensor in a store, all of them if it is no row: its checksums are its description."""
        item, numel = _ITEM_BYTES[record["dtype"]], math.prod(record["shape"])
        first, last = (first, last) if len(record["shape"]) == 1 else (0, numel)
        with _reading(path):
            found = bytearray(_store(path).cat_file(path, start=record["offset"] + first * item, end=record["offset"] + last * item))
            _require(len(found) == (last - first) * item, f"{_shown(path)} ends too early")
            row = torch.frombuffer(found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
            return row.view(_TYPES[record["dtype"]])

    def _verified(self, path: str, tensor: str, whole: torch.Tensor, first: int, chunk: int) -> torch.Tensor:
        """Return elements ``first`` on of a tensor, whose checksums must be those of the index."""
        record = self._record(os.path.basename(path), tensor)
        data = memoryview(whole.contiguous().view(torch.uint8).numpy()) if whole.numel() else memoryview(b"")  # type: ignore[arg-type]
        for position in range(0, len(data), CHUNK_BYTES):
            number = first // chunk + position // CHUNK_BYTES
            if f"{zlib.crc32(data[position : position + CHUNK_BYTES]):08x}" != record["crc32"][8 * number : 8 * number + 8]:
                raise ValueError(f"{_shown(path)} is damaged: chunk {number} of tensor {tensor!r} does not match its checksum")
        return whole

    def names(self, exclude_frozen_parameters: bool = False) -> list[str]:
        """Return parameters, then buffers; tied parameters once."""
        kept = [name for name in self.params if not (exclude_frozen_parameters and name in self.frozen)]
        return kept + list(self.index["buffers"])

    def nbytes(self, name: str) -> int:
        """Return bytes of ``name`` in a file."""
        if name in self.params:
            place, numel = self.params[name][0], math.prod(self.shapes[name])
            dtype = "F32" if place.unit is not None else self._record(place.file, name)["dtype"]
        else:
            record = self._record(self.index["buffers"][name], name)
            dtype, numel = record["dtype"], math.prod(record["shape"])
            widened = self.written == torch.float32 and dtype in _FLOATS and dtype != "F64"
            return int(numel * (4 if widened else _ITEM_BYTES[dtype]))
        return numel * (self.written.itemsize if dtype in _FLOATS else _ITEM_BYTES[dtype])

    def to_write(self, name: str) -> torch.Tensor:
        """Return ``name`` as a file stores it, in memory of its own; errors as ``read``.

        A buffer keeps the type that it was saved in, or fp32 instead of a narrower one where weights are written as fp32.
        """
        value = self.read(name)
        if name in self.params:
            value = value.to(self.written) if value.is_floating_point() else value
        elif self.written != torch.float32:
            file = self.index["buffers"][name]
            value = self._tensor(file, name, 0, None).reshape(value.shape)
        return value.contiguous().clone()


@dataclass(frozen=True)
class _Place:
    """Place of a parameter or a slice of one: inside ``unit`` from ``offset`` on, or as a tensor of its own in ``file``."""

    unit: dict[str, Any] | None
    file: str
    offset: int
    tensor_rank: int
    dim: Any
    ranges: list[list[int]]


class _Refused(ValueError):
    """An error whose message already names the file."""


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn each error that a broken file causes while it is read into a ValueError that names the file."""
    try:
        yield
    except (_Refused, FileNotFoundError):
        raise
    except Exception as error:
        path = _shown(path)
        told = _shown(str(error)[:2000] if type(error) is ValueError else f"{type(error).__name__}: {str(error)[:200]}")
        raise _Refused(told if path in told else f"{path} is damaged: {told}. Take another copy, or save it again") from error


def _read_small(path: str, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; of an index more, where the files beside it hold much."""
    if _is_url(path):
        size = _size(path)
        if size > limit == INDEX_BYTES:
            limit += sum(other["size"] or 0 for other in _store(path).ls(os.path.dirname(path), detail=True)) // 32
        _require(size <= limit, f"{_shown(path)} has {size:,} bytes, more than the {limit:,} that are read")
        return bytes(_store(path).cat_file(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is not waited for
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _require(stat.S_ISREG(found.st_mode), f"{path} is no regular file")
        if found.st_size > limit == INDEX_BYTES:
            beside = (os.lstat(other.path) for other in os.scandir(os.path.dirname(path)) if other.path != path)
            limit += sum(min(other.st_size, other.st_blocks * 512) for other in beside if stat.S_ISREG(other.st_mode)) // 32
        _require(found.st_size <= limit, f"{path} has {found.st_size:,} bytes, more than the {limit:,} that are read")
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE) if found.st_size > 1 << 20 and hasattr(os, "SEEK_HOLE") else found.st_size
        _require(hole >= found.st_size, f"{path} has holes, which no text has")
        file.seek(0)
        data = file.read(limit + 1)
    _require(len(data) <= limit, f"{path} grows while it is read")
    return data


def _printable(text: str) -> str:
    """Return ``text`` with control characters of a terminal escaped: names in files from other people may hold anything."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def _is_url(path: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def _store(url: str) -> Any:
    """Return fsspec's file system for a URL."""
    try:
        import fsspec

        checks = {"config_kwargs": {"response_checksum_validation": "when_required"}} if url.startswith("s3") else {}
        return fsspec.url_to_fs(url, use_listings_cache=False, **checks)[0]  # ranges are verified here
    except ImportError as error:
        raise _Refused(f"{_shown(url)} needs fsspec and a library for its kind of store: pip install fsspec s3fs ({error})") from None


def _size(path: str) -> int:
    """Return the bytes of a file; -1 if there is none."""
    if not _is_url(path):
        return os.path.getsize(path) if os.path.isfile(path) else -1
    try:
        found = _store(path).info(path)
    except FileNotFoundError:
        return -1
    return int(found["size"]) if found["type"] == "file" else -1


def _is_file(path: str) -> bool:
    return _size(path) >= 0


def _number_in(folder: str) -> str:
    """Return the sub-folder with the files of a checkpoint that its marker names, as those in object stores do; else nothing."""
    marker = os.path.join(folder, "complete")
    with _reading(marker):
        text = _read_small(marker, SMALL_BYTES).decode("utf-8", "replace") if _is_file(marker) else ""
    found = re.fullmatch(r"[0-9a-f]{64} ([0-9a-f]{8})", text.strip())
    return found[1] if found is not None else ""


def _shown(path: str) -> str:
    """Return ``path`` for a message, without the password of a URL."""
    return _printable(re.sub(r"(?<=://)[^\s/]*@", "***@", path))


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise ValueError(problem)


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in sizes)


def _held(param: dict[str, Any]) -> int:
    """Return the number of a parameter's elements in its unit."""
    shape, ranges = list(param["shape"]), param["ranges"]
    _require(_are_sizes(shape) and all(_are_sizes(pair) and len(pair) == 2 for pair in ranges), f"{param['name']} has shape {shape!r:.80}")
    if param["dim"] is not None:
        end = 0
        for start, stop in sorted(ranges):
            _require(end <= start <= stop <= shape[param["dim"]], f"the ranges of {param['name']} are {ranges!r:.80}")
            end = stop
        shape[param["dim"]] = sum(stop - start for start, stop in ranges)
    return math.prod(shape)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require(len(dict(pairs)) == len(pairs), "a key of an object comes twice")
    return dict(pairs)


def _as_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the whole fp32 state dict of a checkpoint; tied parameters appear under all their names, as one tensor.

    Args:
        checkpoint_dir: Folder that holds `latest` and the folders of the checkpoints.
        tag: Name of the checkpoint; None: the one that `latest` names.
        exclude_frozen_parameters: Leave out parameters that no optimizer trained.
        lazy_mode: Accepted for compatibility; `convert_zero_checkpoint_to_fp32_state_dict` is the way to keep memory low.

    Raises:
        FileNotFoundError, ValueError: There is no such checkpoint, or it is damaged.
    """
    checkpoint = Checkpoint(checkpoint_dir, tag)
    weights = {name: checkpoint.read(name) for name in checkpoint.names(exclude_frozen_parameters)}
    weights.update({alias: weights[name] for alias, name in checkpoint.index["aliases"].items() if name in weights})
    return weights


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    dtype: str = "fp32",
) -> None:
    """Write the whole weights, with at most one output file in memory: as safetensors, unless files of torch are requested; print where.

    Args:
        checkpoint_dir: As above.
        output_dir: A folder, made when it does not exist; or the name of one file. One that ends as torch's do (`out.bin`, `w.pt`) is
            written by `torch.save`, for scripts that `torch.load` it; `pytorch_model.bin` becomes `model.safetensors`.
        max_shard_size: Size of one output file, such as "5GB"; None writes one file.
        safe_serialization: False writes `pytorch_model.bin` by `torch.save`, with tied parameters under all their names.
        tag: As above.
        exclude_frozen_parameters: As above.
        dtype: Type of the floating point weights: "fp32", "bf16" or "fp16".

    Raises:
        FileNotFoundError, ValueError: There is no such checkpoint, or it is damaged; or no such type.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"Unsupported output dtype {dtype!r}; write one of {', '.join(_DTYPES)}")
    checkpoint = Checkpoint(checkpoint_dir, tag, _DTYPES[dtype])
    output = _file_or_folder(os.fspath(output_dir)) if safe_serialization else os.fspath(output_dir)
    names = checkpoint.names(exclude_frozen_parameters)
    stem, ending = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    alone = output.endswith((".safetensors", *_TORCH_ENDINGS)) and not os.path.isdir(output)
    path = output if alone else os.path.join(output, stem + ending)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    shards = [names] if max_shard_size is None or alone else list(_divide(checkpoint, names, _bytes_of(max_shard_size)))
    weight_map: dict[str, str] = {}
    former = [] if alone else _former_files(path, stem, ending)
    if len(shards) <= 1:
        _save(checkpoint, names, path)
    else:
        for number, members in enumerate(shards, 1):
            file = f"{stem}-{number:05d}-of-{len(shards):05d}{ending}"
            weight_map.update(dict.fromkeys(_save(checkpoint, members, os.path.join(output, file)), file))
        total, path = sum(checkpoint.nbytes(name) for name in names), f"{path}.index.json"
        with _replacing(path) as made, open(made, "x", encoding="utf-8") as index:
            json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, index, indent=2)
    for old in former:
        if old != path and os.path.basename(old) not in weight_map.values():
            os.unlink(old)
    chosen = path != os.fspath(output_dir) and ".safetensors" in os.path.basename(path)
    hint = "; for torch.load: safe_serialization=False writes pytorch_model.bin, and a name such as weights.bin one file"
    print(_printable(f"{dtype} weights written to {path}") + hint * chosen)
    preferred = [os.path.join(output, f"model.safetensors{end}") for end in ("", ".index.json")] if stem == "pytorch_model" else []
    if not alone and (found := [name for name in preferred if os.path.exists(name)]):
        print(_printable(f"from_pretrained prefers {found[0]}, which holds other weights: remove it to load {os.path.basename(path)}"))


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Load the whole fp32 weights of a checkpoint into a plain model on the CPU, and return the model.

    Raises:
        FileNotFoundError, ValueError: There is no such checkpoint, or it is damaged.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _file_or_folder(output: str) -> str:
    """Return ``output``, with Hugging Face's own file name in place of ``pytorch_model.bin``, unless that is a folder."""
    folder, name = os.path.split(output)
    return output if name != "pytorch_model.bin" or os.path.isdir(output) else os.path.join(folder, "model.safetensors")


def _former_files(path: str, stem: str, ending: str) -> list[str]:
    """Return the files of a model that was written as `path` before: `from_pretrained` prefers one file to an index of several."""
    numbered = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}{re.escape(ending)}")
    listed: list[str] = []
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        listed = [str(name) for name in json.loads(_read_small(f"{path}.index.json", 1 << 26))["weight_map"].values()]
    inside = {os.path.join(os.path.dirname(path), name) for name in listed if numbered.fullmatch(name)}
    return [old for old in (path, f"{path}.index.json", *inside) if os.path.lexists(old) and not os.path.isdir(old)]


def _save(checkpoint: Checkpoint, names: list[str], path: str) -> list[str]:
    """Write one file; return the names in it."""
    tensors = {name: checkpoint.to_write(name) for name in names}
    with _replacing(path) as made:
        if path.endswith(_TORCH_ENDINGS):
            tensors.update({alias: tensors[name] for alias, name in checkpoint.index["aliases"].items() if name in tensors})
            torch.save(tensors, made)
        else:
            save_file(tensors, made, metadata={"format": "pt"})
    return list(tensors)


@contextmanager
def _replacing(path: str) -> Iterator[str]:
    """Yield a name to write to, in a new folder that only this user can read; at the end that file replaces `path`.

    The file or link that `path` names before is removed: a link is not followed, and a file with a second name keeps its content there.
    """
    folder, name = os.path.split(path)
    hidden = f".zero_to_fp32.{os.getpid()}.{os.urandom(4).hex()}.part"
    place = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.mkdir(hidden, 0o700, dir_fd=place)
        inner = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
        stable = f"/proc/self/fd/{inner}"  # leads to the folder whatever becomes of its name
        try:
            yield os.path.join(stable if os.path.exists(stable) else os.path.join(folder, hidden), name)
            os.rename(name, name, src_dir_fd=inner, dst_dir_fd=place)
        finally:
            for left in os.listdir(inner):
                os.unlink(left, dir_fd=inner)
            os.close(inner)
            os.rmdir(hidden, dir_fd=place)
    finally:
        os.close(place)


def _divide(checkpoint: Checkpoint, names: list[str], limit: int) -> Iterator[list[str]]:
    members: list[str] = []
    size = 0
    for name in names:
        nbytes = checkpoint.nbytes(name)
        if members and size + nbytes > limit:
            yield members
            members, size = [], 0
        members.append(name)
        size += nbytes
    if members:
        yield members


def _bytes_of(size: str | int) -> int:
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", str(size))
    if match is None or match[2].upper() not in units:
        raise ValueError(f"max_shard_size is {size!r}; write it like '5GB' or '500MiB'")
    return int(float(match[1]) * units[match[2].upper()])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", help="folder with `latest` and the folders of the checkpoints")
    parser.add_argument("output_dir", help="folder for the weights, or the name of one file (.safetensors; .bin, .pt for torch.load)")
    parser.add_argument("-t", "--tag", default=None, help="name of the checkpoint (default: the one that `latest` names)")
    parser.add_argument("--max_shard_size", default="5GB", help="size of one output file (5GB)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out parameters that no optimizer trained")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="type of the floating point weights (fp32)")
    parser.add_argument("--safe_serialization", action="store_true", help="no effect: the name of output_dir decides the format")
    parser.add_argument("-d", "--debug", action="store_true", help="print the whole traceback of an error")
    arguments = parser.parse_args()
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            arguments.checkpoint_dir,
            arguments.output_dir,
            max_shard_size=arguments.max_shard_size,
            tag=arguments.tag,
            exclude_frozen_parameters=arguments.exclude_frozen_parameters,
            dtype=arguments.dtype,
        )
    except (OSError, ValueError, SafetensorError) as error:
        if arguments.debug:
            raise
        parser.exit(1, _printable(f"zero_to_fp32.py: {error}\n"))


if __name__ == "__main__":
    main()
