"""Keep folders in host memory that outlive the ranks of a run: one for each launcher on a machine, and in it one for each training.

[Note: whose folder] A folder's name has the user and the launcher's process (``Process.code``: place, number, start time). The ranks that
this launcher starts again find it, and no other run can: another launcher is another process, also under the same run id. A folder whose
launcher has ended is of no use to anybody, and the next run of the user removes it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from hf_zero.errors import CheckpointError
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.process import Process

HOST_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"hf_zero-(\d+)-([0-9a-f]{8}-\d+-[0-9a-z]+)")


def folder_of(launcher: Process, base: Path = HOST_MEMORY) -> Path:
    """Return the folder of the ranks of ``launcher`` below ``base``; it need not exist."""
    return base / f"hf_zero-{os.geteuid()}-{launcher.code}"


def make(folder: Path, name: str) -> None:
    """Create the folder ``name`` in a folder of ``folder_of``, which is created for this user alone, unless they exist.

    Raises:
        CheckpointError: It belongs to another user, or is a link or a file.
        OSError: The file system refuses.
    """
    own_files.make_folders(folder.parent)
    with Folder(folder.parent) as above, suppress(FileExistsError):
        above.make_folder(folder.name, 0o700)
    if is_own(folder):
        with Folder(folder, ours=True) as inside, suppress(FileExistsError):
            inside.make_folder(name, 0o700)
    else:
        raise CheckpointError(f"{folder} is not a folder of this user; remove it, or name another one in hf_zero.snapshot_folder")


def is_own(folder: Path) -> bool:
    """Return whether the folder exists and this user made it."""
    try:
        with Folder(folder, ours=True) as found:
            return os.fstat(found.descriptor).st_uid == os.geteuid()
    except OSError:
        return False


def sweep(base: Path) -> list[Path]:
    """Remove the folders in ``base`` of this user's launchers that have ended; return them."""
    removed = []
    for path in sorted(base.glob(f"hf_zero-{os.geteuid()}-*")):
        found = _NAME.fullmatch(path.name)
        launcher = Process.of_code(found[2]) if found is not None else None
        if launcher is not None and launcher.is_alive() is False:
            own_files.remove_private(path)
            removed.append(path)
    return removed


def remove(folder: Path, name: str) -> None:
    """Remove the folder ``name``, and ``folder`` around it if that is empty then."""
    own_files.remove_private(folder / name)
    with suppress(OSError), Folder(folder.parent) as above, above.below(folder.name) as inside:
        above.remove_empty(inside)


def remove_own() -> None:
    """Remove the folder of the ranks that this process has started: nobody starts them again when it ends."""
    own_files.remove_private(folder_of(Process.own()))
