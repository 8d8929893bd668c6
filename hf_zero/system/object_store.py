"""Paths in an object store that fsspec reaches (``s3://``, ``gs://``, ``hf://``, ``memory://``, ``file://``), beside those of ``pathlib``.

An ``ObjectPath`` answers the questions that readers ask a ``pathlib.Path``, so that one reader serves folders and stores. It writes and
deletes objects too, and it is the only module that does so.

[Note: a store that refuses] A store answers "slow down" or "try again" under load, and connections break. Each request is therefore
repeated, after waits that double, unless the store said that the object does not exist or that access is denied. A request to create an
object may have been carried out although its answer was lost: the content is compared then. Anything that a library raises becomes an
``OSError`` that names the object, with credentials masked.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hf_zero.errors import CheckpointError
from hf_zero.system.parted_upload import PartedUpload, PartPool
from hf_zero.system.secrets import without_credentials

logger = logging.getLogger("hf_zero")  # same name as in ``observe``, which imports torch
T = TypeVar("T")

TRIES = 8
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 10.0
_PART_BYTES = 8 << 20
_MOST_PARTS = 9000  # S3 takes 10,000 parts of an object
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BROKEN_URL = re.compile(r"([a-z][a-z0-9+-]{1,10}):/[^/]")
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError)
# Protocols of stores without folders: nothing is made before an object is written, least of all a bucket.
_WITHOUT_FOLDERS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "oss", "oci", "ocilake", "memory", "r2"))
_LOCAL = frozenset(("file", "local"))
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "hf": "huggingface_hub"}
_S3 = frozenset(("s3", "s3a"))
_ASK_LATER = {408, 425, 429}
# Conditions of a write: arguments of fsspec's ``pipe_file``, and the answers of stores that refuse it.
_ALWAYS: Mapping[str, str] = {}
_IF_NEW: Mapping[str, str] = {"mode": "create"}
_UNMET_CONDITION = ("PreconditionFailed", "412", "409")
_UNKNOWN_CONDITION = ("NotImplemented", "501")
_NO_RANGE = ("InvalidRange", "416")  # of an empty object
_MORE_BYTES = 1 << 16  # that a small object may have beyond the one that takes its place


def is_url(text: object) -> bool:
    """Return whether ``text`` is the URL of a store and not a path of a file system."""
    return isinstance(text, str) and _URL.match(text) is not None


def place_of(given: Any) -> Place:
    """Return the path that a text names: of an object store if it is a URL, else of a file system.

    Raises:
        CheckpointError: It is a URL that a ``pathlib.Path`` has cut, or the library for its store is missing; says how to install it.
    """
    if isinstance(given, ObjectPath):
        return given
    text = str(given)
    if not is_url(text):
        require_folder(Path(text), "give the URL as a string")
        return Path(text)
    return ObjectPath(text.rstrip("/") if not text.endswith("://") else text, _file_system(text))


def require_folder(path: Path, advice: str = "only checkpoints are written to object stores; give a folder") -> None:
    """Refuse the path of a file system that was made of a URL: it would name a folder such as ``s3:``.

    Raises:
        CheckpointError: It was a URL.
    """
    broken = _BROKEN_URL.match(str(path))
    if broken is not None and broken[1] in {*_WITHOUT_FOLDERS, "file", "sftp", "http", "https"}:
        raise CheckpointError(f"{str(path)!r} was a URL before pathlib.Path removed one of its slashes; {advice}")


def raw(place: Place) -> str:
    """Return the text from which ``place_of`` makes this path again. It may contain a password: keep it out of messages."""
    return place.url if isinstance(place, ObjectPath) else str(place)


def _file_system(url: str) -> Any:
    shown, protocol = without_credentials(url), url.partition("://")[0].lower()
    try:
        fsspec = importlib.import_module("fsspec.core")
    except ImportError:
        raise CheckpointError(f"{shown} needs fsspec: pip install 'hf_zero[stores]'") from None
    try:
        found: Any = fsspec.url_to_fs(url, use_listings_cache=False, **_options(protocol))[0]
        return found
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        command = f"pip install {package}" if package is not None else without_credentials(str(error))
        raise CheckpointError(f"{shown} needs a library for {protocol}://, which is not installed: {command}") from None
    except Exception as error:
        raise CheckpointError(f"{shown} cannot be opened: {without_credentials(f'{type(error).__name__}: {error}')}") from None


def _options(protocol: str) -> dict[str, Any]:
    """Return the options of fsspec's class for ``protocol`` whose defaults do not suit checkpoints."""
    if protocol in ("file", "local"):
        return {"auto_mkdir": True}
    if protocol in ("s3", "s3a"):
        # Servers exist that send the checksum of the whole object with a range of it. Every range is verified by checksums of our own.
        own = importlib.import_module("fsspec.config").conf.get("s3", {}).get("config_kwargs", {})
        return {"config_kwargs": {"response_checksum_validation": "when_required", **own}}
    return {}


def tried(path: ObjectPath, work: Callable[[], T], uploads: bool = False) -> T:
    """Return the result of ``work``, which asks a store for ``path``; see [Note: a store that refuses].

    Args:
        path: Path of the object.
        work: Makes the request.
        uploads: It writes the whole object anew. "Not found" may pass then: S3 says so of an upload whose completion it has carried out
            and not answered, when a client repeats that request.

    Raises:
        OSError: The store refused for good, or ``TRIES`` times; names the object.
    """
    for number in range(1, TRIES + 1):
        try:
            return work()
        except Exception as error:
            if isinstance(error, CheckpointError):
                raise
            passes = _may_pass(error) or (uploads and isinstance(error, FileNotFoundError))
            if number == TRIES or not passes:
                raise _told(error, path, number) from (None if _has_secret(error) else error)
            wait = min(_FIRST_WAIT_SECONDS * 2 ** (number - 1), _LONGEST_WAIT_SECONDS)
            logger.debug("%s: %s; trying again in about %.1f s", path, without_credentials(str(error)), wait)
            _pause(wait * random.uniform(0.75, 1.25))  # noqa: S311  # spreads ranks over time
    raise AssertionError("unreachable")


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def _may_pass(error: Exception) -> bool:
    """Return whether a request that failed with ``error`` may succeed later."""
    if isinstance(error, _FINAL) or isinstance(error, (TypeError, ValueError)) and not isinstance(error, OSError):
        return False
    status = next((found for name in ("status", "code", "http_status") if type(found := getattr(error, name, None)) is int), 0)
    return not 400 <= status < 500 or status in _ASK_LATER


def _has_secret(error: BaseException) -> bool:
    text = str(error)
    return without_credentials(text) != text


def _told(error: Exception, path: ObjectPath, number: int) -> OSError:
    """Return an ``OSError`` that names the object."""
    text = without_credentials(str(error)).strip() or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "it does not exist, or its bucket or folder does not", str(path))
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, f"the store denies access ({text})", str(path))
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, "it exists", str(path))
    often = f", {number} times" if number > 1 else ""
    return OSError(errno.EIO, f"{type(error).__name__}{often}: {text}", str(path))


class ObjectPath:
    """Path of an object, or of a folder: all objects whose names begin with the path and a slash.

    Args:
        url: The URL, with its protocol and without a slash at its end.
        fs: fsspec's file system for this URL.
    """

    def __init__(self, url: str, fs: Any) -> None:
        self.url = url
        self.fs = fs
        self.key: str = fs._strip_protocol(url)

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}", self.fs)

    def __str__(self) -> str:
        return without_credentials(self.url)

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def name(self) -> str:
        """Return the last component."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return the ending of the name, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        """Return the folder; the path itself where it has no further component."""
        above = self.url.rpartition("/")[0]
        return ObjectPath(above, self.fs) if above and not above.endswith((":", ":/", "://")) else self

    # -- questions

    def _info(self) -> dict[str, Any] | None:
        def ask() -> dict[str, Any] | None:
            try:
                self.fs.invalidate_cache()
                found: dict[str, Any] = self.fs.info(self.key)
                return found
            except (FileNotFoundError, NotADirectoryError):
                return None

        return tried(self, ask)

    def exists(self) -> bool:
        """Return whether there is an object or a folder of this name."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        found = self._info()
        return found is not None and found.get("type") == "file"

    def is_dir(self) -> bool:
        """Return whether there are objects below this name."""
        found = self._info()
        return found is not None and found.get("type") == "directory"

    def is_symlink(self) -> bool:
        """Return False: a store has no links."""
        return False

    def stat(self) -> _Status:
        """Return ``st_size`` and ``st_mtime_ns``.

        Raises:
            FileNotFoundError: There is no such object.
        """
        found = self._info()
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "it does not exist", str(self))
        return _Status(self, int(found.get("size") or 0))

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield objects and folders directly below this name."""
        for name in self.listed():
            yield self / name

    def listed(self) -> dict[str, int | None]:
        """Return the names directly below this one, each with the size of its object; None for a folder. Empty if there are none."""

        def ask() -> list[dict[str, Any]]:
            try:
                self.fs.invalidate_cache()
                found: list[dict[str, Any]] = self.fs.ls(self.key, detail=True)
                return found
            except (FileNotFoundError, NotADirectoryError):
                return []

        entries = {str(entry["name"]).rstrip("/"): entry for entry in tried(self, ask)}
        own = self.key.rstrip("/")
        return {
            name.rpartition("/")[2]: None if entry.get("type") == "directory" else int(entry.get("size") or 0)
            for name, entry in sorted(entries.items())
            if name != own
        }

    # -- content

    def get(self, limit_bytes: int) -> bytes:
        """Return the content of an object.

        Raises:
            OSError: It cannot be read, or is no object.
            ValueError: It is larger than the limit.
        """

        def ask() -> bytes:
            try:
                return bytes(self.fs.cat_file(self.key, start=0, end=limit_bytes + 1))  # one request, which cannot bring more
            except Exception as error:
                if _code_of(error) in _NO_RANGE:
                    return b""
                raise

        data = tried(self, ask)
        if len(data) > limit_bytes:
            raise ValueError(f"it is larger than {limit_bytes:,} bytes, the most that is read")
        return data

    def get_range(self, start: int, stop: int) -> bytes:
        """Return the bytes ``start`` to ``stop`` of an object; fewer where it ends before.

        Raises:
            OSError: It cannot be read.
        """

        def ask() -> bytes:
            data = bytes(self.fs.cat_file(self.key, start=start, end=stop))
            if len(data) > stop - start:
                raise OSError(errno.EIO, f"the store sent {len(data)} bytes in place of {stop - start}", str(self))
            return data

        return tried(self, ask)

    def put(self, data: bytes) -> None:
        """Write a small object and replace an existing one; readers get the old or the new object, never a part.

        Raises:
            OSError: The store refuses.
        """
        self._make_room()
        tried(self, lambda: self._put(data))

    def _put(self, data: bytes, condition: Mapping[str, str] = _ALWAYS) -> None:
        """Write an object in one request; on a disk, where a writer may be killed half-way, under another name first."""
        if not self._has_protocol(_LOCAL):
            self.fs.pipe_file(self.key, data, **condition)
            return
        other = f"{self.key}.{os.urandom(4).hex()}.part"
        self.fs.pipe_file(other, data)
        if condition == _IF_NEW:
            try:
                self.fs.link(other, self.key)
            finally:
                self.fs.rm_file(other)
        else:
            self.fs.mv(other, self.key)

    def put_new(self, data: bytes) -> None:
        """Write a small object unless one exists. A store without a conditional write is asked before the write.

        Raises:
            FileExistsError: An object with other content exists.
            OSError: The store refuses.
        """
        if self._info() is not None and self.get(len(data) + _MORE_BYTES) != data:
            raise FileExistsError(errno.EEXIST, "it exists", str(self))
        self._put_if(data, _IF_NEW)

    def replace_object(self, data: bytes, former: bytes) -> None:
        """Write a small object in place of one with the content ``former``, or of one that has been deleted meanwhile. S3 compares in the
        moment of the write; other stores are asked before the write.

        Raises:
            FileExistsError: The object has other content by now.
            OSError: The store refuses.
        """
        found = self._info()
        if found is None:
            self.put_new(data)
            return
        if self.get(len(data) + _MORE_BYTES) not in (former, data):  # after the tag was asked for: if it changes between, the tag is stale
            raise FileExistsError(errno.EEXIST, "it has other content", str(self))
        self._put_if(data, {"IfMatch": found["ETag"]} if self._has_protocol(_S3) and found.get("ETag") else _ALWAYS)

    def _put_if(self, data: bytes, condition: Mapping[str, str]) -> None:
        """Write a small object under a condition; without it if the store knows no conditions.

        Raises:
            FileExistsError: The condition is not met, and the object has other content.
            OSError: The store refuses.
        """
        self._make_room()

        def ask() -> None:
            try:
                self._put(data, condition)
            except FileExistsError:
                raise
            except (NotImplementedError, TypeError, ValueError):
                self._put(data)
            except Exception as error:
                if condition and _code_of(error) in _UNKNOWN_CONDITION:
                    self._put(data)
                elif condition and _code_of(error) in _UNMET_CONDITION:
                    raise FileExistsError(errno.EEXIST, "it exists", str(self)) from None
                else:
                    raise

        try:
            tried(self, ask)
        except FileExistsError:
            if self.get(len(data) + _MORE_BYTES) != data:  # else it is ours: the answer to the first try was lost
                raise

    @contextmanager
    def writing(self, nbytes: int, pool: PartPool) -> Iterator[Any]:
        """Stream a new object of ``nbytes`` in a context, which gives a file to write to; it appears when the ``with`` ends without error.

        ``pool`` sends the parts of an object of S3. Errors are the library's own; ``tried`` around the whole turns them into ``OSError``.
        """
        self._make_room()
        part = max(_PART_BYTES, -(-nbytes // _MOST_PARTS >> 20) + 1 << 20 if nbytes > _PART_BYTES * _MOST_PARTS else 0)
        parted = self._has_protocol(_S3) and hasattr(self.fs, "call_s3")
        file = PartedUpload(self.fs, self.key, part, pool) if parted else self.fs.open(self.key, "wb", block_size=part)
        try:
            yield file
            file.close()
        except BaseException:
            _give_up(file)
            raise

    def _make_room(self) -> None:
        if not self._has_protocol(_WITHOUT_FOLDERS | _LOCAL):
            tried(self, lambda: self.fs.makedirs(self.parent.key, exist_ok=True))

    # -- deletion

    def remove(self, names: Iterable[str] | None = None) -> None:
        """Delete the object, or those of ``names`` directly below it; none of them has to exist.

        Raises:
            OSError: The store refuses.
        """
        for path in [self] if names is None else [self / name for name in names]:
            with suppress(FileNotFoundError):
                tried(path, lambda path=path: path.fs.rm_file(path.key) and None)  # type: ignore[misc]

    def end_uploads(self) -> None:
        """Delete parts of objects below this name whose writer was killed; S3 keeps them, and charges for them, until then.

        A store without such parts, or without the right to list them, is left as it is.
        """
        call = getattr(self.fs, "call_s3", None)
        if call is None or not hasattr(self.fs, "split_path"):
            return
        bucket, key, _ = self.fs.split_path(self.key)
        with suppress(Exception):  # an answer that the next save asks for again
            found = call("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/").get("Uploads") or []
            for upload in found:
                call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def remove_empty_folder(self) -> None:
        """Remove the empty folder of this name, where a store has folders."""
        if not self._has_protocol(_WITHOUT_FOLDERS):
            with suppress(Exception):
                self.fs.rmdir(self.key)

    def _has_protocol(self, names: frozenset[str]) -> bool:
        protocol = self.fs.protocol
        return bool(names & ({protocol} if isinstance(protocol, str) else set(protocol)))


@dataclass(frozen=True)
class _Status:
    """Result of ``ObjectPath.stat``."""

    path: ObjectPath
    st_size: int

    @property
    def st_mtime_ns(self) -> int:
        """Return the store's own time of the last write; 0 if it keeps none."""
        try:
            return int(tried(self.path, lambda: self.path.fs.modified(self.path.key)).timestamp() * 1e9)
        except (OSError, AttributeError):
            return 0


Place = Path | ObjectPath


def _code_of(error: Exception) -> str:
    """Return the code of a store's response, as text; "None" if it has none."""
    response = getattr(error.__cause__, "response", None)
    return str(response.get("Error", {}).get("Code") if isinstance(response, dict) else getattr(error, "code", None))


def _give_up(file: Any) -> None:
    """End an upload that failed: its parts are deleted, and freeing the file does not complete it."""
    with suppress(Exception):
        file.discard()
    if isinstance(file, importlib.import_module("fsspec.spec").AbstractBufferedFile):
        file.closed = True  # closing it would upload the rest
    else:
        with suppress(Exception):
            file.close()
