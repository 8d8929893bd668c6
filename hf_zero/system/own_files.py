"""Files and folders that this package makes beside those of others: hidden names, signs, the one way to write, and the only deletions.

[Note: what is written] Files of others are never opened for writing. A file is made under a new hidden name and is given its own when it is
whole and on the disk; whatever has that name goes, and what a link there leads to, or has as a second name, stays as it is. All of that
happens in one open folder ([Note: by descriptor]). A test counts every other way to write.

[Note: what is deleted] Nothing outside this module deletes (a test counts the calls), and nothing here deletes what is not ours. What is
being made has a hidden name that says which process makes it, or lies in a folder that says so (``writer.json``). It goes
when that process removes it, or when another one finds it dead. A folder of this user loses the files whose names its owner knows,
never what lies deeper or behind a link, and is removed when nothing else was in it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hf_zero.system import text_file
from hf_zero.system.folder import Folder, other_spelling
from hf_zero.system.process import Process
from hf_zero.system.text_file import SMALL_BYTES, read_text

logger = logging.getLogger("hf_zero")  # that of ``observe``, which imports torch: commands write files without it

WRITER_FILE = "writer.json"  # in a folder that is being made: who makes it
_SILENT_SECONDS = 86400.0
_COPIED_BYTES = 4 << 20
_NAME_BYTES = 120  # of a name inside a hidden one
_FOR_LIBRARY = "library"  # the name of a folder that a library writes into
_HIDDEN = re.compile(r"\.(.+)\.([0-9a-f]{8}-\d+-[0-9a-z]+)\.[0-9a-f]{8}\.part")


# -- names and signs --------------------------------------------------------------------------------------------------


def hidden_name(name: str) -> str:
    """A new hidden name for what will be ``name``; it tells ``sweep`` who makes it."""
    short = name.encode()[:_NAME_BYTES].decode(errors="ignore")  # the whole of it may leave no room
    return f".{short}.{Process.own().code}.{os.urandom(4).hex()}.part"


def is_hidden_name(name: str) -> bool:
    """Return whether ``hidden_name`` gave it."""
    return _HIDDEN.fullmatch(name) is not None


def make_folder(path: Path, more: Mapping[str, Any]) -> None:
    """Makes a folder that says who makes it, from its first moment on.

    Args:
        path: Its name.
        more: Further entries for ``writer.json``.

    Raises:
        OSError: It cannot be made; where ``path`` is a folder with something in it, that stays.
    """
    name = hidden_name(path.name)
    with Folder(path.parent) as above:
        above.make_folder(name)
        try:
            with above.below(name) as made:
                _write_new(made, WRITER_FILE, json.dumps({**Process.own().as_json(), **more}).encode())
            above.move(name, path.name)
        except OSError:
            remove_folder(path.with_name(name), WRITER_FILE.__eq__)
            raise


def read_writer(folder: Path | Folder) -> dict[str, Any] | None:
    """What a folder says of its writer: empty when that cannot be read, None when it says nothing or is a link."""
    with ExitStack() as stack:
        try:
            opened = folder if isinstance(folder, Folder) else stack.enter_context(Folder(folder, ours=True))
            found = json.loads(read_text(WRITER_FILE, SMALL_BYTES, within=opened.descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return None if error.errno in (errno.ELOOP, errno.EMLINK) else {}
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


def is_abandoned(path: Path, opened: Folder | None = None) -> bool:
    """Return whether nobody makes a file or folder any more: who does is dead, or on another machine and silent for a day.

    Not where neither its name nor ``writer.json`` in it says who that is.

    Args:
        path: Its name.
        opened: The folder, where it is open; whatever has its name by now is not looked at then.
    """
    signed, writer = _maker(path, opened)
    if not signed:
        return False
    alive = writer.is_alive() if writer is not None else None
    if alive is not None:
        return not alive
    found = os.fstat(opened.descriptor) if opened is not None else path.lstat()
    changes = [found.st_mtime]
    if stat.S_ISDIR(found.st_mode):
        changes += [inner.st_mtime for inner in present_files(opened if opened is not None else path).values()]
    return time.time() - max(changes) > _SILENT_SECONDS


def _maker(path: Path, opened: Folder | None = None) -> tuple[bool, Process | None]:
    """Return whether something says who makes a file or folder, and who that is where it can be read."""
    found = _HIDDEN.fullmatch(path.name)
    if found is not None:  # first: such a folder may hold half of a ``writer.json``
        return True, Process.of_code(found[2])
    writer = read_writer(opened if opened is not None else path)
    return writer is not None, Process.of_json(writer)


def present_files(folder: Path | Folder) -> dict[str, os.stat_result]:
    """What is in a folder that others write into: a file that gets another name meanwhile is left out."""
    found = {}
    with ExitStack() as stack:
        opened = folder if isinstance(folder, Folder) else stack.enter_context(Folder(folder))
        for name in opened.names():
            with suppress(FileNotFoundError):
                found[name] = opened.status(name)
    return found


# -- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, folder: Folder | None = None) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` when the ``with`` ends; ``path`` never holds half of it. See [Note: what is written].

    Args:
        path: Where to; a file that is there hands on who may read it, a link is replaced and not followed.
        folder: The folder of ``path``, where it is open.

    Raises:
        OSError: The file system refuses, or ``path`` is a folder, a device or a pipe; nothing is left. Names ``path``.
    """
    with ExitStack() as stack:
        place = folder if folder is not None else stack.enter_context(Folder(path.parent))
        mode = _mode_of(place, path.name)
        hidden = hidden_name(path.name)
        descriptor = place.create(hidden)
        try:
            with os.fdopen(descriptor, "wb") as file:
                if mode is not None:
                    with suppress(PermissionError):  # a file system without modes
                        os.fchmod(descriptor, mode)
                yield file
                file.flush()
                os.fsync(descriptor)
            place.move(hidden, path.name)
        except BaseException:
            with suppress(OSError):
                place.remove(hidden)
            raise
        place.sync()


def _mode_of(folder: Folder, name: str) -> int | None:
    """Who may do what with the file that is to be replaced; None where there is none.

    Raises:
        OSError: It is no file: a device that is replaced is gone for everybody.
    """
    if folder.path.resolve().parts[:2] in (("/", "dev"), ("/", "proc")) and "shm" not in folder.path.resolve().parts[2:3]:
        raise OSError(errno.EPERM, "it is a device, which cannot be replaced by a file", str(folder.path / name))
    try:
        found = folder.status(name)
    except FileNotFoundError:
        return None
    if not folder.has(name):
        raise other_spelling(folder.path / name)
    if stat.S_ISLNK(found.st_mode):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EEXIST, "it is no file, so no file can take its place; move it away", str(folder.path / name))
    return stat.S_IMODE(found.st_mode) & 0o777 if found.st_uid == os.geteuid() else None


def write_bytes(path: Path, data: bytes, folder: Folder | None = None) -> None:
    """Writes a small file, as ``replacing``."""
    with replacing(path, folder) as file:
        file.write(data)


def write_text(path: Path, text: str, folder: Folder | None = None) -> None:
    """Writes a small UTF-8 file, as ``replacing``."""
    write_bytes(path, text.encode("utf-8"), folder)


def write_new_text(path: Path, text: str) -> None:
    """Writes a small UTF-8 file where there is none, neither a link.

    Raises:
        FileExistsError: Something has that name.
        OSError: The file system refuses.
    """
    with Folder(path.parent) as folder:
        _write_new(folder, path.name, text.encode("utf-8"))


def _write_new(folder: Folder, name: str, data: bytes) -> None:
    descriptor = folder.create(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            folder.remove(name)
        raise


@contextmanager
def for_library(folder: Path, last: str | None = None) -> Iterator[Path]:
    """An empty folder for a library that writes by names; when the ``with`` ends, its files take their places in ``folder``.

    Nobody else can put anything into it, so the library meets no link there.

    Args:
        folder: Where the files go.
        last: The file that gets its place after all others.

    Raises:
        OSError: The file system refuses; names the file.
    """
    with Folder(folder) as place:
        _sweep_libraries(place)
        name = hidden_name(_FOR_LIBRARY)
        place.make_folder(name, 0o700)
        with place.below(name) as inner:
            try:
                yield inner.for_libraries
                for made in sorted(inner.names(), key=lambda made: made == last):
                    _mode_of(place, made)
                    descriptor = inner.reopen(made)
                    os.fsync(descriptor)
                    os.close(descriptor)
                    inner.move(made, made, place)
            finally:
                _empty(inner)
                with suppress(OSError):
                    place.remove_empty(inner)
        place.sync()


def _empty(folder: Folder) -> None:
    for name in folder.names():
        with suppress(OSError):
            folder.remove(name)


def _sweep_libraries(place: Folder) -> None:
    """Removes what killed processes left of ``for_library``."""
    for name in place.names():
        if name.startswith(f".{_FOR_LIBRARY}.") and is_hidden_name(name) and is_abandoned(place.path / name):
            with suppress(OSError), place.below(name) as left:
                if left.is_own(place):
                    _empty(left)
                    place.remove_empty(left)


def append_to(folder: Folder, name: str) -> IO[str]:
    """Open a UTF-8 file to append records to it; make it if it does not exist.

    Raises:
        OSError: It is a link, no regular file, or has a second name elsewhere (a hard link); or the file system refuses.
    """
    return os.fdopen(folder.append(name), "a", newline="", encoding="utf-8")


def copy_file(source: Path, target: Path) -> None:
    """Copies a regular file; holes stay holes, so that a file takes no more room than it did.

    Raises:
        OSError: ``source`` is no regular file, or the file system refuses.
    """
    with text_file.opened(source) as descriptor, replacing(target) as file:
        end, position = os.fstat(descriptor).st_size, 0
        file.truncate(end)
        while position < end:
            try:
                position = os.lseek(descriptor, position, os.SEEK_DATA) if hasattr(os, "SEEK_DATA") else position
            except OSError as error:
                if error.errno == errno.ENXIO:  # there is but a hole up to the end
                    break
                raise
            data = os.pread(descriptor, min(_COPIED_BYTES, end - position), position)
            if not data:
                break
            file.seek(position)
            file.write(data)
            position += len(data)


def scratch_folder(prefix: str) -> Path:
    """A new folder among the system's temporary ones, for this user alone."""
    return Path(tempfile.mkdtemp(prefix=prefix))


def make_folders(path: Path) -> None:
    """Makes a folder that the user names, and those above it, where they are not there.

    Raises:
        OSError: The file system refuses.
    """
    path.mkdir(parents=True, exist_ok=True)


def make_inner(base: Path, relative: str) -> Folder:
    """Makes and opens a folder below ``base``, and those between; ``base`` may be a link, none of the others is.

    Args:
        base: Named by the user; made where it is not there.
        relative: The path below it; an absolute one is taken in its place.

    Raises:
        OSError: The file system refuses, or one of the folders is a link or a file.
    """
    names = Path(relative).parts
    if Path(relative).is_absolute():
        base, names = Path(relative), ()
    make_folders(base)
    found = Folder(base)
    for name in names:
        with found:
            with suppress(FileExistsError):
                found.make_folder(name)
            found = found.below(name)
    return found


def move(path: Path, new: Path) -> None:
    """Renames a file or folder; of a link the link itself. A folder takes the place of an empty one alone.

    Raises:
        OSError: The file system refuses.
    """
    with Folder(path.parent) as source:
        if new.parent == path.parent:
            source.move(path.name, new.name)
            return
        with Folder(new.parent) as target:
            source.move(path.name, new.name, target)


def sync_folder(path: Path) -> None:
    """Forces the names inside a folder to the disk."""
    with Folder(path) as folder:
        folder.sync()


# -- deleting ---------------------------------------------------------------------------------------------------------


def remove_file(path: Path, folder: Folder | None = None) -> None:
    """Removes a file that this process has made or has replaced; what cannot be removed, is a folder, or has another spelling, stays."""
    with suppress(OSError), ExitStack() as stack:
        place = folder if folder is not None else stack.enter_context(Folder(path.parent))
        if place.has(path.name):
            place.remove(path.name)


def remove_folder(
    folder: Path, is_ours: Callable[[str], bool], last: str = WRITER_FILE, maker: int | None = None, opened: Folder | None = None
) -> bool:
    """Removes the files of a folder that are ours, and the folder when that was all; not while another process writes it.

    Args:
        folder: Not a link, and this user's.
        is_ours: Tells by the name.
        last: The name of the file by which a removal that was killed is found again.
        maker: Process number of who made it; a child that was forked since removes nothing.
        opened: The folder, where it is open: what has its name by now is left alone when it is another one.

    Returns:
        Whether it is gone.
    """
    if maker is not None and maker != os.getpid():
        return False
    try:
        with Folder(folder.parent) as above, ExitStack() as stack:
            inner = opened if opened is not None else stack.enter_context(above.below(folder.name))
            signed, writer = _maker(folder, inner)
            if signed and writer != Process.own() and not is_abandoned(folder, inner):
                return False
            if not inner.is_own(above):
                _warn("%s stays: it belongs to another user", folder)
                return False
            for name in sorted(inner.names(), key=lambda name: name == last):
                if is_ours(name):
                    with suppress(OSError):
                        inner.remove(name)
            with suppress(OSError):
                above.remove_empty(inner)
                return True
            names = inner.names()
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                _warn("%s stays: it holds %s%s", folder, ", ".join(names[:3]), more)
            return not os.path.lexists(folder)
    except OSError:  # a link, a file, or nothing
        return not os.path.lexists(folder)


def sweep(folder: Path, is_ours: Callable[[str], bool] = WRITER_FILE.__eq__) -> None:
    """Removes what dead processes were making in ``folder`` under hidden names.

    Args:
        folder: Where to look; need not exist.
        is_ours: Names of files inside a folder that was being made.
    """
    if not folder.is_dir():
        return
    with Folder(folder) as opened:
        for name in opened.names():
            with suppress(OSError):  # another process sweeps too
                path = folder / name
                if not is_hidden_name(name) or stat.S_ISLNK(opened.status(name).st_mode) or not is_abandoned(path):
                    continue
                if stat.S_ISDIR(opened.status(name).st_mode):
                    remove_folder(path, is_ours)
                else:
                    opened.remove(name)


def _warn(message: str, *args: object) -> None:
    """Log a warning. The logger's module brings torch, without which a command that only writes a file starts in a tenth of the time."""
    from hf_zero.observe import logger

    logger.warning(message, *args)
