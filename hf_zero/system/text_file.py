"""The only reader of small files of other programs: regular files, read completely, with a bound on their size.

[Note: bounded reading] Files that another person sends may be a pipe that never ends or never begins, a device, or a sparse file of a
terabyte that takes no disk space. So a file is opened without waiting, is refused if it is not a regular file, and its size is compared
with the bound before memory is allocated for it. A file that the user names (a configuration, a hostfile) may be a pipe, ``<(...)`` of a
shell: it is read up to its bound.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from hf_zero.errors import ConfigError
from hf_zero.system.folder import errors_name
from hf_zero.system.object_store import ObjectPath

LIMIT_BYTES = 16 * 2**20  # limit of a configuration
SMALL_BYTES = 64 * 2**10  # limit of a name, a digest, a note
_DENSE_BYTES = 1 << 20  # files of text from this size on are checked for holes
_DESCRIBED_BYTES = 32  # bytes of data per byte of description
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)


def read_bytes(path: str | os.PathLike[str] | ObjectPath, limit_bytes: int, pipe: bool = False, within: int | None = None) -> bytes:
    """Return the content of a regular file or of an object in a store; see [Note: bounded reading].

    Args:
        path: Path of the file; links are followed.
        limit_bytes: The largest size that is read.
        pipe: The user names the file, so it may be a pipe or a device such as ``/dev/null``, which is read to its end.
        within: Descriptor of an open folder in which ``path`` is a name; a link is refused then.

    Raises:
        OSError: The file cannot be read, or is not a regular file; the message names the file.
        ValueError: The file is larger than the limit or has holes, or ``path`` has a null character.
    """
    if isinstance(path, ObjectPath):
        return path.get(limit_bytes)
    with opened(path, pipe, within) as descriptor:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_size > limit_bytes:
            raise ValueError(f"it is larger than {limit_bytes:,} bytes, the most that is read: it has {found.st_size:,}")
        if stat.S_ISREG(found.st_mode) and found.st_size > _DENSE_BYTES and _first_hole(descriptor, found.st_size) < found.st_size:
            raise ValueError(f"it has holes: some of its {found.st_size:,} bytes were never written, so it is no text")
        parts, room = [], limit_bytes + 1
        while room > 0 and (data := os.read(descriptor, min(room, 1 << 20))):
            parts.append(data)
            room -= len(data)
    if room <= 0:
        raise ValueError(f"it is larger than {limit_bytes:,} bytes, the most that is read")
    return b"".join(parts)


@contextmanager
def opened(path: str | os.PathLike[str], pipe: bool = False, within: int | None = None) -> Iterator[int]:
    """Return a context with the descriptor of a regular file, open for reading; arguments and errors are those of ``read_bytes``."""
    name = os.fspath(path)
    flags = os.O_RDONLY | (0 if pipe else _AT_ONCE) | (getattr(os, "O_NOFOLLOW", 0) if within is not None else 0)
    with errors_name(name):
        descriptor = os.open(name, flags, dir_fd=within)
        try:
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(mode) or (pipe and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)))):
                kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a folder")
                raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"it is {kind}; expected a regular file")
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def opened_file(path: Path) -> Iterator[BinaryIO]:
    """Return a context with the regular file at ``path``, open for reading as a binary file object; errors are those of ``opened``."""
    with opened(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
        yield file


def limit_beside(path: Path | ObjectPath) -> int:
    """Return a limit in bytes for the file that describes all others of its folder: 16 MiB, or more if these contain much data.

    The limit depends on the bytes that were written into the files, not on their length: holes cost their sender nothing.
    """
    try:
        if path.stat().st_size <= LIMIT_BYTES:
            return LIMIT_BYTES
        if isinstance(path, ObjectPath):
            return LIMIT_BYTES + sum(size or 0 for name, size in path.parent.listed().items() if name != path.name) // _DESCRIBED_BYTES
        return LIMIT_BYTES + sum(_written_bytes(other) for other in path.parent.iterdir() if other != path) // _DESCRIBED_BYTES
    except OSError:
        return LIMIT_BYTES


def _written_bytes(path: Path) -> int:
    """Return the bytes of a regular file without its holes, as far as the file system reports them; 0 for other entries."""
    try:
        with opened(path) as descriptor:
            found = os.fstat(descriptor)
            blocks = found.st_blocks * 512
            return min(found.st_size, blocks) if blocks else _first_hole(descriptor, found.st_size)  # a file system that reports no blocks
    except OSError:
        return 0


def _first_hole(descriptor: int, end: int) -> int:
    """Return the offset of the first hole of a file; its end if there is none, or if the file system does not report holes."""
    try:
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except (OSError, AttributeError):
        return end
    return hole


def read_text(path: str | os.PathLike[str] | ObjectPath, limit_bytes: int = SMALL_BYTES, within: int | None = None) -> str:
    """Return the text of a regular UTF-8 file; arguments and errors are those of ``read_bytes``."""
    return read_bytes(path, limit_bytes, within=within).decode("utf-8")


def read_first_line(path: Path | ObjectPath) -> str:
    """Return the only line of a small file, a name or digest, without surrounding spaces; bytes that are not UTF-8 are replaced.

    Raises:
        OSError, ValueError: See ``read_bytes``.
    """
    return read_bytes(path, SMALL_BYTES).decode("utf-8", errors="replace").strip()


def read_text_file(path: str | os.PathLike[str], what: str, limit_bytes: int = LIMIT_BYTES, pipe: bool = True) -> str:
    """Return the text of a UTF-8 file that the user names; a byte order mark at its beginning is dropped.

    Args:
        path: Path of the file.
        what: Kind of the file, for messages: "config file".
        limit_bytes: The largest size that is read.
        pipe: The file may be a pipe, which is read to its end.

    Raises:
        ConfigError: It cannot be read, is larger, or is not UTF-8; the message names ``what`` and ``path``.
    """
    name = f"The {what} {os.fspath(path)!r}"
    try:
        data = read_bytes(path, limit_bytes, pipe)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if "larger than" in str(error):
            raise ConfigError(
                f"{name} is larger than {limit_bytes:,} bytes, the most that is read; give the path of another file"
            ) from error
        raise ConfigError(f"{name} cannot be read: {error}") from error  # a null character in the path
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


LIMIT_CHARACTERS = 32 * 2**10  # PyYAML reads only 100 kB a second of a text that consists of punctuation
_LEVELS = 64


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Aliases (``*name``) are refused: nine lines of them can mean billions of values. So is endless nesting.

    Args:
        text: At most 32 kB; a file of settings has about 2 kB.

    Raises:
        yaml.YAMLError: It is not YAML, has an alias, or is nested too deep.
        ValueError: It is longer, or contains an invalid value (a date in month 13).
        RecursionError: It is nested far too deep.
    """
    if len(text) > LIMIT_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, more than the {LIMIT_CHARACTERS:,} of YAML that are read")
    import yaml

    return yaml.load(text, _plain_loader())  # noqa: S506  # a SafeLoader


@cache
def _plain_loader() -> Any:
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """Loader that refuses aliases and endless nesting."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Return the next node."""
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "it has an alias (*name): write the value in its place", mark)
            self.depth += 1
            if self.depth > _LEVELS:
                raise yaml.composer.ComposerError(None, None, f"it is nested more than {_LEVELS} deep", self.peek_event().start_mark)
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

    return PlainLoader
