"""Meet the other replica groups through torchft: who takes part in a step, sums over the groups, and the vote at its end."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import group_timeout
from hf_zero.errors import ConfigError, StateError
from hf_zero.observe import logger

LIGHTHOUSE, GROUP, GROUPS = "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"
TIMEOUT = "TORCHFT_TIMEOUT_SEC"
_PAUSE = 0.1  # seconds between two looks for groups that have not started yet
_CHUNK = 1 << 26  # bytes of a message of ``send``


class Member(NamedTuple):
    """A replica group in a quorum.

    Attributes:
        group: Its number.
        step: Optimizer steps that it has taken.
        digest: Its history, see [Note: replica groups].
        behind: Whether it gets the state of another group before the step.
        fresh: Whether its processes have neither taken a step nor received a state.
    """

    group: int
    step: int
    digest: int
    behind: bool
    fresh: bool


@dataclass(frozen=True)
class Formed:
    """A quorum, the same on all ranks of all its groups but for ``source`` and ``targets``.

    Attributes:
        members: The groups in the order of their ranks in the quorum.
        step: Optimizer steps before the coming one.
        source: Position of the member that sends its state to this group; None if this group has the newest state.
        targets: Positions of the members that this group sends its state to.
    """

    members: tuple[Member, ...]
    step: int
    source: int | None
    targets: tuple[int, ...]


def group_number() -> int:
    """Return the number of this process' replica group.

    Raises:
        ConfigError: The variables of the environment are missing or wrong.
    """
    given = os.environ.get(GROUP, "")
    if not given.isdecimal():
        raise ConfigError(
            f"hf_zero.replicas is 'torchft', and the variable {GROUP} is {given!r}: set it to the number of this replica group, from 0, "
            "a different one for each group"
        )
    if not os.environ.get(LIGHTHOUSE):
        raise ConfigError(
            f"hf_zero.replicas is 'torchft', and the variable {LIGHTHOUSE} is not set: start `torchft_lighthouse --min_replicas 1` once, "
            f"and set {LIGHTHOUSE}=http://host:29510 for every group"
        )
    return int(given)


def number_of_groups() -> int:
    """Return the number of replica groups that begin the run.

    Raises:
        ConfigError: The variable of the environment is missing or wrong.
    """
    given = os.environ.get(GROUPS, "")
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"hf_zero.replicas is 'torchft', and the variable {GROUPS} is {given!r}: set it to the number of replica groups")
    return int(given)


def exchange_timeout() -> timedelta:
    """Return the seconds that an exchange with another group may take before that group is dropped from the quorum.

    Raises:
        ConfigError: The variable of the environment is wrong.
    """
    given = os.environ.get(TIMEOUT, "60")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < timedelta.max.total_seconds():
        raise ConfigError(f"hf_zero.replicas is 'torchft', and the variable {TIMEOUT} is {given!r}: set it to a number of seconds above 0")
    return timedelta(seconds=seconds)


def _own_address() -> str:
    """Return the address of this host that its route to the lighthouse begins with, which other groups reach too."""
    lighthouse = urlsplit(os.environ[LIGHTHOUSE])
    try:
        found = socket.getaddrinfo(lighthouse.hostname or "localhost", lighthouse.port or 29510, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = sorted(found)[0]  # AF_INET first
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{LIGHTHOUSE} is {os.environ[LIGHTHOUSE]!r}, which this host cannot reach: {error}") from error


class Quorum:
    """The replica groups that take part in a step; the constructor is collective inside the group.

    Args:
        group: Number of this group.
        net: All ranks of this group.

    Raises:
        ConfigError: torchft is not installed.
    """

    def __init__(self, group: int, net: Collectives) -> None:
        try:
            from torchft import Manager, ProcessGroupGloo
        except ImportError as error:
            raise ConfigError(
                f"hf_zero.replicas is 'torchft', which cannot be imported ({error}): pip install 'hf_zero[replicas]'"
            ) from error
        self.group, self._groups = group, number_of_groups()
        self._net = net
        self._patience = group_timeout(net.topology)
        patience = exchange_timeout()
        host = net.broadcast_object(_own_address() if net.rank == 0 else "", 0, "address of the replica group")
        # A store of this attempt alone: that of the launcher still has the addresses of the attempt before.
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if net.rank == 0 else None
        port = net.broadcast_object(self._store.port if self._store is not None else 0, 0, "port of the replica group")
        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)  # each lost group would be several stack traces
        self._moves = _Moves()
        self._gloo = ProcessGroupGloo(timeout=patience)
        self._manager = Manager(
            pg=self._gloo,
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=self._patience,
            rank=net.rank,
            world_size=net.world,
            store_addr=host,
            store_port=port,
            hostname=f"[{host}]" if ":" in host else host,
            replica_id=f"group{group}",
            checkpoint_transport=self._moves,  # type: ignore[arg-type]
            init_sync=False,
        )

    # -- meeting ---------------------------------------------------------------------------------------------------------

    def form(self, step: int, digest: int, fresh: bool) -> Formed:
        """Wait for a quorum of groups that can exchange messages, and return it; collective over them.

        If all members are fresh, so that the run begins, they wait for all groups: otherwise a group that starts late would begin a run of
        its own.

        Args:
            step: Optimizer steps that this group has taken.
            digest: History of this group.
            fresh: See ``Member``.

        Raises:
            StateError: Fresh groups start from different weights, two groups have one number, or not all groups came to the begin of the
                run within the timeout of the process group.
        """
        until = time.monotonic() + self._patience.total_seconds()
        while True:
            self._moves.behind = False
            self._manager.load_state_dict({"step": step, "batches_committed": 0})
            self._manager.start_quorum()
            own = Member(self.group, step, digest, self._moves.behind, fresh)
            members = self._tell(own)
            if not self.any_failed():
                formed = self._formed(members, own)
                if all(member.fresh for member in members) and len(members) < self._groups:
                    self._wait_for_more(members, until)
                    continue
                if not self._fork(formed, own):
                    return formed
                if own.digest != _newest(formed).digest:
                    step = 0  # the next quorum finds this group behind
            self.give_up()

    def _formed(self, members: tuple[Member, ...], own: Member) -> Formed:
        """Return the quorum, in which the first member with the newest state sends it to all that are behind.

        torchft would choose another sender for each rank of a group, and here the ranks of a group write and read a state together.
        """
        first = next(place for place, member in enumerate(members) if not member.behind)
        behind = tuple(place for place, member in enumerate(members) if member.behind)
        sends = members[first].group == own.group and not own.behind
        return Formed(members, self._manager.current_step(), first if own.behind else None, behind if sends else ())

    def _wait_for_more(self, members: Sequence[Member], until: float) -> None:
        """Pause before the next look for groups that have not started; collective inside the group."""
        if self._net.any_rank(time.monotonic() > until, "groups that have not started"):
            raise StateError(
                f"{GROUPS} is {self._groups}, and only {len(members)} replica group(s) came within {self._patience.total_seconds():g} s. "
                f"Start the others, or set {GROUPS} to the number of groups that begin the run. If the others have ended their training, "
                "there is nothing to go on with"
            )
        time.sleep(_PAUSE)

    def _fork(self, formed: Formed, own: Member) -> bool:
        """Return whether groups of the newest state have different histories."""
        numbers = [member.group for member in formed.members]
        if len(set(numbers)) < len(numbers):
            raise StateError(f"several replica groups have the number {own.group}: give each group another one in {GROUP}")
        different = {member.digest for member in formed.members if not member.behind}
        if len(different) > 1 and all(member.fresh for member in formed.members):
            raise StateError(
                "the replica groups start from different weights: set the same seed before the model is made, or load the same checkpoint, "
                "in every group"
            )
        if len(different) > 1:
            logger.warning("replica groups have trained apart; group %d has the state that counts", _newest(formed).group)
        return len(different) > 1

    def _tell(self, own: Member) -> tuple[Member, ...]:
        """Return all members' facts, by rank in the quorum; of no use if that failed."""
        mine = torch.tensor(own, dtype=torch.int64)

        def gather() -> tuple[Member, ...]:
            found = [torch.zeros_like(mine) for _ in range(self._gloo.size())]
            self._gloo.allgather([found], [mine], _gathering()).wait()
            lines = [line.tolist() for line in found]
            return tuple(Member(*line[:3], *map(bool, line[3:])) for line in lines)

        return self.attempt(gather) or ()

    def attempt(self, work: Callable[[], Any]) -> Any:
        """Return the result of ``work``, which exchanges messages with other groups; None, and the step cannot be taken, if it fails."""
        if self._manager.errored() is not None:
            return None
        try:
            return work()
        except (RuntimeError, OSError) as error:
            self._manager.report_error(error)
            return None

    def any_failed(self) -> bool:
        """Return whether an exchange of this step has failed on a rank of this group; collective inside the group."""
        return self._net.any_rank(self._manager.errored() is not None, "exchange with other replica groups")

    def give_up(self) -> None:
        """Leave the present quorum after a failure on a rank of this group; collective inside the group.

        Closing the connections tells the other groups at once.
        """
        failed = self._manager.errored()
        if failed is None:
            self._manager.report_error(RuntimeError("another rank of this group has failed"))
        self.vote()
        logger.warning(
            "replica group %d leaves the quorum: %s", self.group, " ".join(str(failed and failed.original_exception).split())[:300]
        )

    def vote(self) -> bool:
        """Return whether all ranks of this group are ready for the step; if not, they leave the quorum. Collective inside the group."""
        agreed = bool(self._manager.should_commit())
        if not agreed:
            self._gloo.abort(errored=False)
        return agreed

    # -- messages --------------------------------------------------------------------------------------------------------

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each of ``numbers`` over the groups; of no use if that failed."""
        values = torch.tensor(numbers, dtype=torch.int64)
        self._manager.allreduce(values, reduce_op=dist.ReduceOp.MAX).wait()  # type: ignore[arg-type]
        return [int(value) for value in values.tolist()]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors on the host by their mean over the groups, in place; of no use if that failed."""
        for work in [self._manager.allreduce(tensor) for tensor in tensors]:
            work.wait()

    def send(self, data: torch.Tensor, target: int) -> None:
        """Send bytes, (n,) uint8, to this rank's counterpart in the member at position ``target``.

        Raises:
            RuntimeError: The network failed.
        """
        for part in data.split(_CHUNK):
            self._gloo.send([part], target, 1).wait()

    def receive(self, nbytes: int, source: int) -> torch.Tensor:
        """Return bytes, (nbytes,) uint8, from this rank's counterpart in the member at position ``source``.

        Raises:
            RuntimeError: The network failed.
        """
        data = torch.empty(nbytes, dtype=torch.uint8)
        for part in data.split(_CHUNK):
            self._gloo.recv([part], source, 1).wait()
        return data

    def close(self) -> None:
        """Leave the other groups; local."""
        self._manager.shutdown(wait=False)
        self._gloo.abort(errored=False)


def _gathering() -> Any:
    from torch.distributed.distributed_c10d import AllgatherOptions

    return AllgatherOptions()


def _newest(formed: Formed) -> Member:
    """Return the first member with the newest state."""
    return next(member for member in formed.members if not member.behind)


class _Moves:
    """torchft's interface for sending states, which only records that this group is behind: states go by ``transfer``, without pickle.

    Attributes:
        behind: Whether another group has a newer state.
    """

    def __init__(self) -> None:
        self.behind = False

    def metadata(self) -> str:
        return "-"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        pass

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        self.behind = True
        return {"user": {"default": None}, "torchft": {"step": step, "batches_committed": 0}}

    def disallow_checkpoint(self) -> None:
        pass

    def shutdown(self, wait: bool = True) -> None:
        pass
