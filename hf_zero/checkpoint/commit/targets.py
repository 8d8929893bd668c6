"""Targets of one save: a folder of a file system, or a place in an object store."""

from __future__ import annotations

from pathlib import Path

from hf_zero.checkpoint.commit import staging
from hf_zero.checkpoint.commit.folders import staging_folder
from hf_zero.checkpoint.commit.store_saves import StoreSave
from hf_zero.checkpoint.files.disk import Disk
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import LATEST_FILE
from hf_zero.observe import note
from hf_zero.system import own_files
from hf_zero.system.object_store import ObjectPath, Place
from hf_zero.system.text_file import read_text


class FolderSave:
    """One save into a folder of a file system; see ``staging``. It has the methods of ``StoreSave``.

    Args:
        save_dir: Folder of all checkpoints.
        tag: Name of this checkpoint.
        number: Number of the save.

    Attributes:
        folder: The hidden folder.
        poll_seconds: Time between two looks at the notes of other ranks.
    """

    poll_seconds = 0.05

    def __init__(self, save_dir: Path, tag: str, number: str) -> None:
        self.save_dir = save_dir
        self.tag = tag
        self.number = number
        self.folder = staging_folder(save_dir, tag, number)

    def begin(self) -> None:
        """Make the hidden folder; on rank 0."""
        staging.begin(self.save_dir, self.tag, self.number)

    def files(self, direct: bool, former: str = "") -> Disk:
        """Return the writer of this rank's files.

        Args:
            direct: Bypass the page cache if the file system can.
            former: Tag of a checkpoint whose files are overwritten, see ``Disk``.
        """
        return Disk(direct, self.save_dir / former if former else None)

    def commit(self, index: Index, latest: bool) -> Path:
        """Write index, marker, name, and last of all ``latest``; on rank 0."""
        note("checkpoint_written", self.tag)
        staging.finalize(self.folder, index.to_json())
        note("checkpoint_sealed", self.tag)
        final = staging.publish(self.folder, self.save_dir, self.tag)
        staging.write_script(self.save_dir)
        if latest:
            note("checkpoint_latest", self.tag)
            own_files.write_text(self.save_dir / LATEST_FILE, self.tag)
        note("checkpoint_done", self.tag)
        return final

    def abandon(self) -> None:
        """Remove the hidden folder after a failure; every rank may call it."""
        staging.abandon(self.folder)

    def leave_note(self, name: str, text: str) -> None:
        """Leave a note for rank 0."""
        own_files.write_text(self.folder / name, text)

    def listed(self) -> dict[str, int]:
        """Return the names and sizes of the files so far."""
        return {name: found.st_size for name, found in own_files.present_files(self.folder).items()}

    def take_note(self, name: str, limit_bytes: int) -> str:
        """Return the text of a note, and remove it."""
        text = read_text(self.folder / name, limit_bytes)
        own_files.remove_file(self.folder / name)
        return text


Target = FolderSave | StoreSave


def target_of(save_dir: Place, tag: str, number: str | None = None) -> Target:
    """Return the target of save ``number``, a new one when None, of checkpoint ``tag`` in ``save_dir``."""
    number = number or staging.save_number()
    return StoreSave(save_dir, tag, number) if isinstance(save_dir, ObjectPath) else FolderSave(save_dir, tag, number)
