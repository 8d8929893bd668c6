"""Take snapshots of an engine into host memory, and find the newest one after its ranks were started again.

[Note: a snapshot] A snapshot is an ordinary checkpoint in a folder of a tmpfs: written in the background (``commit/background.py``),
complete or invisible, the previous one kept until the next is complete on all ranks. The one before that stops to be complete while all
ranks wait; then each rank writes its new files over its own old ones, in the background. The folder belongs to the launcher that starts the
ranks again ([Note: whose folder]), so a snapshot of another run is never found. Inside it each training of a script has a folder with its
number, so a script that trains twice does not begin its first training with a snapshot of its second. Whether a snapshot is due depends
only on the number of optimizer steps; ranks communicate at these steps alone. Beside the client state a snapshot holds the states of the
random generators, so that the steps after it are the same bit for bit.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit import agreement, folders, snapshot_nodes, staging
from hf_zero.checkpoint.commit.background import Background
from hf_zero.checkpoint.contents import contents_of
from hf_zero.checkpoint.files.tensor_reader import RangeReader
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import INDEX_FILE, MARKER_FILE
from hf_zero.checkpoint.save import SaveRequest, save_checkpoint
from hf_zero.checkpoint.state.beside import restore_generators
from hf_zero.checkpoint.state.training_state import TrainingState
from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.memory.budget import free_memory
from hf_zero.observe import log_rank0, logger, warn_once
from hf_zero.system import exit_status, last_words, launcher_folders, own_files
from hf_zero.system.process import Process, leads_node
from hf_zero.system.sizes import gib

_COPIES = 2  # the newest complete one and the one that is being written
_open: list[weakref.ref[Snapshots]] = []
_made = 0  # trainings with snapshots of this process, the same on all ranks


def folder_for(base: str) -> Path | None:
    """Return the folder of the snapshots of the next training of this run; None if no launcher would start this rank again.

    Args:
        base: Folder from the configuration; empty for the system's shared memory.
    """
    launcher = Process.launcher()
    if launcher is None or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    return _folder(launcher, base)


def own_folder(base: str, net: Collectives) -> Path:
    """Return the folder of the snapshots of the next training of ranks that no launcher would start again; collective.

    It belongs to the first rank of each node in place of the launcher's process, so the next run of the user removes what it leaves.

    Args:
        base: Folder from the configuration; empty for the system's shared memory.
        net: All ranks.
    """
    own = Process.own()
    found = [Process.of_json(one) for one in agreement.on_all(net, "naming the folder of snapshots", own.as_json)]
    boot = own.started[:8]  # machines may have one name
    first = next(one for one in found if one is not None and (one.place, one.started[:8]) == (own.place, boot))
    return _folder(first, base)


def _folder(owner: Process, base: str) -> Path:
    return launcher_folders.folder_of(owner, Path(base).absolute() if base else launcher_folders.HOST_MEMORY) / str(_made + 1)


def newest_in(folder: Path, net: Collectives, least_steps: int) -> str | None:
    """Return the tag of the newest complete snapshot in a folder of ``folder_for`` with at least ``least_steps`` optimizer steps; None if
    there is none. Collective.
    """
    what = f"looking for snapshots in {folder}"
    nodes = agreement.on_all(net, what, lambda: folder.parent.name)
    if len(set(nodes)) > 1:
        return snapshot_nodes.bring_newest(net, what, folder, nodes, least_steps)
    return agreement.on_first(net, what, lambda: _find(folder, least_steps))


def _find(folder: Path, least_steps: int) -> str | None:
    for (tag, _), place in snapshot_nodes.complete_in(folder).items():
        try:
            index = Index.from_json(folders.read_index(place), str(place / INDEX_FILE))
            RangeReader(place, index.files).check_sizes()
        except CheckpointError as error:
            logger.warning("a snapshot is ignored: %s", error)
            continue
        if index.counters.get("global_steps", 0) >= least_steps:
            return tag
    return None


def unpack(held: Any, net: Collectives, generators: bool) -> Any:
    """Return the client state that a snapshot holds; local.

    With another number of ranks the random generators stay as they are: no rank draws the numbers of another.

    Args:
        held: Client state of the checkpoint that the snapshot is.
        net: All ranks that load it.
        generators: Restore the random generators.
    """
    if held["ranks"] != net.world:
        log_rank0("the snapshot was taken by %d ranks, but this run has %d: random generators are not restored", held["ranks"], net.world)
    elif generators:
        restore_generators(held["random"], net.topology.device)
    return held["client_state"]


class Snapshots:
    """Snapshots of one engine.

    Args:
        every: Optimizer steps between two of them.
        folder: Folder of this training's snapshots, see ``folder_for``.
        net: All ranks that save together.
        timeout: Seconds without progress after which rank 0 stops waiting for another rank's files.
        waits: A snapshot waits for the one before it, in place of being left out.
        outlives: A launcher starts the ranks again after a failure, so snapshots stay then.

    Attributes:
        folder: See the argument.

    Raises:
        ConfigError: Another engine of this process takes snapshots, which would be of other steps.
    """

    def __init__(self, every: int, folder: Path, net: Collectives, timeout: float, waits: bool = False, outlives: bool = True) -> None:
        global _made
        if _others():
            gc.collect()  # an engine that was dropped
        if _others():
            raise ConfigError(
                "hf_zero.snapshot_steps is set for two training engines of this script. Their snapshots would be of different steps, so no "
                "run could go on from them; remove the key, or call destroy() of the first engine before the second is made"
            )
        _made += 1
        self.folder = folder
        self._every, self._waits, self._outlives = every, waits, outlives
        self._nodes = agreement.on_all(net, "comparing the nodes", lambda: folder.parent.name)
        self._rank = net.rank
        self._background = Background(net.rank, timeout, promised=False)
        self._looked_at = 0  # step at which ``take`` last decided
        self._asked = False  # whether the script asks for snapshots
        self._wanted = False  # whether the next one is due whatever the step
        self._first = -1  # number of the first step of this process
        self._written = ""  # tag of the snapshot that was begun last
        self._kept = ""  # tag of the newest snapshot that all ranks know to be complete
        self._older = ""  # tag of the one before it, if this process has written both: ranks write the next one over its files
        self._bytes = 0  # of one snapshot of this node's ranks
        _open[:] = [*_others_of(self), weakref.ref(self)]
        atexit.register(_close_at_end, weakref.ref(self))
        agreement.quickly(net, f"preparing {folder} for snapshots", self._prepare)

    def _prepare(self) -> None:
        if not leads_node():
            return
        for left in launcher_folders.sweep(self.folder.parent.parent):
            logger.info("%s, snapshots of a run that has ended, was removed", left)

    @property
    def on_nodes(self) -> bool:
        """Return whether the ranks are on several nodes, which have no memory in common."""
        return len(set(self._nodes)) > 1

    @property
    def has_stepped(self) -> bool:
        """Return whether the engine has taken an optimizer step in this process; the same on all ranks."""
        return self._first >= 0

    @property
    def kept(self) -> str:
        """Return the tag of the newest snapshot that all ranks know to be complete; empty if there is none."""
        return self._kept

    # -- taking --------------------------------------------------------------------------------------------------------

    def is_due(self, steps: int) -> bool:
        """Return whether a snapshot is to be taken now, ``steps`` optimizer steps after the start; the same on all ranks, once per step."""
        self._asked = True
        due = steps > 0 and (steps % self._every == 0 or self._wanted) and steps != self._looked_at
        if due:
            self._looked_at, self._wanted = steps, False
        return due

    def request_snapshot(self) -> None:
        """Request a snapshot after this step; every rank must call it."""
        self._wanted = True

    def warn_if_unused(self, steps: int) -> None:
        """Record an optimizer step; warn once if the script takes no snapshots although the configuration requests them."""
        if self._first < 0:
            self._first = steps
        if not self._asked and steps - self._first >= 2 * self._every:
            warn_once(
                f"hf_zero.snapshot_steps is {self._every}, and after {steps} steps no snapshot was taken: call "
                "engine.snapshot(client_state) after each step (Trainer does it by itself)"
            )

    def is_ready(self, net: Collectives) -> bool:
        """Return whether the next snapshot can be taken: the previous one is written, and there is room; collective, the same on all ranks.

        If it cannot be taken, it is skipped with a warning.
        """
        if net.any_rank(self._background.busy, "snapshot") and not self._waits:
            log_rank0("a snapshot is skipped: the previous one is still being written. Raise hf_zero.snapshot_steps (%d)", self._every)
            return False
        self.finish(net)
        agreement.quickly(net, "removing the older snapshots", self._remove_older)
        full = net.any_rank(not self._older and self._bytes > _free(self.folder), "snapshot")  # else it takes the room of the older one
        if full:
            log_rank0("a snapshot is skipped: %s has less than %s free", self.folder, gib(self._bytes))
        return not full

    def finish(self, net: Collectives) -> None:
        """Wait until the last snapshot is written; collective. If it failed, a line in the log says so."""
        try:
            self._background.finish(net)
            if self._written:
                self._older, self._kept = self._kept, self._written
        except CheckpointError as error:
            log_rank0("%s; the previous snapshot is kept", error)
        self._written = ""

    def _remove_older(self) -> None:
        """Remove remains of killed saves, and all snapshots except the newest one that every rank knows to be complete. The files of the
        one before it stay for ``take``, but it no longer counts as complete.
        """
        if not leads_node():
            return
        launcher_folders.make(self.folder.parent, self.folder.name)
        staging.clear(self.folder, "none")
        for path in self.folder.glob("global_step*"):
            if path.name != self._kept:
                own_files.remove_file(path / MARKER_FILE)  # first, so that it no longer counts as complete
                if path.name != self._older:
                    own_files.remove_private(path)

    def take(self, state: TrainingState, client_state: Mapping[str, Any], beside: Mapping[str, Any], may_pickle: bool) -> None:
        """Copy the state, and write the copy in the background. Collective.

        Args:
            state: State to save.
            client_state: This rank's values from the caller.
            beside: States of random generators and of objects of the script, see ``state/beside.py``.
            may_pickle: Pickle values of the client state that nothing else can keep.

        Raises:
            CheckpointError: On every rank: folder or memory is too small for the first snapshot, or a value cannot be saved.
        """
        net = state.everyone
        if not self._bytes:
            self._require_room(state, net)
        tag = f"global_step{state.counters['global_steps']}"
        kept = {
            "client_state": dict(client_state),
            **beside,
            "files": sorted(contents_of(state, exclude_frozen=False).files),
        }
        request = SaveRequest(
            str(self.folder),
            tag,
            kept,
            latest=False,
            direct=False,
            node_local=self.on_nodes,
            tag_validation="ignore",
            may_pickle=may_pickle,
            former=self._older,
        )
        self._older = ""
        save_checkpoint(state, request, self._background)
        self._written = tag

    def _require_room(self, state: TrainingState, net: Collectives) -> None:
        """Raise unless the folder and the memory of each node have room for the snapshots of its ranks; collective."""
        files = contents_of(state, exclude_frozen=False).files
        own = sum(entry.nbytes for entries in files.values() for entry in entries)
        free = free_memory()
        mine = (str(self.folder), own, _free(self.folder), free.nbytes if free is not None else None, self._kept != "")
        found = agreement.on_all(net, "measuring the room for snapshots", lambda: mine)
        nodes = list(dict.fromkeys(one[0] for one in found))
        for place, folder in enumerate(nodes):
            ranks = [one for one in found if one[0] == folder]
            # With several nodes also the files of the one before.
            nbytes, left = sum(one[1] for one in found if one[0] in (folder, nodes[place - 1])), _COPIES - ranks[0][4]
            limits = [(ranks[0][2], left * nbytes, f"{Path(folder).parents[1]} has {gib(ranks[0][2])} free")]
            if ranks[0][3] is not None:  # the copy from which a snapshot is written takes memory too
                limits.append((ranks[0][3], (left + 1) * nbytes, f"{gib(ranks[0][3])} of host memory are free"))
            for has, needs, text in limits:
                if needs > has:
                    raise CheckpointError(
                        f"hf_zero.snapshot_steps: a snapshot takes {gib(nbytes)} on a node of {len(ranks)} rank(s). {gib(needs)} are "
                        f"needed, and {text}. Enlarge it (mount -o remount,size=..., docker run --shm-size, emptyDir with medium "
                        "Memory), name a folder with more room in hf_zero.snapshot_folder, or set hf_zero.snapshot_steps to 0"
                    )
            if folder == str(self.folder):
                self._bytes = nbytes

    # -- going on ------------------------------------------------------------------------------------------------------

    def loaded(self, tag: str, steps: int) -> None:
        """Record that the engine continues from the snapshot ``tag`` ("" for another source) at step ``steps``; local.

        All other snapshots belong to steps that will be repeated; the next ``is_ready`` removes them.
        """
        self._kept, self._older, self._written, self._looked_at = tag, "", "", steps

    def close(self) -> None:
        """Remove the snapshots, because the training has ended, unless an exception ends it; local."""
        self._background.close()
        _open[:] = _others_of(self)
        if leads_node() and (sys.exc_info()[0] is None or not self._outlives):
            launcher_folders.remove(self.folder.parent, self.folder.name)


def _others() -> list[Snapshots]:
    return [found for one in _open if (found := one()) is not None]


def _others_of(own: Snapshots) -> list[weakref.ref[Snapshots]]:
    return [weakref.ref(one) for one in _others() if one is not own]


def _close_at_end(snapshots: weakref.ref[Snapshots]) -> None:
    found = snapshots()
    failed = exit_status.ends_with_an_exception() or last_words.ends_with_a_status()
    if found is not None and found in _others() and not (failed and found._outlives):
        found.close()


def _free(folder: Path) -> int:
    """Return the bytes that files below ``folder``, which need not exist yet, may still take."""
    for path in (folder, *folder.parents):
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return 0
