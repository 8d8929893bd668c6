"""Snapshots of several nodes: which one is complete over all of them, and the files that a new node gets from the next one.

[Note: a lost node] Every node has the index of a snapshot and the files of its ranks, and those of the node before it ([Note: two nodes
hold each file]). A node that takes the place of a lost one has nothing; ranks may also have changed their nodes. So all nodes say which
files they have; the newest snapshot of which all files exist somewhere is chosen, and each node gets what its ranks need and it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit import agreement, folders
from hf_zero.checkpoint.commit.file_exchange import Move, beside, send_files
from hf_zero.checkpoint.commit.node_local import is_shared
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE, MARKER_FILE, values_file
from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.observe import log_rank0, logger
from hf_zero.system import launcher_folders, own_files
from hf_zero.system.own_files import present_files


def complete_in(folder: Path) -> dict[tuple[str, str], Path]:
    """Return the complete snapshots in a folder by tag and digest, the newest first; none where another user made the folder."""
    if not (launcher_folders.is_own(folder.parent) and launcher_folders.is_own(folder)):
        return {}
    return {key: place for key, place in folders.complete_ones(folder).items() if isinstance(place, Path)}


def bring_newest(net: Collectives, what: str, folder: Path, nodes: Sequence[str], least_steps: int) -> str | None:
    """Return the tag of the newest snapshot that is complete over all nodes, and bring each node the files that its ranks need; None if
    there is none. Collective.

    Args:
        net: All ranks.
        what: For messages.
        folder: Folder of the snapshots on this rank's node.
        nodes: For each rank a name of its node.
        least_steps: Fewest optimizer steps of the snapshot.

    Raises:
        CheckpointError: On every rank: files could not be copied.
    """
    leaders = [nodes.index(node) for node in nodes]
    leads = leaders[net.rank] == net.rank
    found = agreement.on_all(net, what, lambda: _present(folder) if leads else {})
    keys = {key for present in found for key in present}
    for tag, digest in sorted(keys, key=lambda key: int(key[0].removeprefix("global_step")), reverse=True):
        holders = {rank: present[tag, digest] for rank, present in enumerate(found) if (tag, digest) in present}
        owner = min(holders)
        text = net.broadcast_object(_index_text(folder / tag) if net.rank == owner else "", owner, what)
        try:
            index = _checked(text, digest, folder / tag, holders, net.world)
        except CheckpointError as error:
            log_rank0("the snapshot %s is ignored: %s", tag, error)
            continue
        if index.counters.get("global_steps", 0) < least_steps:
            return None
        moves = _moves(index, leaders, holders)
        if moves:
            log_rank0("%d files of the snapshot %s are copied to nodes that lack them", len(moves), tag)
        agreement.quickly(net, what, lambda folder=folder, tag=tag: _make(folder, tag) if leads else None)  # type: ignore[misc]
        send_files(beside(net), what, folder / tag, moves)
        agreement.quickly(net, what, lambda tag=tag, text=text: _complete(folder / tag, text) if leads else None)  # type: ignore[misc]
        return tag
    return None


def _present(folder: Path) -> dict[tuple[str, str], dict[str, int]]:
    """Return for each complete snapshot of this node, by tag and digest, the sizes of the files that it has."""
    return {key: {name: found.st_size for name, found in present_files(place).items()} for key, place in complete_in(folder).items()}


def _index_text(folder: Path) -> str:
    try:
        return folders.read_index(folder)
    except CheckpointError as error:
        logger.warning("%s", error)
        return ""


def _checked(text: str, digest: str, folder: Path, holders: Mapping[int, Mapping[str, int]], world: int) -> Index:
    """Return the index of a snapshot of which every file is whole on some node.

    Raises:
        CheckpointError: It is damaged, files are missing, or it is of another number of ranks.
    """
    if folders.digest(text) != digest:
        raise CheckpointError("its index is damaged")
    index = Index.from_json(text, str(folder / INDEX_FILE))
    if index.world != world:
        raise CheckpointError(f"it is of {index.world} ranks on several nodes, and these are {world}; the checkpoint on disk is loaded")
    lost = [name for name, record in index.files.items() if all(has.get(name) != record.nbytes for has in holders.values())]
    if lost:
        raise CheckpointError(f"no node has {', '.join(lost[:3])}, {len(lost)} files in all: two neighbouring nodes were lost")
    return index


def _moves(index: Index, leaders: Sequence[int], holders: Mapping[int, Mapping[str, int]]) -> list[Move]:
    """Return the moves of files to nodes that lack them, for their ranks; each goes from one rank of a node to one of another."""
    nodes = {leader: [rank for rank, of in enumerate(leaders) if of == leader] for leader in dict.fromkeys(leaders)}
    planned: dict[tuple[int, str], Move] = {}
    for rank, leader in enumerate(leaders):
        for name in _needed(index, rank):
            nbytes = index.files[name].nbytes
            if holders.get(leader, {}).get(name) == nbytes or (leader, name) in planned:
                continue
            holder = next(one for one, has in holders.items() if has.get(name) == nbytes)
            source = nodes[holder][len(planned) % len(nodes[holder])]
            planned[leader, name] = Move(name, nbytes, source, rank)
    return list(planned.values())


def _needed(index: Index, rank: int) -> list[str]:
    """Return the names of the files that a rank reads: those that it wrote, and those that every node keeps."""
    held: Any = index.client_states.get(str(rank), index.client_state)
    own = {*held["files"], values_file(rank)}
    return [name for name in index.files if name in own or is_shared(name)]


def _make(folder: Path, tag: str) -> None:
    launcher_folders.make(folder.parent, folder.name)
    own_files.make_folders(folder / tag)


def _complete(folder: Path, text: str) -> None:
    """Write index and marker where a node has just got its files."""
    if not folders.is_complete(folder):
        own_files.write_text(folder / INDEX_FILE, text)
        own_files.write_text(folder / MARKER_FILE, folders.digest(text) + "\n")
