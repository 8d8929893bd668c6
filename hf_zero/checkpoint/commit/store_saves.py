"""Save into an object store, which cannot rename: write the parts, then the index, and last one small object that makes them visible.

[Note: a save into a store] Objects of a save lie in ``<tag>/<number>`` ([Note: a sub-folder for each save]), so no save overwrites what
another one wrote. Rank 0 leaves a record, ``.saves/<number>.json``, before the first part is sent, and removes it when the checkpoint
is complete and the one that it replaces is gone. In the background no rank waits for another one: each of the others leaves a record of
its own, ``.saves/<number>-<rank>.json``, before its first part. The next save looks at the records alone: those of dead processes, and of
unknown ones after a day, name everything that has to be deleted. The marker ``<tag>/complete`` is written only if it is as it was when the
save began: there is none, or the same one. The store itself compares where it can (``If-None-Match``, ``If-Match``). So of two saves of one
tag the first to finish is complete, and the other one fails.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_zero.checkpoint.commit.folders import SCRIPT_FILE, check_tag, digest, files_of, number_in, number_of
from hf_zero.checkpoint.commit.staging import is_ours, script_bytes
from hf_zero.checkpoint.files.uploads import Uploads
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE, LATEST_FILE, MARKER_FILE
from hf_zero.errors import CheckpointError
from hf_zero.observe import logger, note
from hf_zero.system.object_store import ObjectPath
from hf_zero.system.process import Process
from hf_zero.system.text_file import SMALL_BYTES

_RECORDS = ".saves"
_SILENT_SECONDS = 86400.0
_NUMBER = re.compile(r"[0-9a-f]{8}")
_RECORD = re.compile(rf"({_NUMBER.pattern})(-\d+)?\.json")
_FLAT = "."  # in a record: the save replaces a checkpoint whose files lie in the folder of the tag
_open: set[str] = set()  # numbers of saves of this process that are under way


class StoreSave:
    """One save into an object store.

    Args:
        save_dir: Place of all checkpoints.
        tag: Name of this checkpoint.
        number: Number of the save.

    Attributes:
        folder: Place of the objects of this save.
        poll_seconds: Time between two looks at the notes of other ranks.
    """

    poll_seconds = 1.0

    def __init__(self, save_dir: ObjectPath, tag: str, number: str) -> None:
        self.save_dir = save_dir
        self.tag = tag
        self.number = number
        self.folder = save_dir / tag / number
        self._record = save_dir / _RECORDS / f"{number}.json"
        self._of_others: list[str] = []  # names of the records of other ranks
        self._replaces: str | None = None
        self._former = b""  # content of the marker that it replaces

    # -- before a byte is written

    def begin(self) -> None:
        """Delete the remains of killed saves, and record this save; on rank 0.

        Raises:
            CheckpointError: The tag is taken by objects that hf_zero did not write, or a running process saves it.
            OSError: The store refuses.
        """
        check_tag(self.tag)
        _open.add(self.number)
        self._replaces, _ = _at_once(self._present, self._clear)
        self._put_record(self._record, Process.own())

    def begin_on(self, rank: int, writers: list[Process]) -> None:
        """Do the work of ``begin`` on every rank, before the rank sends its first part, without waiting for other ranks.

        Args:
            rank: This rank.
            writers: Process of each rank. A save is that of rank 0's process.

        Raises:
            CheckpointError: As ``begin``, on rank 0.
            OSError: The store refuses.
        """
        names = [f"{self.number}-{other}.json" for other in range(1, len(writers))]
        if rank == 0:
            self._of_others = names
            self.begin()
        else:
            self._put_record(self.save_dir / _RECORDS / names[rank - 1], writers[0])

    def _put_record(self, path: ObjectPath, writer: Process) -> None:
        path.put(json.dumps({**writer.as_json(), "tag": self.tag, "replaces": self._replaces}).encode())

    def _present(self) -> str | None:
        """Return the number of the complete checkpoint of this tag, ``_FLAT`` where it has none, None where there is no checkpoint."""
        final = self.save_dir / self.tag
        try:
            self._former = (final / MARKER_FILE).get(SMALL_BYTES)
        except FileNotFoundError:
            if final.is_file():
                text = "is an object and not a checkpoint that hf_zero wrote; choose another tag, or move it away"
                raise CheckpointError(f"{final} {text}") from None
            return None
        number = number_in(self._former.decode(errors="replace"))
        if not number and files_of(final) is None:
            raise CheckpointError(f"{final / MARKER_FILE} is not a file that hf_zero wrote; choose another tag, or move it away")
        return number or _FLAT

    def _clear(self) -> None:
        """Delete the remains of killed saves from the store."""
        folder = self.save_dir / _RECORDS
        names: dict[str, list[str]] = {}  # of records, by number; rank 0's, the shortest name, comes first
        for name in sorted(folder.listed(), key=len):
            found = _RECORD.fullmatch(name)
            if found and found[1] != self.number:
                names.setdefault(found[1], []).append(name)
        for number, records in names.items():
            self._clear_one(number, folder, records)

    def _clear_one(self, number: str, folder: ObjectPath, records: list[str]) -> None:
        """Delete the remains of the save ``number`` if it was killed, and last its ``records`` in ``folder``."""
        path = folder / records[0]
        record = _read_record(path)
        if record is None:
            return
        writer = Process.of_json(record)
        alive = writer.is_alive() if writer is not None else None
        own = writer == Process.own()
        if alive is False or (own and number not in _open) or (alive is None and _is_silent(path)):
            _finish(self.save_dir, record, number)
            folder.remove(reversed(records))
        elif record["tag"] == self.tag and writer is not None and not own:
            self._refuse_second(writer, alive)

    def _refuse_second(self, writer: Process, alive: bool | None) -> None:
        """Refuse a second save of a tag while another process is known to write it."""
        who = f"process {writer.pid} of {writer.place.partition(' ')[0]}"
        if alive:
            raise CheckpointError(
                f"{who} is still running and is saving checkpoint {self.tag!r} to {self.save_dir}. Two runs must not save the same tag "
                "to the same place: end one of them, or give it another URL"
            )
        logger.warning(
            "%s may be saving %r to %s as well; the save that finishes first is kept, and the other one fails", who, self.tag, self.save_dir
        )

    # -- writing

    def files(self, _direct: bool, _former: str = "") -> Uploads:
        """Return the writer of this rank's files."""
        return Uploads()

    def commit(self, index: Index, latest: bool) -> ObjectPath:
        """Write index and marker, and last of all ``latest``; on rank 0, when all parts are there.

        Raises:
            CheckpointError: A part is missing or has another size, or the save is no longer this process'.
            OSError: The store refuses.
        """
        # Uploads that were begun twice, because the answer to the first request was lost, are ended.
        _at_once(self._require_record, lambda: self._require_parts(index), self.folder.end_uploads)
        text = index.to_json()
        note("checkpoint_written", self.tag)
        (self.folder / INDEX_FILE).put(text.encode())
        (self.folder / MARKER_FILE).put(f"{digest(text)}\n".encode())
        note("checkpoint_sealed", self.tag)
        marker, content = self.save_dir / self.tag / MARKER_FILE, f"{digest(text)} {self.number}\n".encode()
        try:
            if self._replaces is None:
                marker.put_new(content)
            else:
                marker.replace_object(content, self._former)
        except FileExistsError:
            raise CheckpointError(
                f"another save has completed checkpoint {self.tag!r} in {self.save_dir} meanwhile; that one stays. Two runs must not "
                "save the same tag to the same place"
            ) from None
        note("checkpoint_named", self.tag)
        if latest:
            note("checkpoint_latest", self.tag)
            _at_once(lambda: _write_script(self.save_dir), lambda: (self.save_dir / LATEST_FILE).put(self.tag.encode()))
        else:
            _write_script(self.save_dir)
        _delete_files(self.save_dir / self.tag, self._replaces)
        (self.save_dir / _RECORDS).remove([*self._of_others, self._record.name])
        _open.discard(self.number)
        note("checkpoint_done", self.tag)
        return self.folder

    def _require_record(self) -> None:
        record = _read_record(self._record)
        if Process.of_json(record) != Process.own():
            raise CheckpointError(f"{self._record} is no longer this process' record ({record}); the checkpoint is not completed")

    def _require_parts(self, index: Index) -> None:
        """Compare the sizes of all parts with the index before they become visible."""
        listed = self.folder.listed()
        for name, record in index.files.items():
            if listed.get(name) != record.nbytes:
                found = "is missing" if listed.get(name) is None else f"has {listed[name]} bytes"
                raise CheckpointError(f"{self.folder / name} {found} after it was written with {record.nbytes}")

    def abandon(self) -> None:
        """Delete the parts after a failure. The record stays: a rank that still wrote may leave more, which the next save deletes."""
        _open.discard(self.number)
        _delete_files(self.save_dir / self.tag, self.number)

    # -- notes of ranks that write in the background

    def leave_note(self, name: str, text: str) -> None:
        """Leave a note for rank 0."""
        (self.folder / name).put(text.encode())

    def listed(self) -> dict[str, int]:
        """Return the names and sizes of the objects so far."""
        return {name: size for name, size in self.folder.listed().items() if size is not None}

    def take_note(self, name: str, limit_bytes: int) -> str:
        """Return the text of a note, and delete it."""
        text = (self.folder / name).get(limit_bytes).decode()
        (self.folder / name).remove()
        return text


def _at_once(*works: Callable[[], Any]) -> list[Any]:
    """Call functions that query a store at the same time, and return their results: the caller waits for one round trip, not several."""
    with ThreadPoolExecutor(len(works), thread_name_prefix="hf_zero store") as pool:
        return list(pool.map(lambda work: work(), works))


def forget(folder: ObjectPath) -> None:
    """Delete the checkpoint of a tag: first the marker, so that it does not count as complete while it is being deleted.

    Raises:
        OSError: The store refuses.
    """
    number = number_of(folder) or _FLAT
    (folder / MARKER_FILE).remove()
    _delete_files(folder, number)


def _read_record(path: ObjectPath) -> dict[str, Any] | None:
    """Return the record of a save; None if there is none, or it is not one of ours."""
    try:
        record = json.loads(path.get(SMALL_BYTES))
        check_tag(record["tag"])
        replaces = record["replaces"]
        return record if replaces in (None, _FLAT) or _NUMBER.fullmatch(replaces) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, CheckpointError):
        return None


def _is_silent(record: ObjectPath) -> bool:
    """Return whether a save began more than a day ago, by the clock of the store."""
    try:
        begun = record.stat().st_mtime_ns / 1e9
    except FileNotFoundError:
        return False
    return begun > 0 and time.time() - begun > _SILENT_SECONDS


def _finish(save_dir: ObjectPath, record: dict[str, Any], number: str) -> None:
    """Delete the parts of a killed save; if it was already complete, delete the parts of the checkpoint that it replaced."""
    folder = save_dir / record["tag"]
    if number_of(folder) == number:
        _delete_files(folder, record["replaces"])
        return
    logger.warning("%s was left by a save that did not finish; it is deleted", folder / number)
    _delete_files(folder, number)


def _delete_files(folder: ObjectPath, number: str | None) -> None:
    """Delete the files that the save ``number`` of a tag has written, its marker first; keep files with other names. None: do nothing."""
    if number is None:
        return
    place = folder if number == _FLAT else folder / number
    names = [name for name, size in place.listed().items() if size is not None and is_ours(name)]
    if number == _FLAT:  # the marker is that of the present checkpoint
        names = [name for name in names if name != MARKER_FILE]
    place.remove(sorted(names, key=lambda name: name != MARKER_FILE))
    if number != _FLAT:
        place.end_uploads()
        place.remove_empty_folder()


def _write_script(save_dir: ObjectPath) -> None:
    """Put ``zero_to_fp32.py`` beside the checkpoints, unless it is there."""
    script, path = script_bytes(), save_dir / SCRIPT_FILE
    if save_dir.listed().get(SCRIPT_FILE) != len(script):
        path.put(script)
