"""Read files that ``torch.save`` wrote: tensors are views of the mapped file, and objects of unknown classes become inert records.

torch's own reader is not used, because it trusts lengths in the pickle: it can read past the end of a record, and its weights-only mode
allocates any size that the pickle names. This reader first checks the length and checksum of the record that holds a storage.
"""

from __future__ import annotations

import io
import math
import pickletools  # nosec B403
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hf_zero.checkpoint.convert.pickles import Inert, Machine, Name, Names
from hf_zero.errors import CheckpointError
from hf_zero.system.reading import reading, shown
from hf_zero.system.text_file import limit_beside, opened_file, read_bytes

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # first value of files written before PyTorch 1.6
_LEGACY_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip


def load_torch_file(path: Path) -> Any:
    """Return the contents of a file that ``torch.save`` wrote; tensors are views of the mapped file, which must not change meanwhile.

    Raises:
        CheckpointError: The file cannot be read or is damaged; the message names the file.
    """
    with reading(path, CheckpointError), opened_file(path) as file:
        nbytes = file.seek(0, io.SEEK_END)
        if nbytes == 0:
            raise ValueError("it is empty")
        return _load(file, torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8))


def load_torch_bytes(data: bytearray, what: str) -> Any:
    """Return the contents of ``data``, the bytes of such a file, like ``load_torch_file``; ``what`` describes ``data`` in messages."""
    with reading(what, CheckpointError):
        if not data:
            raise ValueError("it is empty")
        return _load(io.BytesIO(data), torch.frombuffer(data, dtype=torch.uint8))


def load_pickle(path: Path) -> Any:
    """Return the contents of a file that ``pickle`` wrote, without tensors.

    Raises:
        CheckpointError: The file cannot be read; the message names the file.
    """
    with reading(path, CheckpointError):
        data = read_bytes(path, limit_beside(path))
        return Machine(Names(len(data))).run(data)


def _load(file: BinaryIO, whole: torch.Tensor) -> Any:
    """Return the contents of ``file``, whose bytes are the uint8 tensor ``whole``."""
    return _load_zip(file, whole) if zipfile.is_zipfile(file) else _load_legacy(file, whole)


# -- tensors ------------------------------------------------------------------------------------------------------------


class _Tensors:
    """The functions that rebuild tensors of one file, as views of its bytes that are checked to lie inside of their storage."""

    def __init__(self, whole: torch.Tensor, nbytes: int) -> None:
        self._whole = whole
        self.names = Names(
            nbytes,
            {
                ("torch._utils", "_rebuild_tensor"): self._rebuild,
                ("torch._utils", "_rebuild_tensor_v2"): self._rebuild,
                ("torch._utils", "_rebuild_tensor_v3"): self._rebuild_typed,
                ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
                ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
                # A tensor with further attributes, or of a subclass; return the plain tensor.
                ("torch._tensor", "_rebuild_from_type_v2"): lambda function, kind, arguments, state: self.names.call(function, arguments),
            },
        )

    def storage(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of a storage, (n,) of ``dtype``; a copy if the file does not align them."""
        data = self._whole[start : start + nbytes]
        if start % dtype.itemsize and nbytes:
            self.names.spend(nbytes)
            data = data.clone()
        return data.view(dtype) if nbytes else torch.empty(0, dtype=dtype)

    def _rebuild(self, storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> torch.Tensor:
        if not isinstance(storage, torch.Tensor) or type(offset) is not int or offset < 0:
            raise TypeError(f"it has a tensor over {shown(storage)} from element {shown(offset)} on")
        if len(sizes) != len(strides) or not all(type(number) is int and number >= 0 for number in (*sizes, *strides)):
            raise ValueError(f"it has a tensor of shape {shown(sizes)} and strides {shown(strides)}")
        numel = math.prod(sizes)
        if numel == 0:
            return torch.empty(tuple(sizes), dtype=storage.dtype)
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if last >= storage.numel() or numel > storage.numel():
            raise ValueError(f"it has a tensor of shape {shown(tuple(sizes))} that needs element {last} of a storage of {storage.numel()}")
        return storage.as_strided(tuple(sizes), tuple(strides), storage.storage_offset() + offset)

    def _rebuild_typed(self, storage: Any, offset: Any, sizes: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any) -> Any:
        if not isinstance(storage, torch.Tensor) or storage.dtype != torch.uint8 or not isinstance(dtype, torch.dtype):
            raise TypeError(f"it has a tensor of type {shown(dtype)}")
        typed = storage.clone() if storage.storage_offset() % dtype.itemsize else storage
        return self._rebuild(typed.view(dtype), offset, sizes, strides)


def _storage_id(pid: Any) -> tuple[torch.dtype, str, int]:
    """Return (dtype, key, number of elements) of the storage that a persistent id names."""
    if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], Name):
        raise ValueError(f"it refers to {shown(pid)}, which is not a storage")
    module, _, name = pid[1].kind.rpartition(".")
    if name not in _STORAGES or module not in ("torch", "torch.storage", "torch.cuda"):
        raise ValueError(f"it has a storage of {pid[1].kind}, which is not supported")
    if type(pid[2]) is not str or type(pid[4]) is not int or pid[4] < 0:
        raise ValueError(f"it has a storage {shown(pid[2])} of {shown(pid[4])} elements; expected a text and a number of at least 0")
    return _STORAGES[name], pid[2], pid[4]


# -- archives -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """A member of an archive: offset and number of its bytes in the file, and their CRC-32 (0 if the writer computed none)."""

    start: int
    nbytes: int
    crc32: int


def _load_zip(file: BinaryIO, whole: torch.Tensor) -> Any:
    records = _records(file, whole)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"it is an archive with {len(pickles)} members data.pkl, expected one")
    prefix = pickles[0].removesuffix("data.pkl")
    order = records.get(f"{prefix}byteorder")
    if order is not None and _bytes_of(whole, order, "byteorder") != sys.byteorder.encode():
        raise ValueError(f"it was written on a machine of another byte order than {sys.byteorder}")
    data = _bytes_of(whole, records[pickles[0]], pickles[0])
    tensors = _Tensors(whole, len(data))
    known: dict[str, torch.Tensor] = {}

    def persistent(pid: Any) -> torch.Tensor:
        dtype, key, numel = _storage_id(pid)
        record = records.get(f"{prefix}data/{key}")
        if record is None or record.nbytes != numel * dtype.itemsize:
            raise ValueError(f"it names {numel} elements of {dtype} in data/{key}, which has {record.nbytes if record else 'no'} bytes")
        if key not in known:
            _check_crc32(whole, record, f"data/{key}")
            known[key] = tensors.storage(record.start, record.nbytes, torch.uint8)
        return tensors.storage(record.start, record.nbytes, dtype)

    return Machine(tensors.names, persistent).run(data)


def _records(file: BinaryIO, whole: torch.Tensor) -> dict[str, _Record]:
    """Return the members of an archive by name; each is uncompressed and lies inside of the file."""
    found: dict[str, _Record] = {}
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    for member in members:
        start, nbytes = member.header_offset, member.file_size
        if member.compress_type != zipfile.ZIP_STORED or nbytes != member.compress_size or member.filename in found or start < 0:
            raise ValueError(f"its member {shown(member.filename)} is compressed or occurs twice, so torch.save did not write it")
        head = whole[start : start + _LOCAL_HEADER.size].numpy().tobytes()
        magic, name, extra = _LOCAL_HEADER.unpack(head)
        start += _LOCAL_HEADER.size + name + extra
        if magic != b"PK\3\4" or start + nbytes > whole.numel():
            raise ValueError(f"its member {shown(member.filename)} does not lie inside it")
        found[member.filename] = _Record(start, nbytes, member.CRC)
    return found


def _check_crc32(whole: torch.Tensor, record: _Record, name: str) -> None:
    data = memoryview(whole[record.start : record.start + record.nbytes].numpy())  # type: ignore[arg-type]
    if record.crc32 and zlib.crc32(data) != record.crc32:
        raise ValueError(f"its member {name} is damaged: the checksum does not match")


def _bytes_of(whole: torch.Tensor, record: _Record, name: str) -> bytes:
    _check_crc32(whole, record, name)
    return whole[record.start : record.start + record.nbytes].numpy().tobytes()


# -- before PyTorch 1.6 -------------------------------------------------------------------------------------------------


class _Bounded(io.RawIOBase):
    """A file whose reads are limited to its remaining bytes, because a buffered file would allocate any length that a pickle names."""

    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        self._file = file
        self._nbytes = nbytes

    def read(self, count: int = -1) -> bytes:
        """Return the next ``count`` bytes, or fewer at the end of the file."""
        left = max(0, self._nbytes - self._file.tell())
        return self._file.read(left if count < 0 else min(count, left))

    def readline(self, size: int | None = -1) -> bytes:
        """Return the next line."""
        return self._file.readline()

    def tell(self) -> int:
        """Return the current position."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position and return it."""
        return self._file.seek(offset, whence)


def _load_legacy(archive: BinaryIO, whole: torch.Tensor) -> Any:
    """Return the contents of a file in the format before PyTorch 1.6.

    The file consists of pickles of magic number, version, system properties, contents and storage keys, and then of the length and bytes
    of each storage.
    """
    file: Any = _Bounded(archive, whole.numel())
    file.seek(0)
    head = [_small_pickle(file) for _ in range(3)]
    if head[:2] != [_LEGACY_MAGIC, _LEGACY_PROTOCOL] or not isinstance(head[2], dict) or head[2].get("little_endian") is False:
        raise ValueError("torch.save did not write it: it is neither an archive nor in the format before PyTorch 1.6")
    begin = file.tell()
    for _ in pickletools.genops(file):
        pass
    end = file.tell()
    data = whole[begin:end].numpy().tobytes()
    wanted: dict[str, tuple[torch.dtype, int]] = {}

    def note(pid: Any) -> Inert:
        dtype, key, numel = _storage_id(pid)
        if wanted.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise ValueError(f"it refers to storage {key} with two types or lengths")
        return Inert("storage", (), {})

    Machine(Names(len(data)), note).run(data)
    tensors = _Tensors(whole, whole.numel())
    storages: dict[str, torch.Tensor] = {}
    for key in _small_pickle(file):
        start = file.tell() + 8
        numel = int.from_bytes(file.read(8), "little")
        dtype, expected = wanted[key]
        if numel != expected or start + numel * dtype.itemsize > whole.numel():
            raise ValueError(f"it names {expected} elements of {dtype} in storage {key}, which has {numel}, or ends before them")
        storages[key] = tensors.storage(start, numel * dtype.itemsize, dtype)
        file.seek(start + numel * dtype.itemsize)

    def persistent(pid: Any) -> torch.Tensor:
        _, key, _ = _storage_id(pid)
        if len(pid) > 5 and pid[5] is not None:
            _, first, count = pid[5]
            return storages[key][first : first + count]
        return storages[key]

    return Machine(tensors.names, persistent).run(data)


def _small_pickle(file: BinaryIO) -> Any:
    return Machine(Names(0)).run(file)


def require_trust(trusted: bool, path: Path) -> None:
    """Raise an error unless the user allows pickles.

    Raises:
        CheckpointError: ``trusted`` is false; the message names the option ``--trust-pickle``.
    """
    if not trusted:
        raise CheckpointError(
            f"{path} is a pickle. To read it, add --trust-pickle; hf_zero then reads tensors and plain values from it and neither "
            "imports nor runs code that it names"
        )
