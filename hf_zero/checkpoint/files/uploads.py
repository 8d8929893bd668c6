"""Write the files of one save into an object store: stream them from the shards, several at a time, and repeat failed requests.

``write_tensor_file`` uses ``Uploads`` for a store as it uses ``Disk`` for a folder. Each of ``STREAMS`` objects buffers one part (8 MiB;
more if an object would have more than 9000 parts), and in S3 up to ``PARTS_AT_ONCE`` parts are on their way, so memory does not grow with
the size of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from hf_zero.system.folder import Folder
from hf_zero.system.object_store import ObjectPath, Place, tried
from hf_zero.system.parted_upload import PartPool

T = TypeVar("T")

STREAMS = 4  # objects that one rank writes at a time: masters, both moments, and the rest


class Uploads:
    """Writer of the objects of one save; it has the methods of ``Disk``."""

    def __init__(self) -> None:
        self._parts = PartPool()

    def __enter__(self) -> Uploads:
        self._parts.__enter__()
        return self

    def __exit__(self, *outcome: object) -> None:
        self._parts.__exit__(*outcome)

    def each(self, works: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Return the results of ``works``, of which up to ``STREAMS`` run at a time in threads.

        Raises:
            OSError: One failed; all that had begun have ended.
        """
        with ThreadPoolExecutor(STREAMS, thread_name_prefix="hf_zero upload") as pool:
            futures = {name: pool.submit(work) for name, work in works.items()}
            try:
                return {name: future.result() for name, future in futures.items()}
            except BaseException:
                for future in futures.values():
                    future.cancel()
                raise

    def repeated(self, path: Place, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which writes ``path`` from its beginning; it runs again if a request fails."""
        return tried(path, work, uploads=True) if isinstance(path, ObjectPath) else work()

    @contextmanager
    def writing(self, path: Place, nbytes: int, _folder: Folder | None = None) -> Iterator[ObjectFile]:
        """Write the new object ``path`` of ``nbytes`` in a context; the complete object becomes visible when the context ends."""
        if not isinstance(path, ObjectPath):
            raise TypeError(f"{path} is no object of a store")
        with path.writing(nbytes, self._parts) as file:
            yield ObjectFile(file)

    def sync(self) -> None:
        """Do nothing: an object is stored when its ``writing`` has ended."""


class ObjectFile:
    """Object that is written from its first byte to its last.

    Args:
        file: fsspec's file, which sends a part when it has enough bytes for one.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        """Append ``data``, which may change afterwards."""
        self._file.write(data)

    def start_writeback(self) -> None:
        """Do nothing: parts are sent as they fill."""
