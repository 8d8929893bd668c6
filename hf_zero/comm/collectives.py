"""The interface of the collectives that the engine uses, independent of the back end, and the record of a collective in flight."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from hf_zero import observe
from hf_zero.comm.process_groups import host_device, serving_backend
from hf_zero.comm.roll_call import call_roll
from hf_zero.comm.topology import Topology
from hf_zero.errors import CollectiveError

TAGS = 1 << 16  # back ends use smaller tags for their own messages
_VOTE = TAGS + 1  # tag of votes
_FEW = 8  # largest number of ranks that send their votes directly to each other
_numbers: dict[Any, int] = {}  # by the name of a process group
_networks: dict[int, list[ref[Collectives]]] = {}  # by the number of their process group


@dataclass
class Pending:
    """A collective in flight: its works, its label, functions to call when it ends, and the buffers that must live until then.

    The caller that issued it waits exactly once; ``wait`` is idempotent and frees ``keep``. Then ``finish`` runs and may return
    ``result``; ``before_finish`` is for that caller. ``group`` is the process group, named in a report of a long wait. ``failure``
    is the error with which the wait ended, as text.
    """

    label: str
    works: list[Any]
    finish: Callable[[], torch.Tensor | None] | None = None
    keep: tuple[torch.Tensor, ...] = ()
    result: torch.Tensor | None = None
    done: bool = field(default=False)
    before_finish: Callable[[], None] | None = None
    group: dist.ProcessGroup | None = None
    failure: str = ""

    def __post_init__(self) -> None:
        observe.issued(self.label)

    def wait(self) -> None:
        """Wait for the collective: block the host (host back ends) or order the current stream after it (device back ends).

        Raises:
            CollectiveError: A peer failed or the process group's timeout ran out.
        """
        if self.done:
            return
        self.done, works = True, iter(self.works)
        try:
            with observe.waiting(_waits_for(self.label), self.label, on_stream=True):
                try:
                    for work in works:
                        if work is not None:
                            work.wait()
                except RuntimeError as error:
                    raise _collective_error(self.label, error) from error
                if self.before_finish is not None:
                    self.before_finish()
                if self.finish is not None:
                    self.result = self.finish()
        except BaseException as error:
            # Not the error itself, whose traceback holds the buffers. gloo never ends a second wait for the same work.
            self.failure, self.works = repr(error), [] if isinstance(error, CollectiveError) else list(works)
            raise
        self.before_finish = None
        self.works, self.finish, self.keep = [], None, ()

    def drop(self) -> None:
        """Wait until the network no longer uses the buffers, and discard the result. Raise no error of the collective."""
        self.done, works = True, [work for work in self.works if work is not None]
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            observe.logger.warning("%s failed after its result was discarded: %s", self.label, error)
        finally:
            self.works, self.finish, self.before_finish, self.result, self.keep = [], None, None, None, ()

    def then(self, work: Callable[[torch.Tensor | None], torch.Tensor | None]) -> Pending:
        """Call ``work`` on the result when the collective has ended, and make its return value the new result. Return this object."""
        finish = self.finish
        self.finish = lambda: work(finish() if finish is not None else None)
        return self

    def received(self) -> torch.Tensor:
        """Wait for the collective and return its result.

        Raises:
            CollectiveError: The collective failed (see ``wait``), or has no result.
        """
        self.wait()
        if self.result is None:
            why = f": an earlier wait for it ended with {self.failure}" if self.failure else ""
            raise CollectiveError(f"{self.label} gives nothing back{why}")
        return self.result


_KINDS = {"all_gather": "gathers", "exchange_parts": "exchanges"}
_kind_of: dict[str, str] = {}  # label -> kind of wait; as many entries as units


def _waits_for(label: str) -> str:
    """Return the kind of wait, for the clock of phases, of the collective with this label."""
    kind = _kind_of.get(label)
    if kind is None:
        kind = _kind_of[label] = _KINDS.get(label.removeprefix("hf_zero::").partition(" ")[0], "reductions")
    return kind


def _collective_error(label: str, error: BaseException) -> CollectiveError:
    recent, said, reported = observe.recent_events(), " ".join(str(error).split()).rstrip("."), observe.long_wait()
    who = call_roll() or "a peer died, hangs, or runs a different sequence of steps"
    return CollectiveError(
        f"rank {observe.global_rank()} on {platform.node()} failed in {label}: {who}.{reported} The network reported: {said}. "
        f"Recent phases on this rank: {recent}. Look at the other ranks' logs for the first error"
    )


def is_narrow(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a floating-point dtype of one byte."""
    return tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in a form that a network can copy: one-byte floating-point dtypes, which gloo does not know, viewed as bytes."""
    return tensor.view(torch.uint8) if is_narrow(tensor) else tensor


def newest_network(number: int) -> Collectives | None:
    """Return the newest network that is in use over the process group with this number; None without."""
    alive = (known() for known in reversed(_networks.get(number, [])))
    return next((network for network in alive if network is not None), None)


class Collectives(ABC):
    """The collectives that the engine uses: all on 1D buffers, all in the same order on every rank.

    Attributes:
        topology: The axis of all calls.
        number: Number of the process group, which graphs of torch.compile hold ([Note: collectives in graphs]).
        sent_bytes: Number of bytes that this rank has sent so far.
        blocks_host: A wait blocks this process, not only a device stream.
        joint: The collectives of all data-parallel ranks, if the axis has only some of them.
        pretended: The other ranks do not exist (in a memory plan); they count as ranks with the same values as this one.
    """

    blocks_host = False
    pretended = False
    joint: Collectives | None = None

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.sent_bytes = 0
        self.take_number()

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        return self  # a process group cannot be copied

    def take_number(self) -> None:
        """Set ``number``; from now on this object runs the collectives that graphs issue over this process group."""
        self.number = _numbers.setdefault(getattr(self.topology.group, "group_name", None), len(_numbers))
        _networks[self.number] = [known for known in _networks.get(self.number, ()) if known() is not None] + [ref(self)]

    @property
    def rank(self) -> int:
        """Return this rank's position on the axis."""
        return self.topology.rank

    @property
    def world(self) -> int:
        """Return the number of ranks on the axis."""
        return self.topology.world

    @property
    def data(self) -> Collectives:
        """Return the collectives of all data-parallel ranks, for votes and for values that all ranks must have; this object if it covers
        all of them.
        """
        return self.joint or self

    def set_ranks_per_node(self, per_node: int) -> None:  # noqa: B027 - most back ends choose their own routes
        """Set the number of adjacent ranks of the axis in each node to ``per_node``, the same on all ranks; 0 if it is unknown."""

    @abstractmethod
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        """Fill ``full`` (world * n,) from every rank's ``shard`` (n,); ``shard`` may be this rank's view of ``full``."""

    @abstractmethod
    def reduce_scatter(self, full: torch.Tensor, dtype: torch.dtype, unit: str) -> Pending:
        """Sum this rank's part of ``full`` over all ranks; the sum is the ``result`` of the returned object.

        The order of summation is the same on every call; ``full`` must not change before the wait ends.

        Args:
            full: This rank's values, (world * n,).
            dtype: Dtype of the additions and of the result, (n,), if hf_zero itself adds; otherwise the result has that of ``full``.
            unit: Name for labels.
        """

    @abstractmethod
    def exchange(self, messages: torch.Tensor, unit: str) -> Pending:
        """Send row ``r`` of ``messages`` (world, n) to rank ``r``; the ``result`` has the row from rank ``r`` in its row ``r``."""

    @abstractmethod
    def exchange_parts(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], unit: str) -> Pending:
        """Send ``outgoing[r]`` to rank ``r`` and fill ``incoming[r]`` with the message of rank ``r``; this rank's own entries are ignored.

        Args:
            outgoing: One 1D tensor per rank, all of one dtype, maybe empty.
            incoming: One 1D tensor per rank, of the same length as on its sender.
            unit: Name for labels.
        """

    def all_reduce_in_order(self, tensor: torch.Tensor, unit: str) -> Pending:
        """Sum ``tensor`` (n,) over ranks in place; in rank order if hf_zero itself computes the sum."""
        return self.all_reduce(tensor, unit)

    def all_reduce(self, tensor: torch.Tensor, unit: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Sum ``tensor`` over ranks in place, or reduce it by ``op``."""
        label = observe.note("all_reduce", unit)
        if self.world == 1:
            return Pending(label, [])
        self.sent_bytes += 2 * (self.world - 1) * tensor.numel() * tensor.element_size() // self.world
        work = self.launch(label, lambda: dist.all_reduce(tensor, op=op, group=self.topology.group, async_op=True))
        return Pending(label, [work], group=self.topology.group, keep=(tensor,))

    def broadcast(self, tensor: torch.Tensor, source: int, unit: str) -> None:
        """Copy ``tensor`` from rank ``source`` of the axis to all, in place, and wait."""
        label, tensor = observe.note("broadcast", unit), as_sent(tensor)
        if self.world == 1:
            return
        self.sent_bytes += tensor.numel() * tensor.element_size() if self.rank == source else 0
        work = self.launch(label, lambda: dist.broadcast(tensor, group=self.topology.group, async_op=True, group_src=source))
        Pending(label, [work], group=self.topology.group, keep=(tensor,)).wait()

    def broadcast_object(self, value: Any, source: int, unit: str) -> Any:
        """Return rank ``source``'s ``value`` (built-in containers and scalars) on every rank."""
        label = observe.note("broadcast_object", unit)
        if self.world == 1:
            return value
        box = [value]
        self.launch(label, lambda: dist.broadcast_object_list(box, group=self.topology.group, group_src=source))
        return box[0]

    def gather_objects(self, value: Any, unit: str) -> list[Any]:
        """Return every rank's ``value`` in rank order, on every rank."""
        label = observe.note("gather_objects", unit)
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        self.launch(label, lambda: dist.all_gather_object(values, value, group=self.topology.group))
        return values

    def any_rank(self, flag: bool, unit: str) -> bool:
        """Return whether ``flag`` is True on any rank; the same answer on every rank. Waits for every rank, but not for a device if the
        host can vote.
        """
        return self.any_of([flag], unit)[0]

    def any_of(self, flags: Sequence[bool], unit: str) -> list[bool]:
        """Return whether any rank's flag is True, for each of ``flags``, by one message; see ``any_rank``."""
        return [bool(vote) for vote in self.largest_of([float(flag) for flag in flags], unit)]

    def largest_of(self, values: Sequence[float], unit: str) -> list[float]:
        """Return for each of ``values`` (to 24 bits) the maximum over ranks, the same on every rank. Waits like ``any_rank``."""
        return self.wait_for_vote(self.begin_vote(values, unit), values)

    def begin_vote(self, values: Sequence[float], unit: str) -> Pending | None:
        """Send ``values`` to the other ranks, if there are any, without waiting; ``told`` returns the result. One vote at a time.

        [Note: votes behind data] On gloo the messages of a vote follow data that was sent earlier, over the same connections. So a vote
        that begins when the last reduction has been sent, and is read after that reduction has ended, needs no wait of its own.
        """
        if self.world == 1:
            return None
        group = self.topology.group
        votes = torch.tensor(values, dtype=torch.float32, device=host_device(group, self.topology.device))
        if votes.device.type == "cpu" and serving_backend(group, votes.device) == "gloo":
            return self._disseminate(votes, observe.note("all_reduce", unit))
        return self.all_reduce(votes, unit, dist.ReduceOp.MAX).then(lambda _: votes)

    def wait_for_vote(self, vote: Pending | None, values: Sequence[float]) -> list[float]:
        """Wait for ``vote``, to which this rank has contributed ``values``, and return what ``largest_of`` does."""
        if vote is None:
            return list(values)
        with observe.waiting("votes", vote.label.replace("all_reduce", "vote")):
            return self._read(vote.received(), values)

    def _read(self, votes: torch.Tensor, own: Sequence[float]) -> list[float]:
        """Return the elements of ``votes`` as numbers; this rank has contributed ``own``."""
        return list(votes.tolist())

    def _disseminate(self, votes: torch.Tensor, label: str) -> Pending:
        """Start to replace ``votes`` by its maximum over ranks.

        A few ranks send their votes directly to each other. Of many ranks, each sends its maximum so far to the rank 2^k positions further
        on in round k; the first round starts now, the others run in the wait. gloo's own ring needs twice as many sequential messages as
        there are ranks; this needs one, or the binary logarithm of that number.
        """
        group = self.topology.group

        def start(distances: Sequence[int]) -> tuple[list[torch.Tensor], list[Any]]:
            heard = [torch.empty_like(votes) for _ in distances]
            self.sent_bytes += len(distances) * votes.nbytes

            def exchange() -> list[Any]:
                works = []
                for distance, place in zip(distances, heard, strict=True):
                    source, target = ((self.rank + by) % self.world for by in (-distance, distance))
                    works.append(dist.irecv(place, group=group, tag=_VOTE, group_src=source))
                    works.append(dist.isend(votes, group=group, tag=_VOTE, group_dst=target))
                return works

            return heard, self.launch(label, exchange)

        rounds = [[*range(1, self.world)]] if self.world <= _FEW else [[1 << k] for k in range((self.world - 1).bit_length())]
        first, works = start(rounds[0])

        def finish() -> torch.Tensor:
            torch.amax(torch.stack([votes, *first]), 0, out=votes)
            for distances in rounds[1:]:
                heard, works = start(distances)
                Pending(label, works, group=group).wait()
                torch.maximum(votes, heard[0], out=votes)
            return votes

        pending = Pending(label, works, finish, group=group, keep=(votes, *first))
        if self.pretended:  # a plan counts what a call sends
            pending.wait()
        return pending

    def connect(self) -> None:
        """Connect this rank with every other rank, and wait until all are connected; collective.

        gloo connects its ranks when the group is made, at different times on each: a rank that destroyed the group without using it would
        cut off ranks that are still connecting. nccl would connect in the first backward.
        """
        if self.world > 1:
            dist.barrier(self.topology.group)

    @staticmethod
    def launch(label: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise _collective_error(label, error) from error


def copy_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target`` unless they are the same tensor."""
    if target.data_ptr() != source.data_ptr() or target.device != source.device:
        target.copy_(source)
