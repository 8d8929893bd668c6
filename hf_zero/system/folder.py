"""Create, rename and delete files in an open folder through its descriptor, even if its path changes meanwhile.

[Note: by descriptor] Each call that gets a path looks it up anew. Between a check and the next call, another process may replace the
checked folder by a link, or by another folder. A descriptor stays with the folder that was opened, and names in it are used literally:
neither a link nor a folder can replace a file. If ``/proc/self/fd`` exists, libraries that accept only paths get the descriptor's name
there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOT_THROUGH_LINKS = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # opening a pipe does not wait for its other end


class Folder:
    """An open folder, as a context manager that closes it.

    Attributes:
        path: Path of the folder when it was opened, for messages.
        descriptor: Descriptor of the open folder.

    Args:
        path: Path of the folder.
        ours: hf_zero created the folder, so it cannot be a link. A link that a user names as a folder is followed.
        above: The open parent folder through which it is opened; ``path`` is still the whole path.

    Raises:
        OSError: The folder cannot be opened, or is not a folder; the message names ``path``.
    """

    descriptor: int

    def __init__(self, path: Path, ours: bool = False, above: Folder | None = None) -> None:
        self.path = path
        where = path.name if above is not None else os.fspath(path)
        hidden = path.name.startswith(".") and path.name.endswith((".part", ".former"))  # only this package gives such names
        flags = _DIRECTORY | (_NOT_THROUGH_LINKS if ours or hidden or above is not None else 0)
        with errors_name(path):
            self.descriptor = os.open(where, flags, dir_fd=above.descriptor if above is not None else None)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_outcome: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def below(self, name: str) -> Folder:
        """Open the folder ``name`` in this one; a link is refused."""
        return Folder(self.path / name, above=self)

    @property
    def for_libraries(self) -> Path:
        """Return a path that stays valid for this folder while it is open, for code that accepts only paths."""
        stable = Path(f"/proc/self/fd/{self.descriptor}")
        return stable if stable.exists() else self.path

    # -- queries ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the folder's entries, sorted."""
        with errors_name(self.path):
            return sorted(os.listdir(self.descriptor))

    def status(self, name: str) -> os.stat_result:
        """Return the status of ``name`` itself; a link is not followed."""
        with errors_name(self.path / name):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Return whether an entry has exactly this name; file systems that ignore case find other spellings too, this function does not."""
        try:
            self.status(name)
            return name in self.names()
        except OSError:
            return False

    def is_own(self, beside: Folder) -> bool:
        """Return whether this user created the folder.

        Args:
            beside: The parent folder. Network drives may give files owners of their own; there a temporary file in ``beside`` shows the
                owner that this user's files get.
        """
        owner = os.fstat(self.descriptor).st_uid
        return owner == os.geteuid() or owner == beside.owner_of_new_files()

    def owner_of_new_files(self) -> int:
        """Return the user id of new files of this process in this folder; -1 if none can be created."""
        name = f".owner.{os.getpid()}.{os.urandom(4).hex()}.part"
        try:
            descriptor = self.create(name, 0o600)
        except OSError:
            return -1
        try:
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
            self.remove(name)

    # -- creation -----------------------------------------------------------------------------------------------------

    def create(self, name: str, mode: int = 0o666, reads: bool = False) -> int:
        """Create the file ``name``, which must not exist, not even as a link; return its descriptor, open for writing.

        Args:
            name: Name of the new file.
            mode: Permission bits, reduced by the process' umask.
            reads: Open it for reading as well.

        Raises:
            FileExistsError: An entry has this name.
            OSError: The file system refuses.
        """
        flags = (os.O_RDWR if reads else os.O_WRONLY) | os.O_CREAT | os.O_EXCL | _NOT_THROUGH_LINKS
        with errors_name(self.path / name):
            return os.open(name, flags, mode, dir_fd=self.descriptor)

    def reopen(self, name: str, flags: int = os.O_RDWR) -> int:
        """Open an existing regular file that has only one name; return its descriptor.

        Raises:
            OSError: It is a link, a pipe, a device, a folder, or has a second name elsewhere (a hard link); or the file system refuses.
        """
        with errors_name(self.path / name):
            descriptor = os.open(name, flags | _NOT_THROUGH_LINKS | _AT_ONCE, 0o666, dir_fd=self.descriptor)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                os.close(descriptor)
                why = "it has a second name elsewhere (a hard link)" if stat.S_ISREG(found.st_mode) else "it is no regular file"
                raise OSError(errno.EPERM, f"{why}, so nothing is written to it; move it away")
            return descriptor

    def append(self, name: str) -> int:
        """Open the file ``name`` for appending, and create it if it does not exist; see ``reopen``."""
        descriptor = self.reopen(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if not self.has(name):
            os.close(descriptor)
            raise other_spelling(self.path / name)
        return descriptor

    def make_folder(self, name: str, mode: int = 0o777) -> None:
        """Create the folder ``name``."""
        with errors_name(self.path / name):
            os.mkdir(name, mode, dir_fd=self.descriptor)

    def move(self, name: str, new: str, target: Folder | None = None) -> None:
        """Rename ``name``; it replaces a file or link of the new name, but not a folder with entries.

        Args:
            name: The entry to rename; a link is renamed itself.
            new: Its new name.
            target: The folder that it moves to; None is this one.
        """
        where = target if target is not None else self
        with errors_name(where.path / new):
            os.rename(name, new, src_dir_fd=self.descriptor, dst_dir_fd=where.descriptor)

    def sync(self) -> None:
        """Force the names in the folder to the disk."""
        with errors_name(self.path):
            os.fsync(self.descriptor)

    # -- deleting -----------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Remove a file or link; a link is not followed.

        Raises:
            OSError: It is a folder, does not exist, or the file system refuses.
        """
        with errors_name(self.path / name):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_empty(self, inner: Folder) -> None:
        """Remove the empty folder ``inner``, which is in this one, unless another folder has taken its name.

        Raises:
            OSError: It is not empty, or has lost its name.
        """
        name, held = inner.path.name, os.fstat(inner.descriptor)
        found = self.status(name)
        with errors_name(inner.path):
            if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
                raise OSError(errno.ESTALE, "something else has its name by now")
            os.rmdir(name, dir_fd=self.descriptor)


def other_spelling(path: Path) -> OSError:
    """Return the error about a name that exists with other capitals, on a disk that ignores case."""
    return OSError(errno.EEXIST, "it exists under a name with other capitals, and this disk ignores capitals; move it away", str(path))


@contextmanager
def errors_name(path: object) -> Iterator[None]:
    """Complete an ``OSError`` of the system with the full ``path``, if it names no file, or a name without its folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename == str(path):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
