"""An open folder: files in it are made, renamed and deleted through its descriptor, whatever happens to its name meanwhile.

[Note: by descriptor] A path is looked up anew by each call that is given one. Between a look and what follows, another process may put a
link, or another folder, in the place of the folder that was looked at. A descriptor stays with the folder that was opened, and names in
it are taken as they are: neither a link nor a folder stands in for a file. Where ``/proc/self/fd`` is there, libraries that take paths only
are given the descriptor's name there.
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
    """An open folder; a context manager that closes it.

    Attributes:
        path: Its name when it was opened, for messages.
        descriptor: Of the open folder.

    Args:
        path: Its name.
        ours: It was made by this package, so it is no link. A link that a user names as a folder is followed.
        above: The open folder that it is opened in; ``path`` is the whole path all the same.

    Raises:
        OSError: It cannot be opened, or is no folder; names ``path``.
    """

    descriptor: int

    def __init__(self, path: Path, ours: bool = False, above: Folder | None = None) -> None:
        self.path = path
        where = path.name if above is not None else os.fspath(path)
        hidden = path.name.startswith(".") and path.name.endswith((".part", ".former"))  # nobody else gives such names
        flags = _DIRECTORY | (_NOT_THROUGH_LINKS if ours or hidden or above is not None else 0)
        with told_of(path):
            self.descriptor = os.open(where, flags, dir_fd=above.descriptor if above is not None else None)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_outcome: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes it; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def below(self, name: str) -> Folder:
        """Opens the folder ``name`` in this one; a link is refused."""
        return Folder(self.path / name, above=self)

    @property
    def for_libraries(self) -> Path:
        """A path that leads to this folder as long as it is open, for code that takes paths only."""
        stable = Path(f"/proc/self/fd/{self.descriptor}")
        return stable if stable.exists() else self.path

    # -- looking ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names in it, sorted."""
        with told_of(self.path):
            return sorted(os.listdir(self.descriptor))

    def status(self, name: str) -> os.stat_result:
        """What ``name`` is, itself and not where it leads."""
        with told_of(self.path / name):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Whether something has exactly that name; a file system that knows no capitals answers for other spellings too, this does not."""
        try:
            self.status(name)
            return name in self.names()
        except OSError:
            return False

    def is_own(self, beside: Folder) -> bool:
        """Return whether this user made it.

        Args:
            beside: The folder that it lies in. Network drives give their files owners of their own; there a file that is made for a moment
                in ``beside`` tells the owner that this user's files get.
        """
        owner = os.fstat(self.descriptor).st_uid
        return owner == os.geteuid() or owner == beside.owner_of_new_files()

    def owner_of_new_files(self) -> int:
        """Return the number of the user that files of this process get here; -1 where none can be made."""
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

    # -- making -------------------------------------------------------------------------------------------------------

    def create(self, name: str, mode: int = 0o666, reads: bool = False) -> int:
        """Makes the file ``name``, which is not there, neither as a link; returns its descriptor, open for writing.

        Args:
            name: Of the new file.
            mode: Who may do what with it, less the process' mask.
            reads: Open it for reading as well.

        Raises:
            FileExistsError: Something has that name.
            OSError: The file system refuses.
        """
        flags = (os.O_RDWR if reads else os.O_WRONLY) | os.O_CREAT | os.O_EXCL | _NOT_THROUGH_LINKS
        with told_of(self.path / name):
            return os.open(name, flags, mode, dir_fd=self.descriptor)

    def reopen(self, name: str, flags: int = os.O_RDWR) -> int:
        """Opens a file that is there, and is a regular one without another name; returns its descriptor.

        Raises:
            OSError: It is a link, a pipe, a device, a folder, or has a second name elsewhere (a hard link); or the file system refuses.
        """
        with told_of(self.path / name):
            descriptor = os.open(name, flags | _NOT_THROUGH_LINKS | _AT_ONCE, 0o666, dir_fd=self.descriptor)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                os.close(descriptor)
                why = "it has a second name elsewhere (a hard link)" if stat.S_ISREG(found.st_mode) else "it is no regular file"
                raise OSError(errno.EPERM, f"{why}, so nothing is written to it; move it away")
            return descriptor

    def append(self, name: str) -> int:
        """Opens the file ``name`` for appending, made where it is not there; as ``reopen``."""
        descriptor = self.reopen(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if not self.has(name):
            os.close(descriptor)
            raise other_spelling(self.path / name)
        return descriptor

    def make_folder(self, name: str, mode: int = 0o777) -> None:
        """Makes the folder ``name``."""
        with told_of(self.path / name):
            os.mkdir(name, mode, dir_fd=self.descriptor)

    def move(self, name: str, new: str, target: Folder | None = None) -> None:
        """Renames ``name``; a file or link that has the new name goes, a folder with something in it does not.

        Args:
            name: What is renamed; of a link the link itself.
            new: Its new name.
            target: The folder that it moves to; None is this one.
        """
        where = target if target is not None else self
        with told_of(where.path / new):
            os.rename(name, new, src_dir_fd=self.descriptor, dst_dir_fd=where.descriptor)

    def sync(self) -> None:
        """Forces the names in it to the disk."""
        with told_of(self.path):
            os.fsync(self.descriptor)

    # -- deleting -----------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Removes a file or link; of a link not where it leads.

        Raises:
            OSError: It is a folder, is not there, or the file system refuses.
        """
        with told_of(self.path / name):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_empty(self, inner: Folder) -> None:
        """Removes the empty folder ``inner``, which lies in this one, unless another folder has its name by now.

        Raises:
            OSError: It holds something, or has lost its name.
        """
        name, held = inner.path.name, os.fstat(inner.descriptor)
        found = self.status(name)
        with told_of(inner.path):
            if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
                raise OSError(errno.ESTALE, "something else has its name by now")
            os.rmdir(name, dir_fd=self.descriptor)


def other_spelling(path: Path) -> OSError:
    """Return the error about a name that is there with other capitals, on a disk that does not tell them apart."""
    return OSError(
        errno.EEXIST, "it is there under a name with other capitals, which this disk does not tell apart; move it away", str(path)
    )


@contextmanager
def told_of(path: object) -> Iterator[None]:
    """Gives an ``OSError`` of the system the whole ``path``, where it names no file, or a name without its folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename == str(path):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
