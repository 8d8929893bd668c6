"""Checkpoints on disks that every node has of its own: who writes where, what every node gets, and which one all nodes have.

[Note: node-local checkpoints] Every node's folder holds the same index, the files of its own ranks, and a copy of those few that every
rank reads (values, buffers, parameters without unit). Put together, the folders of all nodes are an ordinary checkpoint. Which ranks
share a disk is found out and not asked: on each node a rank with LOCAL_RANK 0 offers to make the hidden folder, the first one that
does is the *leader* of all ranks that see it. Names move in steps that all nodes take together, and what is replaced stays until the
last one; so when a save is killed, there is one that all nodes have, and loading takes that.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit import agreement, folders, staging
from hf_zero.checkpoint.format.names import LATEST_FILE, MODULE, values_file
from hf_zero.checkpoint.format.records import FileRecord
from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.observe import logger, note
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.process import Process, leads_node

_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True)
class Disks:
    """Division of the ranks into groups that write to one disk, each with a leader.

    Attributes:
        leaders: For each rank the leader of its disk, which makes and completes the folder that the rank writes into.
        rank: This rank.
    """

    leaders: tuple[int, ...]
    rank: int

    @property
    def leads(self) -> bool:
        """Return whether this rank is a leader."""
        return self.leaders[self.rank] == self.rank

    def only(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return ``work`` on leader ranks, and a function that does nothing on other ranks."""
        return work if self.leads else lambda: None


# -- saving -----------------------------------------------------------------------------------------------------------


def begin(net: Collectives, what: str, place: tuple[Path, str], number: str, job: Collection[Process]) -> Disks:
    """Make the hidden folder on every node's disk; collective.

    Args:
        net: All ranks.
        what: For messages.
        place: The folder of all checkpoints here, and the tag.
        number: Of this save, the same on every rank.
        job: All ranks' processes.

    Raises:
        CheckpointError: A disk refuses, or a rank sees no folder; on every rank.
    """
    save_dir, tag = place
    offers = leads_node()
    complete = agreement.on_all(net, what, lambda: _prepare(save_dir, tag, job) if offers else None)
    agreement.quickly(net, what, lambda: _repair(save_dir, tag, complete) if offers else None)
    agreement.quickly(net, what, lambda: staging.make_hidden_folder(save_dir, tag, number, net.rank) if offers else None)
    leaders = agreement.on_all(net, what, lambda: _leader(folders.staging_folder(save_dir, tag, number)))
    if net.rank in leaders:
        note("checkpoint_begun", tag)
    return Disks(tuple(leaders), net.rank)


def _prepare(save_dir: Path, tag: str, job: Collection[Process]) -> list[tuple[str, str]]:
    staging.clear(save_dir, folders.check_tag(tag), job)
    return [key for key in folders.complete_ones(save_dir) if key[0] == tag]


def _repair(save_dir: Path, tag: str, complete: list[list[tuple[str, str]] | None]) -> None:
    """Undoes a save that was killed when some nodes had replaced their checkpoint of this tag and some had not."""
    sets = [set(keys) for keys in complete if keys is not None]
    staging.restore_previous(save_dir, tag, set.intersection(*sets))


def _leader(folder: Path) -> int:
    leader = staging.leader_of(folder)
    if leader is None:
        raise CheckpointError(
            f"no rank with LOCAL_RANK 0 has made {folder} on {platform.node()}; "
            "start the processes of each node with LOCAL_RANK 0, 1, ..., as torchrun does"
        )
    return leader


def share(net: Collectives, disks: Disks, what: str, folder: Path, written: list[Mapping[str, FileRecord]]) -> None:
    """Copy the files that every rank may read to the disks that lack them; collective.

    Args:
        net: All ranks.
        disks: Disks, with the ranks that see each.
        what: For messages.
        folder: The hidden folder.
        written: Every rank's files.
    """
    if len(set(disks.leaders)) == 1:
        return
    for owner, files in enumerate(written):
        for name, record in files.items():
            if not is_shared(name):
                continue
            place = folder / name if disks.leads and disks.leaders[owner] != disks.rank else None
            _copy_file(net, owner, folder / name, place, record.nbytes, what)


def is_shared(name: str) -> bool:
    """Return whether every node keeps the file of that name, because every rank may read it."""
    return name.startswith(f"{MODULE}-") or name == values_file(0)


def _copy_file(net: Collectives, owner: int, source: Path, target: Path | None, nbytes: int, what: str) -> None:
    """Send ``source`` of rank ``owner``, ``nbytes`` long, to the ranks that have a ``target``. An error is raised after the last window."""
    problem: OSError | None = None
    with ExitStack() as stack:
        file: Any = None
        try:
            if net.rank == owner:
                file = stack.enter_context(open(source, "rb"))
            elif target is not None:
                folder = stack.enter_context(Folder(target.parent))
                file = stack.enter_context(os.fdopen(folder.create(target.name), "wb"))
        except OSError as error:
            problem = error
        for _ in range(0, nbytes, _WINDOW_BYTES):
            data = file.read(_WINDOW_BYTES) if file is not None and net.rank == owner else b""
            data = net.broadcast_object(data, owner, f"checkpoint: {source.name}")
            try:
                if target is not None and problem is None:
                    file.write(data)
            except OSError as error:
                problem = error
        try:
            if target is not None and problem is None:
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            problem = error
    agreement.quickly(net, what, lambda: _raise(problem))


def _raise(problem: OSError | None) -> None:
    if problem is not None:
        raise problem


def complete(net: Collectives, disks: Disks, what: str, place: tuple[Path, str], folder: Path, index: str, latest: bool) -> None:
    """Write index, marker, name and last of all ``latest`` on every disk; each step is done on all disks before the next begins;
    collective.

    Args:
        net: All ranks.
        disks: Disks, with the ranks that see each.
        what: For messages.
        place: The folder of all checkpoints here, and the tag.
        folder: The hidden folder.
        index: The text of the index.
        latest: Point ``latest`` at it.
    """
    save_dir, tag = place

    def finalize() -> None:
        note("checkpoint_written", tag)
        staging.write_script(save_dir)
        staging.finalize(folder, index)
        note("checkpoint_sealed", tag)

    def finish() -> None:
        if latest:
            note("checkpoint_latest", tag)
            own_files.write_text(save_dir / LATEST_FILE, tag)
        note("checkpoint_done", tag)

    agreement.quickly(net, what, disks.only(finalize))
    agreement.quickly(net, what, disks.only(lambda: staging.publish(folder, save_dir, tag, keep_previous=True)))
    agreement.quickly(net, what, disks.only(finish))
    agreement.quickly(net, what, disks.only(lambda: staging.drop_previous(save_dir)))


# -- loading ----------------------------------------------------------------------------------------------------------


def find(net: Collectives, what: str, load_dir: Path, tag: str | None) -> Path | None:
    """Return the complete checkpoint of ``tag``, or the newest one, that every node has; collective.

    Returns:
        The folder on this rank's disk; None when no tag is given and no node has anything.

    Raises:
        CheckpointError: No checkpoint is on all nodes; on every rank, with the checkpoints of each node.
    """
    here: dict[tuple[str, str], Path] = {}

    def look() -> dict[str, Any]:
        here.update(
            {key: folder for key, folder in folders.complete_ones(load_dir).items() if tag in (None, key[0]) and isinstance(folder, Path)}
        )
        wanted = folders.read_latest(load_dir) if tag is None else tag
        return {"node": platform.node(), "wanted": wanted, "complete": [list(key) for key in here]}

    found = agreement.on_all(net, what, look)
    everywhere = [key for key in map(tuple, found[0]["complete"]) if all(list(key) in other["complete"] for other in found)]
    wanted = found[0]["wanted"]
    chosen = next((key for key in everywhere if key[0] == wanted), None)
    if chosen is None and tag is None:
        chosen = next(iter(everywhere), None)
        if chosen is not None and net.rank == 0:
            logger.warning(
                "%r names %s, which is not complete on every node; loading the newest checkpoint that is complete on all nodes instead: %s",
                LATEST_FILE,
                "nothing" if wanted is None else repr(wanted),
                load_dir / str(chosen[0]),
            )
    if chosen is not None:
        return here[chosen]  # type: ignore[index]
    if tag is None and not any(other["complete"] or other["wanted"] for other in found):
        return None
    raise CheckpointError(f"{what}: {_missing(load_dir, tag, found)}")


def _missing(load_dir: Path, tag: str | None, found: list[dict[str, Any]]) -> str:
    nodes: dict[tuple[str, str], list[int]] = {}
    for rank, other in enumerate(found):
        has = ", ".join(sorted({repr(name) for name, _ in other["complete"]})) or "none"
        nodes.setdefault((other["node"], has), []).append(rank)
    lines = "; ".join(f"{node} (rank {', '.join(map(str, ranks))}) has {has}" for (node, has), ranks in nodes.items())
    subject = "checkpoint" if tag is None else f"checkpoint {tag!r}"
    return (
        f"{load_dir} holds no {subject} that is complete on every node: {lines}. Start on the nodes that saved it, or put the folders of "
        "all nodes together where every node sees them and set checkpoint.use_node_local_storage to false"
    )


def check_parts(folder: Path, files: Mapping[str, FileRecord], needed: set[str]) -> None:
    """Check the sizes of the files on this node, and that all files this rank needs exist.

    Raises:
        CheckpointError: One is missing or has another size.
    """
    absent = []
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            absent += [name] if name in needed else []
        elif path.stat().st_size != record.nbytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, the index says {record.nbytes}: it was truncated or replaced")
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise CheckpointError(
            f"{folder} on {platform.node()} lacks {', '.join(absent[:3])}{more}, which another node wrote. Start as many ranks as saved "
            "it, the same ones on each node; or put the folders of all nodes together where every node sees them and set "
            "checkpoint.use_node_local_storage to false, then any number loads"
        )
