"""Create, write and delete hf_zero's files and folders beside files of other programs: hidden names, marks of their writer, the only way
to write, the only deletions.

[Note: what is written] Files of other programs are never opened for writing. A file is created under a new hidden name and renamed when it
is complete and on the disk. This replaces the entry that had its name; the target of a link, and a file with a second name, do not
change. All of this happens in one open folder ([Note: by descriptor]). A test counts every other call that writes.

[Note: what is deleted] Only this module deletes files (a test counts the calls), and it never deletes files of other programs. A file that
is being written has a hidden name with the process that writes it, or is in a folder with a record of that process (``writer.json``).
That process removes it, or another process does when it finds the writer dead. In a folder of this user, files are removed if their owner
knows the names, but never in deeper folders or behind a link; the folder itself is removed if nothing else was in it. Only a folder that
no other program writes into (``remove_private``) goes away with all that is in it.
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
from hf_zero.system.object_store import require_folder
from hf_zero.system.process import Process
from hf_zero.system.text_file import SMALL_BYTES, read_text

logger = logging.getLogger("hf_zero")  # the logger of ``observe``, which is not imported here because it imports torch

WRITER_FILE = "writer.json"  # in a folder that is being written: its writer
_SILENT_SECONDS = 86400.0
_COPIED_BYTES = 4 << 20
_NAME_BYTES = 120  # maximum length of the name inside a hidden name
_FOR_LIBRARY = "library"  # the name of a folder that a library writes into
_HIDDEN = re.compile(r"\.(.+)\.([0-9a-f]{8}-\d+-[0-9a-z]+)\.[0-9a-f]{8}\.part")


# -- names and marks ---------------------------------------------------------------------------------------------------


def hidden_name(name: str) -> str:
    """Return a new hidden name for a future ``name``; ``sweep`` can read from it which process is the writer."""
    short = name.encode()[:_NAME_BYTES].decode(errors="ignore")  # the complete name may leave no room
    return f".{short}.{Process.own().code}.{os.urandom(4).hex()}.part"


def is_hidden_name(name: str) -> bool:
    """Return whether ``name`` was made by ``hidden_name``."""
    return _HIDDEN.fullmatch(name) is not None


def make_folder(path: Path, more: Mapping[str, Any]) -> None:
    """Create a folder that contains the record of its writer from the first moment on.

    Args:
        path: Path of the folder.
        more: Further entries for ``writer.json``.

    Raises:
        OSError: It cannot be created; an existing folder with entries does not change.
    """
    name = hidden_name(path.name)
    with Folder(path.parent) as above:
        above.make_folder(name)
        try:
            with above.below(name) as made:
                _write_new(made, WRITER_FILE, json.dumps({**Process.own().as_json(), **more}).encode())
            above.move(name, path.name)
        except BaseException:  # an interrupt too
            remove_folder(path.with_name(name), WRITER_FILE.__eq__)
            raise


def read_writer(folder: Path | Folder) -> dict[str, Any] | None:
    """Return a folder's record of its writer: empty if it cannot be read, None if there is no record or it is a link."""
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
    """Return whether the writer of a file or folder is gone: it has ended, or is on another machine and has been silent for a day.

    The result is False if neither its name nor a ``writer.json`` in it names a writer.

    Args:
        path: Path of the file or folder.
        opened: The folder, if it is open; another entry that now has its name is then ignored.
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
    """Return whether a file or folder names its writer, and the writer if it can be read."""
    found = _HIDDEN.fullmatch(path.name)
    if found is not None:  # first: such a folder may contain a half-written ``writer.json``
        return True, Process.of_code(found[2])
    writer = read_writer(opened if opened is not None else path)
    return writer is not None, Process.of_json(writer)


def present_files(folder: Path | Folder) -> dict[str, os.stat_result]:
    """Return the entries of a folder into which other processes write, without files that are renamed meanwhile."""
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
    """Return a context with a new file that replaces ``path`` when the ``with`` ends; ``path`` is always complete. See [Note: what is
    written].

    Args:
        path: Path of the result; it inherits the permissions of an existing file; a link is replaced and not followed.
        folder: The folder of ``path``, if it is open.

    Raises:
        OSError: The file system refuses, or ``path`` is a folder, a device or a pipe; no file is left. The message names ``path``.
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
    """Return the permission bits of the file that will be replaced; None if there is none.

    Raises:
        OSError: It is not a file: a replaced device would be lost for all processes.
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
        raise OSError(errno.EEXIST, "it is not a regular file, so a file cannot replace it; move it away", str(folder.path / name))
    return stat.S_IMODE(found.st_mode) & 0o777 if found.st_uid == os.geteuid() else None


def write_bytes(path: Path, data: bytes, folder: Folder | None = None) -> None:
    """Write a small file; see ``replacing``."""
    with replacing(path, folder) as file:
        file.write(data)


def write_text(path: Path, text: str, folder: Folder | None = None) -> None:
    """Write a small UTF-8 file; see ``replacing``."""
    write_bytes(path, text.encode("utf-8"), folder)


def write_new_text(path: Path, text: str) -> None:
    """Write a small UTF-8 file under a name that must not exist, not even as a link.

    Raises:
        FileExistsError: An entry has this name.
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
    """Return a context with an empty folder for a library that writes by names; at the end of the ``with``, its files move to ``folder``.

    No other user can write into it, so the library finds no link there.

    Args:
        folder: Destination of the files.
        last: The file that is moved after all others.

    Raises:
        OSError: The file system refuses; the message names the file.
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
    """Remove folders of ``for_library`` that killed processes have left."""
    for name in place.names():
        if name.startswith(f".{_FOR_LIBRARY}.") and is_hidden_name(name) and is_abandoned(place.path / name):
            with suppress(OSError), place.below(name) as left:
                if left.is_own(place):
                    _empty(left)
                    place.remove_empty(left)


def append_to(folder: Folder, name: str) -> IO[str]:
    """Return a UTF-8 file, open for appending; it is created if it does not exist.

    Raises:
        OSError: It is a link, not a regular file, or has a second name elsewhere (a hard link); or the file system refuses.
    """
    return os.fdopen(folder.append(name), "a", newline="", encoding="utf-8")


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file and keep its holes, so that the copy takes no more disk space.

    Raises:
        OSError: ``source`` is not a regular file, or the file system refuses.
    """
    with text_file.opened(source) as descriptor, replacing(target) as file:
        end, position = os.fstat(descriptor).st_size, 0
        file.truncate(end)
        while position < end:
            try:
                position = os.lseek(descriptor, position, os.SEEK_DATA) if hasattr(os, "SEEK_DATA") else position
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left up to the end
                    break
                raise
            data = os.pread(descriptor, min(_COPIED_BYTES, end - position), position)
            if not data:
                break
            file.seek(position)
            file.write(data)
            position += len(data)


def scratch_folder(prefix: str) -> Path:
    """Return a new folder in the system's temporary folder, for this user alone."""
    return Path(tempfile.mkdtemp(prefix=prefix))


def make_folders(path: Path) -> bool:
    """Create a folder that the user names, and its parents, if they do not exist; return whether this call has created it.

    Raises:
        CheckpointError: The path was the URL of an object store.
        OSError: The file system refuses.
    """
    require_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        path.mkdir(exist_ok=True)  # raises if it is a file
        return False
    return True


def make_inner(base: Path, relative: str) -> Folder:
    """Create and open a folder below ``base``, and the folders between; ``base`` may be a link, the others may not.

    Args:
        base: Folder named by the user; created if it does not exist.
        relative: The path below it; an absolute one replaces ``base``.

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
    """Rename a file or folder; a link is renamed itself. A folder can only replace an empty one.

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
    """Force the names inside a folder to the disk."""
    with Folder(path) as folder:
        folder.sync()


# -- deleting ---------------------------------------------------------------------------------------------------------


def remove_file(path: Path, folder: Folder | None = None) -> None:
    """Remove a file that this process has created or replaced; leave a folder, a name of another spelling, and a file that cannot be
    removed.
    """
    with suppress(OSError), ExitStack() as stack:
        place = folder if folder is not None else stack.enter_context(Folder(path.parent))
        if place.has(path.name):
            place.remove(path.name)


def remove_folder(
    folder: Path, is_ours: Callable[[str], bool], last: str = WRITER_FILE, maker: int | None = None, opened: Folder | None = None
) -> bool:
    """Remove hf_zero's files in a folder, and the folder if it is then empty; do nothing while another process writes it.

    Args:
        folder: A folder of this user, not a link.
        is_ours: Function that returns whether a file of this name belongs to hf_zero.
        last: Name of the file to remove last, so that an interrupted removal can be continued.
        maker: Number of the process that created the folder; a child forked since then removes nothing.
        opened: The folder, if it is open; another folder that now has its name is not touched.

    Returns:
        True if the folder was removed.
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
                _warn("%s is not deleted: it belongs to another user", folder)
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


def remove_private(path: Path) -> None:
    """Remove a folder that only hf_zero writes into, with everything in it; leave a link, a folder of another user, and what the file
    system refuses to remove.
    """
    with suppress(OSError), Folder(path.parent) as above, above.below(path.name) as inner:
        if inner.is_own(above):
            _remove_below(inner)
            above.remove_empty(inner)


def _remove_below(folder: Folder) -> None:
    for name in folder.names():
        with suppress(OSError):
            if stat.S_ISDIR(folder.status(name).st_mode):
                with folder.below(name) as deeper:
                    _remove_below(deeper)
                    folder.remove_empty(deeper)
            else:
                folder.remove(name)


def sweep(folder: Path, is_ours: Callable[[str], bool] = WRITER_FILE.__eq__) -> None:
    """Remove hidden files and folders in ``folder`` whose writers have died.

    Args:
        folder: Folder to search; need not exist.
        is_ours: Function that returns whether a file of this name, in a folder that was being written, belongs to hf_zero.
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
    """Log a warning; import the logger's module only here, because it imports torch, which takes ten times as long as a small command."""
    from hf_zero.observe import logger

    logger.warning(message, *args)
