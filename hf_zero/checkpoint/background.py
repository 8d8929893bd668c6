"""Saving while training goes on: a copy of the shards in host memory, and a thread that writes it.

[Note: a save in the background] Before ``save_checkpoint`` returns, every rank has refused what cannot be saved and holds a copy. From then
on the ranks talk through files of the hidden folder only: a script may destroy its process groups while the last checkpoint is
being written, and a thread must not issue collectives between those of the training loop. Each rank writes its shards, then
``rank-00001.json`` with their records; rank 0 waits for all of these, and completes the checkpoint. The thread is no daemon: the
interpreter waits for it at the end.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero import host_memory
from hf_zero.checkpoint import agreement, folders
from hf_zero.checkpoint.folders import Process
from hf_zero.checkpoint.records import FileRecord, read_file_record
from hf_zero.checkpoint.tensor_file import Elsewhere, Entry, Piece
from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.observe import logger

_ALIGNMENT_BYTES = 64
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Written:
    """What a rank has written.

    Attributes:
        files: Records by file name.
        client_state: Its client state, encoded; None where that is rank 0's.
    """

    files: dict[str, FileRecord]
    client_state: Any = None

    def to_json(self) -> str:
        """For a note to rank 0."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str, where: str) -> Written:
        """From ``to_json``; ``where`` is for messages."""
        data = json.loads(text)
        return Written({name: read_file_record(record, f"{where}: {name}") for name, record in data["files"].items()}, data["client_state"])


@dataclass(frozen=True)
class Task:
    """One save in the background.

    Attributes:
        what: For messages.
        part: The hidden folder.
        process: This one.
        write: Writes this rank's files.
        commit: Completes the checkpoint, on rank 0; gets what every rank told before and what it has written.
    """

    what: str
    part: Path
    process: Process
    write: Callable[[], Written]
    commit: Callable[[list[dict[str, Any]], list[Written]], str]


class Background:
    """Writes one checkpoint at a time behind the back of the training loop.

    Args:
        rank: This process among those that save together.
        timeout: Seconds without any progress after which rank 0 stops waiting for another rank.
        limit_bytes: Host memory for the copy; what does not fit is written before ``save_checkpoint`` returns. None: no limit.
    """

    def __init__(self, rank: int, timeout: float, limit_bytes: int | None = None) -> None:
        self._rank = rank
        self._timeout = timeout
        self._limit = limit_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)  # kept: allocating it anew would double the time of a copy
        self._thread: threading.Thread | None = None
        self._what, self._part = "", Path()
        self._error: Exception | None = None

    # -- the copy

    def copy(self, files: Mapping[str, list[Entry]]) -> tuple[dict[str, list[Entry]], dict[str, list[Entry]]]:
        """Copies the arrays of ``files`` to host memory.

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
        self._reserve(sum(_room(piece) for piece in pieces), any(_on_device(piece) for piece in pieces))
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
        for device in {piece.device for piece in pieces if isinstance(piece, torch.Tensor) and piece.device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)
        return direct, copied

    def _reserve(self, nbytes: int, pinned: bool) -> None:
        if self._memory.numel() < nbytes or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # before the new one is there
            if pinned:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
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

    def start(self, task: Task, parts: list[dict[str, Any]]) -> None:
        """Begins to write; ``parts`` are what all ranks told of theirs."""
        self._what, self._error, self._part = task.what, None, task.part
        self._thread = threading.Thread(target=self._run, args=(task, parts), name="hf_zero checkpoint", daemon=False)
        self._thread.start()

    def _run(self, task: Task, parts: list[dict[str, Any]]) -> None:
        try:
            written = task.write()
            if self._rank == 0:
                task.commit(parts, [written, *self._others(task, [part["process"] for part in parts])])
            else:
                folders.write_text(task.part / _note_of(self._rank), written.to_json())
        except Exception as error:  # kept for ``finish``, which tells all ranks
            self._error = error
            logger.error("%s: %s: %s. The former checkpoint stays", task.what, type(error).__name__, error)
            if self._rank != 0:
                _tell(task.part / _failure_of(self._rank), error)

    def _others(self, task: Task, processes: list[Process]) -> list[Written]:
        """What all other ranks have written, as soon as they are there.

        Raises:
            CheckpointError: A rank failed, died, or makes no progress.
        """
        waiting = set(range(1, len(processes)))
        found: dict[int, Written] = {}
        sizes: dict[str, int] = {}
        last = time.monotonic()
        while waiting:
            dead = [rank for rank in waiting if processes[rank].is_alive() is False]
            for rank in sorted(waiting):
                path = task.part / _note_of(rank)
                if path.is_file():
                    found[rank] = Written.from_json(path.read_text(encoding="utf-8"), str(path))
                    path.unlink()
                    waiting.discard(rank)
                elif (task.part / _failure_of(rank)).is_file():
                    raise _ToldByRank(f"{(task.part / _failure_of(rank)).read_text(encoding='utf-8')} (rank {rank})")
                elif rank in dead:  # it was so before its note was looked for
                    raise CheckpointError(f"the process of rank {rank} died while it wrote its shards")
            present = {name: found.st_size for name, found in folders.present_files(task.part).items()}
            if present != sizes:
                sizes, last = present, time.monotonic()
            if waiting and time.monotonic() - last > self._timeout:
                raise CheckpointError(f"ranks {sorted(waiting)} have written nothing for {self._timeout:.0f} seconds")
            if waiting:
                time.sleep(_POLL_SECONDS)
        return [found[rank] for rank in sorted(found)]

    # -- the end

    @property
    def limited(self) -> bool:
        """Whether some files may find no room in the copy."""
        return self._limit is not None

    def finish(self, net: Collectives) -> None:
        """Waits until the last save is on the disk; collective.

        Raises:
            CheckpointError: It failed; on every rank, with the same text.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        try:
            agreement.on_all(net, self._what, lambda: _raise(error))
        except CheckpointError:
            # Not before: other ranks may have been writing into it.
            agreement.on_first(net, self._what, lambda: shutil.rmtree(self._part, ignore_errors=True))
            raise

    def close(self) -> None:
        """Waits for the last save without asking other ranks; its error has been logged. Frees the copy."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._memory = torch.empty(0, dtype=torch.uint8)


class _ToldByRank(CheckpointError):
    """Another rank's failure, as it told rank 0; it reports it itself when all ranks are asked."""


def _raise(error: Exception | None) -> None:
    if error is not None and not isinstance(error, _ToldByRank):
        raise error


def _room(piece: Piece) -> int:
    """Bytes that a piece takes in the copy, with the gap behind it."""
    return 0 if isinstance(piece, int) else -(-piece.numel() * piece.dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _on_device(piece: Piece) -> bool:
    return isinstance(piece, torch.Tensor) and piece.device.type != "cpu"


def _note_of(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _failure_of(rank: int) -> str:
    return f"failed-{rank:05d}"


def _tell(path: Path, error: Exception) -> None:
    """Leaves a message for rank 0, if the file system still takes one; else rank 0 waits until its time is out."""
    try:
        folders.write_text(path, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
    except OSError as second:
        logger.error("rank 0 cannot be told: %s", second)
