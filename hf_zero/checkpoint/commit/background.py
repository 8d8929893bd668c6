"""Saving while training goes on: a copy of the shards in host memory, and a thread that writes it.

[Note: a save in the background] Before ``save_checkpoint`` returns, every rank has refused what cannot be saved and holds a copy. From then
on the ranks talk through files of the hidden folder only: a script may destroy its process groups while the last checkpoint is
being written, and a thread must not issue collectives between those of the training loop. Each rank writes its shards, then
``rank-00001.json`` with their records; rank 0 waits for all of these, and completes the checkpoint. The thread is no daemon: the
interpreter waits for it at the end. A script that ends without having heard how the last save went has an exit status that tells.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_zero.checkpoint.commit import agreement, folders, staging
from hf_zero.checkpoint.commit.store_saves import StoreSave
from hf_zero.checkpoint.commit.targets import Target
from hf_zero.checkpoint.files.rows import Elsewhere, Entry, Piece
from hf_zero.checkpoint.format.records import FileRecord, read_file_record
from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.memory import host_memory
from hf_zero.memory.buffers import HostMemory
from hf_zero.observe import logger
from hf_zero.system import exit_status
from hf_zero.system.process import Process
from hf_zero.system.text_file import LIMIT_BYTES, SMALL_BYTES

_ALIGNMENT_BYTES = 64
_DESCRIBED_BYTES = 32  # bytes of data for each byte of a note


@dataclass(frozen=True)
class Written:
    """Report of a rank about the files it has written.

    Attributes:
        files: Records by file name.
        client_state: Its client state, encoded; None where that is rank 0's.
    """

    files: dict[str, FileRecord]
    client_state: Any = None

    def to_json(self) -> str:
        """Return the record as JSON, for the note to rank 0."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str, where: str) -> Written | None:
        """Return the record from the text of ``to_json``, or None if the text is incomplete; ``where`` names the source in messages."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError:
            return None
        return Written({name: read_file_record(record, f"{where}: {name}") for name, record in data["files"].items()}, data["client_state"])


@dataclass(frozen=True)
class Task:
    """One save in the background.

    Attributes:
        what: For messages.
        target: Where it goes.
        write: Writes this rank's files.
        commit: Completes the checkpoint, on rank 0; gets the facts that every rank sent before, and the files that it has written.
        everywhere: Does all of that on every rank, over a network of its own, where ranks have no folder in common; None otherwise.
    """

    what: str
    target: Target
    write: Callable[[], Written] | None = None
    commit: Callable[[list[dict[str, Any]], list[Written]], str] | None = None
    everywhere: Callable[[], object] | None = None


class Background:
    """Writer of checkpoints, one at a time, in a thread beside the training loop.

    Args:
        rank: This process among those that save together.
        timeout: Seconds without any progress after which rank 0 stops waiting for another rank.
        limit_bytes: Host memory for the copy; tensors that do not fit are written before ``save_checkpoint`` returns. None: no limit.
        promised: A save that is lost at the end of the process changes its exit status.
    """

    def __init__(self, rank: int, timeout: float, limit_bytes: int | None = None, promised: bool = True) -> None:
        self._rank = rank
        self._promised = promised
        self._timeout = timeout
        self._limit = limit_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)  # kept: allocating it anew would double the time of a copy
        self._locked: HostMemory | None = None  # where it is from, once a device has copied to it
        self._running: _Running | None = None

    # -- the copy

    def copy(self, files: Mapping[str, list[Entry]]) -> tuple[dict[str, list[Entry]], dict[str, list[Entry]]]:
        """Copy the arrays of ``files`` to host memory.

        Returns:
            Files that found no room, as they were; and the others, over the copy.
        """
        room = self._limit
        direct, kept = {}, {}
        for name, entries in files.items():
            needed = sum(_room(piece) for entry in entries for piece in entry.pieces)
            if room is not None and needed > room:
                direct[name] = entries
                continue
            room = None if room is None else room - needed
            kept[name] = entries
        pieces = [piece for entries in kept.values() for entry in entries for piece in entry.pieces]
        devices = {piece.device for piece in pieces if isinstance(piece, torch.Tensor) and piece.device.type != "cpu"}
        self._reserve(sum(_room(piece) for piece in pieces), next(iter(devices), None))
        start = 0
        copied: dict[str, list[Entry]] = {}
        for name, entries in kept.items():
            copied[name] = []
            for entry in entries:
                rows: list[Piece] = []
                for piece in entry.pieces:
                    rows.append(self._copy_piece(piece, start))
                    start += _room(piece)
                copied[name].append(Entry(entry.name, entry.dtype, entry.shape, tuple(rows)))
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        return direct, copied

    def _reserve(self, nbytes: int, device: torch.device | None) -> None:
        """Allocate memory for the copy; ``device`` is the device that copies to it."""
        if self._memory.numel() >= nbytes and (device is None or self._locked is not None):
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # before the new one is there
        if device is not None:
            self._locked = self._locked or HostMemory(device)
        if self._locked is not None:
            self._memory = self._locked.empty(nbytes, torch.uint8, pinned=True)
        else:
            self._memory = host_memory.empty(nbytes, torch.uint8, torch.device("cpu"))

    def _copy_piece(self, piece: Piece, start: int) -> Piece:
        if isinstance(piece, int):
            return piece
        row = self._memory[start : start + piece.numel() * piece.dtype.itemsize].view(piece.dtype)
        if isinstance(piece, Elsewhere):
            piece.read(piece.start, row)
        else:
            row.copy_(piece.detach().reshape(-1), non_blocking=True)
        return row

    # -- the thread

    def start(self, task: Task, told: list[dict[str, Any]]) -> None:
        """Begin to write; ``told`` has each rank's description of its share."""
        running = _Running(task.what, task.target)
        if isinstance(task.target, StoreSave):
            _wait_before_pools_end(running)
        running.thread = threading.Thread(target=self._run, args=(running, task, told), name="hf_zero checkpoint", daemon=False)
        running.thread.start()
        if self._promised:
            running.heard = exit_status.promise(running.lost)
        self._running = running

    def _run(self, running: _Running, task: Task, told: list[dict[str, Any]]) -> None:
        try:
            if task.everywhere is not None:
                task.everywhere()
            elif task.write is not None and task.commit is not None:
                written = task.write()
                if self._rank == 0:
                    task.commit(told, [written, *self._others(task, [one["process"] for one in told])])
                else:
                    task.target.leave_note(staging.note_of(self._rank), written.to_json())
            running.done = True
        except Exception as error:  # kept for ``finish``, which tells all ranks
            running.error = error
            logger.error("%s: %s: %s. The previous checkpoint is kept", task.what, type(error).__name__, error)
            if self._rank != 0 and task.everywhere is None:
                _tell(task.target, staging.failure_of(self._rank), error)

    def _others(self, task: Task, processes: list[Process]) -> list[Written]:
        """Return the reports of all other ranks, as soon as all have arrived.

        Raises:
            CheckpointError: A rank failed, died, or makes no progress.
        """
        waiting = set(range(1, len(processes)))
        found: dict[int, Written] = {}
        sizes: dict[str, int] = {}
        last = time.monotonic()
        while waiting:
            dead = [rank for rank in waiting if processes[rank].is_alive() is False]
            present = task.target.listed()
            for rank in sorted(waiting):
                name, failed = staging.note_of(rank), staging.failure_of(rank)
                written = None
                if name in present:  # a store over files lists a file while it is being written
                    limit = LIMIT_BYTES + sum(present.values()) // _DESCRIBED_BYTES
                    written = Written.from_json(task.target.take_note(name, limit), str(task.target.folder / name))
                if written is not None:
                    found[rank] = written
                    waiting.discard(rank)
                elif failed in present:
                    raise _ToldByRank(f"{task.target.take_note(failed, SMALL_BYTES).strip()} (rank {rank})")
                elif rank in dead:  # it was so before its note was looked for
                    raise CheckpointError(f"the process of rank {rank} died while it wrote its shards")
            if present != sizes:
                sizes, last = present, time.monotonic()
            if waiting and time.monotonic() - last > self._timeout:
                raise CheckpointError(f"ranks {sorted(waiting)} have written nothing for {self._timeout:.0f} seconds")
            if waiting:
                time.sleep(task.target.poll_seconds)
        return [found[rank] for rank in sorted(found)]

    # -- the end

    @property
    def limited(self) -> bool:
        """Return whether some files may find no room in the copy."""
        return self._limit is not None

    @property
    def busy(self) -> bool:
        """Return whether the last save is still being written."""
        return self._running is not None and self._running.thread.is_alive()

    def finish(self, net: Collectives) -> None:
        """Wait until the last save is on the disk; collective.

        Raises:
            CheckpointError: It failed; on every rank, with the same text.
        """
        running, self._running = self._running, None
        if running is None:
            return
        running.thread.join()
        running.heard()
        try:
            agreement.on_all(net, running.what, running.raise_error)
        except CheckpointError:
            # Not before: other ranks may have been writing into it.
            agreement.on_first(net, running.what, running.target.abandon)
            raise

    def close(self) -> None:
        """Wait for the last save without asking other ranks, and free the copy; its error is in the log and in the exit status."""
        running, self._running = self._running, None
        if running is not None:
            running.thread.join()
            if running.done:
                running.heard()
        self._memory = torch.empty(0, dtype=torch.uint8)


class _Running:
    """A save whose outcome the training loop has not heard yet.

    Attributes:
        what: For messages.
        target: Where it goes.
        thread: Writes.
        done: It has written all it should.
        error: Why it has not.
        heard: Called when the training loop is told.
    """

    thread: threading.Thread

    def __init__(self, what: str, target: Target) -> None:
        self.what = what
        self.target = target
        self.done = False
        self.error: Exception | None = None
        self.heard: Callable[[], None] = lambda: None

    def raise_error(self) -> None:
        """Raise the error of the save that this rank has found, if there is one."""
        if self.error is not None and not isinstance(self.error, _ToldByRank):
            raise self.error

    def lost(self, wait: bool) -> str:
        """Return the message for the end of the process if the save was lost, see ``exit_status``."""
        if wait:
            self.thread.join()
        if self.done:
            return ""
        try:
            newest = folders.describe_newest(self.target.save_dir)
        except OSError as error:
            newest = f"the newest complete checkpoint cannot be determined: {error}"
        cause = str(self.error) or type(self.error).__name__ if self.error is not None else "the process ends before it is written"
        return (
            f"{self.what} in the background failed, and the script ended without waiting for it: {cause}; {newest}. The exit "
            "status is therefore not 0"
        )


class _ToldByRank(CheckpointError):
    """Failure of another rank, as rank 0 received it; that rank raises its own error when all ranks check."""


def _room(piece: Piece) -> int:
    """Return bytes that a piece takes in the copy, with the gap behind it."""
    return 0 if isinstance(piece, int) else -(-piece.numel() * piece.dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


_running_to_store: list[_Running] = []


def _wait_before_pools_end(running: _Running) -> None:
    """Have the end of the interpreter wait for a save before it ends pools of threads, which libraries of stores need for each request.

    Python offers no public function for this moment; ``concurrent.futures`` uses the same one.
    """
    register = getattr(threading, "_register_atexit", None)
    if not _running_to_store and register is not None:
        register(lambda: _running_to_store[-1].thread.join())
    _running_to_store[:] = [running]


def _tell(target: Target, name: str, error: Exception) -> None:
    """Leaves a message for rank 0, if the file system still takes one; else rank 0 waits until its time is out."""
    try:
        target.leave_note(name, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
    except OSError as second:
        logger.error("the failure of this save could not be reported to rank 0: %s", second)
