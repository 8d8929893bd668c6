"""Copy files of a checkpoint from the memory or disk of one node to that of another: to the next node after a save, back to a new node.

[Note: two nodes hold each file] The nodes of a run form a ring in the order of their ranks. After every rank has written its files, each
sends them to a rank of the next node, which writes them beside its own. When a node is lost with its memory, the next node has its files.
All ranks know all moves; the bytes go in windows between pairs of ranks, over connections of their own, so that no message of the training
waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from hf_zero.checkpoint.commit import agreement
from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.own_groups import own_topology
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.text_file import opened_file

_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True)
class Move:
    """One file that goes from the folder of rank ``source`` to that of rank ``target``; ``nbytes`` is its size."""

    name: str
    nbytes: int
    source: int
    target: int


def beside(net: Collectives) -> Collectives:
    """Return a network of the ranks of ``net`` over gloo, for files and for a thread; collective the first time.

    A thread may use it while the training uses ``net``: it is a process group of its own.
    """
    topology = replace(net.topology, device=torch.device("cpu"))
    return build_collectives(own_topology(topology, "files"))


def to_next_node(leaders: Sequence[int], files: Sequence[Mapping[str, int]]) -> list[Move]:
    """Return the moves of every rank's files to the next node; none if there is one node.

    Args:
        leaders: For each rank the rank that leads its node.
        files: For each rank the sizes of its files by name.
    """
    nodes = [[rank for rank, leader in enumerate(leaders) if leader == node] for node in dict.fromkeys(leaders)]
    if len(nodes) == 1:
        return []
    moves = []
    for place, node in enumerate(nodes):
        following = nodes[(place + 1) % len(nodes)]
        for position, rank in enumerate(node):
            target = following[position % len(following)]
            moves += [Move(name, nbytes, rank, target) for name, nbytes in sorted(files[rank].items())]
    return moves


def send_files(net: Collectives, what: str, folder: Path, moves: Collection[Move]) -> None:
    """Carry out ``moves``; collective.

    Args:
        net: All ranks, see ``beside``.
        what: For messages.
        folder: Folder of this rank's files, where the files that it gets are written; a file of the same name is replaced.
        moves: The same on every rank.

    Raises:
        CheckpointError: A file cannot be read or written; on every rank, after all moves.
    """
    pairs: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        pairs.setdefault((move.source, move.target), []).append(move)
    windows = {pair: list(_windows(sum(move.nbytes for move in of_pair))) for pair, of_pair in pairs.items()}
    with ExitStack() as stack:
        sources = {pair: _Source(folder, of_pair, stack) for pair, of_pair in pairs.items() if pair[0] == net.rank}
        sinks = {pair: _Sink(folder, of_pair, stack) for pair, of_pair in pairs.items() if pair[1] == net.rank}
        empty = torch.empty(0, dtype=torch.uint8)
        for step in range(max((len(sizes) for sizes in windows.values()), default=0)):
            outgoing, incoming = [empty] * net.world, [empty] * net.world
            for pair, source in sources.items():
                if step < len(windows[pair]):
                    outgoing[pair[1]] = source.read(windows[pair][step])
            for pair in sinks:
                if step < len(windows[pair]):
                    incoming[pair[0]] = torch.empty(windows[pair][step], dtype=torch.uint8)
            net.exchange_parts(outgoing, incoming, "checkpoint: files").wait()
            for pair, sink in sinks.items():
                if step < len(windows[pair]):
                    sink.write(incoming[pair[0]])
        problems = [end.problem for end in (*sources.values(), *sinks.values()) if end.problem is not None]
    agreement.quickly(net, what, lambda: _raise(problems))


def _windows(nbytes: int) -> Iterator[int]:
    for start in range(0, nbytes, _WINDOW_BYTES):
        yield min(_WINDOW_BYTES, nbytes - start)


def _raise(problems: Sequence[OSError]) -> None:
    if problems:
        raise problems[0]


class _End:
    """One end of a stream of several files' bytes; it keeps its first error, after which the stream continues without files.

    Attributes:
        problem: The first error of the file system.
    """

    def __init__(self, folder: Path, moves: Sequence[Move], stack: ExitStack) -> None:
        self._folder = folder
        self._moves = list(moves)
        self._stack = stack
        self._left = 0  # bytes of the open file
        self._file: IO[bytes] | None = None
        self.problem: OSError | None = None

    def _parts(self, nbytes: int) -> Iterator[int]:
        """Yield the bytes of the present file in the next ``nbytes``, which may reach over several files."""
        while nbytes:
            while not self._left:
                move = self._moves.pop(0)
                self._left = move.nbytes
                self._close()
                try:
                    self._file = self._opened(self._folder / move.name) if self.problem is None else None
                except OSError as error:
                    self.problem = error
            part = min(nbytes, self._left)
            yield part
            self._left, nbytes = self._left - part, nbytes - part

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self, path: Path) -> IO[bytes]:
        raise NotImplementedError


class _Source(_End):
    def _opened(self, path: Path) -> IO[bytes]:
        return self._stack.enter_context(opened_file(path))

    def read(self, nbytes: int) -> torch.Tensor:
        """Return the next (nbytes,) bytes; zeros after an error."""
        found = torch.zeros(nbytes, dtype=torch.uint8)
        start = 0
        for part in self._parts(nbytes):
            if self._file is not None and self.problem is None:
                data = self._file.read(part)
                if len(data) == part:
                    found[start : start + part] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                else:
                    self.problem = OSError(f"{self._file.name} is shorter than the index says")
            start += part
        return found


class _Sink(_End):
    def _opened(self, path: Path) -> IO[bytes]:
        own_files.remove_file(path)
        with Folder(path.parent) as folder:
            return self._stack.enter_context(os.fdopen(folder.create(path.name), "wb"))

    def write(self, data: torch.Tensor) -> None:
        """Append (n,) bytes to the files."""
        start = 0
        for part in self._parts(data.numel()):
            try:
                if self._file is not None and self.problem is None:
                    self._file.write(memoryview(data[start : start + part].numpy()))  # type: ignore[arg-type]
            except OSError as error:
                self.problem = error
            start += part
