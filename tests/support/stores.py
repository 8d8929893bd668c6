"""A store that refuses: fsspec's local file system under a protocol of its own, with faults that a test orders."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from hf_zero.checkpoint.commit.folders import number_of
from hf_zero.checkpoint.commit.store_saves import StoreSave
from hf_zero.checkpoint.format.names import MARKER_FILE
from hf_zero.errors import CheckpointError
from hf_zero.system.object_store import ObjectPath, place_of

PROTOCOL = "faulty"


@dataclass
class Fault:
    """An answer in place of the store's.

    Attributes:
        operation: "info", "ls", "read", "put", "write" (in the middle of an object), "close" (at its end) or "delete".
        name: Part of the path.
        times: How often; -1 is always.
        error: What is raised.
        late: Carry the request out, and raise then: the answer was lost.
    """

    operation: str
    name: str = ""
    times: int = -1
    error: Exception = field(default_factory=lambda: OSError(5, "503 Slow Down"))
    late: bool = False


class Faulty(LocalFileSystem):  # type: ignore[misc]
    """fsspec's local file system, whose ``faults`` come first."""

    protocol = PROTOCOL
    faults: list[Fault] = []
    seen: list[tuple[str, str]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix(f"{PROTOCOL}://"))  # type: ignore[no-any-return]

    def _meet(self, operation: str, path: str, late: bool = False) -> None:
        if not late:
            self.seen.append((operation, path))
        for fault in self.faults:
            if (fault.operation, fault.late) == (operation, late) and fault.name in path and fault.times:
                fault.times -= 1
                raise fault.error

    def info(self, path: Any, **kwargs: Any) -> Any:
        if isinstance(path, str):  # else an entry of ``ls``
            self._meet("info", path)
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        self._meet("ls", path)
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._meet("read", path)
        return super().cat_file(path, start=start, end=end, **kwargs)  # type: ignore[no-any-return]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        self._meet("put", path)
        if mode == "create" and Path(path).exists():
            raise FileExistsError(path)
        Path(path).write_bytes(value)
        self._meet("put", path, late=True)

    def rm_file(self, path: str) -> None:
        self._meet("delete", path)
        Path(path).unlink()

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return _Upload(self, self._strip_protocol(path)) if mode == "wb" else super().open(path, mode, **kwargs)


class _Upload(io.RawIOBase):
    """An object that appears when it is closed, as in a store."""

    def __init__(self, store: Faulty, path: str) -> None:
        self._store, self._path, self._data = store, path, bytearray()

    def write(self, data: Any) -> int:
        self._store._meet("write", self._path)
        self._data += data
        return len(data)

    def discard(self) -> None:
        self._data = bytearray()
        self._path = ""

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._path:
                self._store._meet("close", self._path)
                Path(self._path).write_bytes(self._data)


@contextmanager
def faulty(folder: Path, *faults: Fault, waits: list[float] | None = None) -> Iterator[str]:
    """Give the URL of ``folder`` in a store with ``faults`` in a context; nobody waits, ``waits`` gets the seconds asked for."""
    from hf_zero.system import object_store

    fsspec.register_implementation(PROTOCOL, Faulty, clobber=True)
    before = object_store._pause
    object_store._pause = (waits if waits is not None else []).append
    Faulty.faults, Faulty.seen = list(faults), []
    try:
        yield f"{PROTOCOL}://{folder}"
    finally:
        object_store._pause = before
        Faulty.faults = []


def objects(folder: Path) -> list[str]:
    """Return the names of all objects below ``folder``."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def race(url: str, passes_by_the_look: bool = False) -> None:
    """Let two saves of one tag begin, and the second one finish when the first has: for a new tag, then for one that is there.

    Args:
        url: Place of the checkpoints.
        passes_by_the_look: The first one finishes after the second has looked whether the marker is as it was, and before it writes.
    """
    place, put_if = place_of(url), ObjectPath._put_if
    assert isinstance(place, ObjectPath)

    def begun(number: str) -> StoreSave:
        save = StoreSave(place, "t", number)
        save.begin()
        return save

    def commit(save: StoreSave) -> None:
        index = mock.Mock(files={})
        index.to_json.return_value = json.dumps({"number": save.number})
        save.commit(index, latest=True)

    for number in ("00000001", "00000003"):
        early, late = begun(number), begun(f"0000000{int(number) + 1}")

        def after_the_look(path: ObjectPath, *words: Any, early: StoreSave = early) -> None:
            with mock.patch.object(ObjectPath, "_put_if", put_if):
                if path.name == MARKER_FILE:
                    commit(early)
                put_if(path, *words)

        if not passes_by_the_look:
            commit(early)
        with mock.patch.object(ObjectPath, "_put_if", after_the_look if passes_by_the_look else put_if):
            with pytest.raises(CheckpointError, match="another save has completed checkpoint 't'"):
                commit(late)
        late.abandon()
        assert number_of(place / "t") == number
        begun("00000005").abandon()  # it deletes the record of the one that failed
