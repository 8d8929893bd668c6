"""Files and folders that this package makes beside those of others: hidden names, signs, small files, and the only deletions.

[Note: what is deleted] Nothing outside this module deletes (a test counts the calls), and nothing here deletes what is not ours. What is
being made has a hidden name that says which process makes it, or lies in a folder that says so (``writer.json``). It goes
when that process removes it, or when another one finds it dead. A folder loses the files whose names its owner knows, never what lies
deeper or behind a link, and is removed when nothing else was in it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_zero.observe import logger
from hf_zero.system.process import Process

WRITER_FILE = "writer.json"  # in a folder that is being made: who makes it
_SILENT_SECONDS = 86400.0
_HIDDEN = re.compile(r"\.(.+)\.([0-9a-f]{8}-\d+-[0-9a-z]+)\.[0-9a-f]{8}\.part")


# -- names and signs --------------------------------------------------------------------------------------------------


def hidden_name(name: str) -> str:
    """A new hidden name for what will be ``name``; it tells ``sweep`` who makes it."""
    return f".{name}.{Process.own().code}.{os.urandom(4).hex()}.part"


def is_hidden_name(name: str) -> bool:
    """Whether ``hidden_name`` gave it."""
    return _HIDDEN.fullmatch(name) is not None


def make_folder(path: Path, more: Mapping[str, Any]) -> None:
    """Makes a folder that says who makes it, from its first moment on.

    Args:
        path: Its name.
        more: Further entries for ``writer.json``.

    Raises:
        OSError: It cannot be made; where ``path`` is a folder with something in it, that stays.
    """
    made = path.with_name(hidden_name(path.name))
    made.mkdir()
    try:
        (made / WRITER_FILE).write_text(json.dumps({**Process.own().as_json(), **more}), encoding="utf-8")
        os.rename(made, path)
    except OSError:
        remove_folder(made, WRITER_FILE.__eq__)
        raise


def read_writer(folder: Path) -> dict[str, Any] | None:
    """What a folder says of its writer: empty when that cannot be read, None when it says nothing."""
    try:
        found = json.loads((folder / WRITER_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_abandoned(path: Path) -> bool:
    """Whether nobody makes a file or folder any more: who does is dead, or on another machine and silent for a day.

    Not where neither its name nor ``writer.json`` in it says who that is.
    """
    signed, writer = _maker(path)
    if not signed:
        return False
    alive = writer.is_alive() if writer is not None else None
    if alive is not None:
        return not alive
    changes = [path.lstat().st_mtime]
    if path.is_dir():
        changes += [found.st_mtime for found in present_files(path).values()]
    return time.time() - max(changes) > _SILENT_SECONDS


def _maker(path: Path) -> tuple[bool, Process | None]:
    """Whether something says who makes a file or folder, and who that is where it can be read."""
    found = _HIDDEN.fullmatch(path.name)
    if found is not None:  # first: such a folder may hold half of a ``writer.json``
        return True, Process.of_code(found[2])
    writer = read_writer(path)
    return writer is not None, Process.of_json(writer)


def present_files(folder: Path) -> dict[str, os.stat_result]:
    """What is in a folder that others write into: a file that gets another name meanwhile is left out."""
    found = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            found[path.name] = path.stat()
    return found


# -- small files ------------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that its name holds either the old or the new content, never half of it; a link is replaced, not followed.

    Raises:
        OSError: The file system refuses; nothing is left.
    """
    hidden = path.with_name(hidden_name(path.name))
    try:
        with open(hidden, "x", encoding="utf-8") as file:  # never what is there, nor where a link leads
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
    except BaseException:
        remove_file(hidden)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Forces the names inside a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- deleting ---------------------------------------------------------------------------------------------------------


def remove_file(path: Path) -> None:
    """Removes a file that this process has made or has replaced; what cannot be removed, or is a folder, stays."""
    with suppress(OSError):
        path.unlink()


def remove_folder(folder: Path, is_ours: Callable[[str], bool], last: str = WRITER_FILE, maker: int | None = None) -> bool:
    """Removes the files of a folder that are ours, and the folder when that was all; not while another process writes it.

    Args:
        folder: Not a link.
        is_ours: Tells by the name.
        last: The name of the file by which a removal that was killed is found again.
        maker: Process number of who made it; a child that was forked since removes nothing.

    Returns:
        Whether it is gone.
    """
    if maker is not None and maker != os.getpid():
        return False
    if folder.is_symlink() or not folder.is_dir():
        return not os.path.lexists(folder)
    signed, writer = _maker(folder)
    if signed and writer != Process.own() and not is_abandoned(folder):
        return False
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
            if is_ours(path.name):
                remove_file(path)
        folder.rmdir()
    if folder.is_dir():
        logger.warning("%s stays: it holds %s", folder, _some_names(folder))
        return False
    return True


def _some_names(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return str(error)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sweep(folder: Path, is_ours: Callable[[str], bool] = WRITER_FILE.__eq__) -> None:
    """Removes what dead processes were making in ``folder`` under hidden names.

    Args:
        folder: Where to look; need not exist.
        is_ours: Names of files inside a folder that was being made.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another process sweeps too
            if not is_hidden_name(path.name) or path.is_symlink() or not is_abandoned(path):
                continue
            if path.is_dir():
                remove_folder(path, is_ours)
            else:
                remove_file(path)
