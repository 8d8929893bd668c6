"""Send the complete state of one replica group to another: a checkpoint in host memory whose files go from rank k to rank k.

The layout of both groups is the same, so a rank needs the files of its counterpart alone, and the files that every node keeps. Nothing is
pickled. The files are in host memory for the time of the transfer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.commit import agreement, folders
from hf_zero.checkpoint.commit.node_local import is_shared
from hf_zero.checkpoint.contents import contents_of
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE, MARKER_FILE, values_file
from hf_zero.checkpoint.load import LoadRequest, load_checkpoint
from hf_zero.checkpoint.save import SaveRequest, save_checkpoint
from hf_zero.checkpoint.state.training_state import TrainingState
from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.replica_groups.quorum import Quorum
from hf_zero.system import launcher_folders, own_files
from hf_zero.system.process import Process, leads_node

_TAG = "state"
_LONGEST = 1 << 24  # bytes of a list of files


def send_state(state: TrainingState, more: Mapping[str, Any], quorum: Quorum, targets: tuple[int, ...]) -> None:
    """Send the state of this group to the members at positions ``targets``; collective inside the group.

    A failure on the network is reported to ``quorum``.

    Args:
        state: Parts of the engine, between two steps.
        more: Plain values, the same on all ranks, which ``receive_state`` returns.
        quorum: The groups.
        targets: See above.

    Raises:
        CheckpointError: On every rank, if the state cannot be written.
    """
    with _Folder(state.everyone) as folder:
        request = SaveRequest(str(folder.path), _TAG, more, latest=False, direct=False, node_local=folder.on_nodes, tag_validation="ignore")
        save_checkpoint(state, request)
        place = folder.path / _TAG
        files = [place / name for name in _own_files(state, place)]
        quorum.attempt(lambda: _send_files(quorum, files, targets))


def receive_state(state: TrainingState, quorum: Quorum, source: int) -> Mapping[str, Any] | None:
    """Load into this group's engine the state of the member at position ``source``; collective inside the group.

    Args:
        state: Parts of the engine.
        quorum: The groups.
        source: See above.

    Returns:
        The values that were sent along, and the counters of the engine under ``counters``; None if the network failed, and nothing has
        changed.

    Raises:
        CheckpointError: On every rank, if the state cannot be loaded.
    """
    net = state.everyone
    with _Folder(net) as folder:
        agreement.quickly(net, f"making {folder.path / _TAG}", folder.make_tag)
        quorum.attempt(lambda: _receive_files(quorum, folder.path / _TAG, source))
        if quorum.any_failed():
            return None
        loaded = load_checkpoint(state, LoadRequest(str(folder.path), _TAG, node_local=folder.on_nodes))
        if loaded is None:
            raise CheckpointError(f"the state of another replica group is not complete in {folder.path}")
        return {**loaded.client_state, "counters": loaded.counters}


class _Folder:
    """A folder in host memory on each node of a group, for the time of a ``with``."""

    def __init__(self, net: Collectives) -> None:
        self._net = net
        base = launcher_folders.folder_of(Process.own()) if net.rank == 0 else None
        self.base = Path(net.broadcast_object(str(base), 0, "folder of a state"))
        self.path = self.base / "state"
        nodes = agreement.on_all(net, "comparing the nodes", lambda: Process.own().place)
        self.on_nodes = len(set(nodes)) > 1

    def __enter__(self) -> _Folder:
        agreement.quickly(self._net, f"making {self.path}", self._make)
        return self

    def _make(self) -> None:
        if leads_node():
            launcher_folders.sweep(self.base.parent)  # what groups have left that died in a transfer
            launcher_folders.make(self.base, self.path.name)

    def make_tag(self) -> None:
        """Make the folder of the files, on each node."""
        if leads_node():
            own_files.make_folders(self.path / _TAG)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self._net.any_rank(False, "end of a transfer")  # no rank reads any more
        if leads_node():
            launcher_folders.remove(self.base, self.path.name)


def _own_files(state: TrainingState, place: Path) -> list[str]:
    """Return the names of the files that this rank sends: its own ones, and on the first rank of a node those that every node keeps."""
    index = Index.from_json(folders.read_index(place), str(place / INDEX_FILE))
    own = {*contents_of(state, exclude_frozen=False).files, values_file(state.everyone.rank)}
    names = [name for name in index.files if name in own or (leads_node() and is_shared(name))]
    return [*names, INDEX_FILE, MARKER_FILE] if leads_node() else names


def _send_files(quorum: Quorum, files: list[Path], targets: tuple[int, ...]) -> None:
    """Send a list of names and sizes, and then the files, to the counterparts of this rank."""
    sizes = json.dumps({path.name: path.stat().st_size for path in files}).encode()
    for target in targets:
        quorum.send(torch.tensor([len(sizes)], dtype=torch.int64).view(torch.uint8), target)
        quorum.send(torch.frombuffer(bytearray(sizes), dtype=torch.uint8), target)
    for path in files:
        nbytes = path.stat().st_size
        data = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
        for target in targets:
            quorum.send(data, target)


def _receive_files(quorum: Quorum, folder: Path, source: int) -> None:
    """Write the files that the counterpart of this rank sends into ``folder``.

    Raises:
        RuntimeError: The network failed, or the list of files is damaged.
    """
    length = int(quorum.receive(8, source).view(torch.int64).item())
    if not 0 < length < _LONGEST:
        raise RuntimeError(f"the list of files has {length} bytes; allowed: 1 to {_LONGEST - 1}")
    sizes = json.loads(bytes(quorum.receive(length, source).numpy()))
    for name, nbytes in sizes.items():
        if Path(name).name != name:
            raise RuntimeError(f"the list of files has the name {name!r}, which is not a plain file name")
        data = quorum.receive(int(nbytes), source)
        own_files.write_bytes(folder / name, data.numpy().tobytes())
