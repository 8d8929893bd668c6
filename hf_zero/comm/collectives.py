"""The only caller of torch.distributed's collectives: a native back end, a gloo back end, and records of work in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from hf_zero import observe
from hf_zero.comm.topology import Topology, host_device, serving_backend
from hf_zero.errors import CollectiveError
from hf_zero.memory import host_memory

# torch 2.13 renamed the two; both names mean the same call.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TAGS = 1 << 16
_VOTE = _TAGS + 1  # tag of votes


@dataclass
class Pending:
    """A collective in flight: its works, its label, what to do when it ends, and the buffers that must live until then.

    The issuer waits exactly once; ``wait`` is idempotent and frees ``keep``. ``finish`` runs then and may give ``result``;
    ``before_finish`` is the issuer's own.
    """

    label: str
    works: list[Any]
    finish: Callable[[], torch.Tensor | None] | None = None
    keep: tuple[torch.Tensor, ...] = ()
    result: torch.Tensor | None = None
    done: bool = field(default=False)
    before_finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Blocks (host back ends) or orders the current stream (device back ends) behind the collective.

        Raises:
            CollectiveError: A peer failed or the process group's timeout ran out.
        """
        if self.done:
            return
        self.done = True
        try:
            for work in self.works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise _collective_error(self.label, error) from error
        if self.before_finish is not None:
            self.before_finish()
        if self.finish is not None:
            self.result = self.finish()
        self.before_finish = None
        self.works, self.finish, self.keep = [], None, ()

    def received(self) -> torch.Tensor:
        """What the collective gives back, after waiting for it.

        Raises:
            CollectiveError: It failed (see ``wait``), or it gives nothing back.
        """
        self.wait()
        if self.result is None:
            raise CollectiveError(f"{self.label} gives nothing back")
        return self.result


def _collective_error(label: str, error: BaseException) -> CollectiveError:
    return CollectiveError(
        f"rank {observe.global_rank()} failed in {label}: {error}. A peer died, hangs, or runs a different sequence of steps. "
        f"Recent phases on this rank: {observe.recent_events()}. Look at the other ranks' logs for the first error"
    )


class Collectives(ABC):
    """What the engine asks of the network: all on 1D buffers, all in the same order on every rank.

    Attributes:
        topology: The axis all calls run over.
        sent_bytes: Bytes this rank has handed to the network so far.
        blocks_host: Waiting stops this process, not just a device stream.
    """

    blocks_host = False

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.sent_bytes = 0

    @property
    def rank(self) -> int:
        """This rank's position on the axis."""
        return self.topology.rank

    @property
    def world(self) -> int:
        """Number of ranks on the axis."""
        return self.topology.world

    @abstractmethod
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        """Fills ``full`` (world * n,) from every rank's ``shard`` (n,); ``shard`` may be this rank's view of ``full``."""

    @abstractmethod
    def reduce_scatter(self, full: torch.Tensor, dtype: torch.dtype, unit: str) -> Pending:
        """Sums this rank's part of every rank's ``full``; the sum is the ``result`` of what is returned.

        The order of summation is the same on every call; ``full`` must stay untouched until the end.

        Args:
            full: This rank's values, (world * n,).
            dtype: Type of the result, (n,), and of the additions where the back end leaves them to us.
            unit: Name for labels.
        """

    @abstractmethod
    def exchange(self, messages: torch.Tensor, unit: str) -> Pending:
        """Sends row ``r`` of ``messages`` (world, n) to rank ``r``; the ``result`` has the row from rank ``r`` in its row ``r``."""

    @abstractmethod
    def exchange_parts(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], unit: str) -> Pending:
        """Sends ``outgoing[r]`` to rank ``r`` and fills ``incoming[r]`` with what rank ``r`` sends; this rank's own entries are left alone.

        Args:
            outgoing: One 1D tensor per rank, all of one dtype, maybe empty.
            incoming: One 1D tensor per rank, of the length that its sender knows.
            unit: Name for labels.
        """

    def all_reduce_in_order(self, tensor: torch.Tensor, unit: str) -> Pending:
        """Sums ``tensor`` (n,) over ranks in place, rank by rank where the back end leaves the order to us."""
        return self.all_reduce(tensor, unit)

    def all_reduce(self, tensor: torch.Tensor, unit: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Sums (or ``op``) ``tensor`` over ranks in place."""
        label = observe.note("all_reduce", unit)
        if self.world == 1:
            return Pending(label, [])
        self.sent_bytes += 2 * (self.world - 1) * tensor.numel() * tensor.element_size() // self.world
        work = self._launch(label, lambda: dist.all_reduce(tensor, op=op, group=self.topology.group, async_op=True))
        return Pending(label, [work], keep=(tensor,))

    def broadcast(self, tensor: torch.Tensor, source: int, unit: str) -> None:
        """Copies ``tensor`` from rank ``source`` of the axis to all, in place, and waits."""
        label = observe.note("broadcast", unit)
        if self.world == 1:
            return
        self.sent_bytes += tensor.numel() * tensor.element_size() if self.rank == source else 0
        root = dist.get_global_rank(self.topology.group, source)
        work = self._launch(label, lambda: dist.broadcast(tensor, root, group=self.topology.group, async_op=True))
        Pending(label, [work], keep=(tensor,)).wait()

    def broadcast_object(self, value: Any, source: int, unit: str) -> Any:
        """Returns rank ``source``'s ``value`` (built-in containers and scalars) on every rank."""
        label = observe.note("broadcast_object", unit)
        if self.world == 1:
            return value
        box = [value]
        root = dist.get_global_rank(self.topology.group, source)
        self._launch(label, lambda: dist.broadcast_object_list(box, root, group=self.topology.group))
        return box[0]

    def gather_objects(self, value: Any, unit: str) -> list[Any]:
        """Returns every rank's ``value`` in rank order, on every rank."""
        label = observe.note("gather_objects", unit)
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        self._launch(label, lambda: dist.all_gather_object(values, value, group=self.topology.group))
        return values

    def any_rank(self, flag: bool, unit: str) -> bool:
        """Whether ``flag`` is True on any rank; the same answer everywhere. Waits for every rank, for no device where the host can vote."""
        return self.any_of([flag], unit)[0]

    def any_of(self, flags: Sequence[bool], unit: str) -> list[bool]:
        """For each of ``flags`` what ``any_rank`` says, in one message."""
        return [bool(vote) for vote in self.largest_of([float(flag) for flag in flags], unit)]

    def largest_of(self, values: Sequence[float], unit: str) -> list[float]:
        """For each of ``values`` (to 24 bits) the largest of all ranks; the same answer everywhere. Waits as ``any_rank``."""
        if self.world == 1:
            return list(values)
        votes = torch.tensor(values, dtype=torch.float32, device=host_device(self.topology))
        if votes.device.type == "cpu" and serving_backend(replace(self.topology, device=votes.device)) == "gloo":
            self._disseminate(votes, observe.note("all_reduce", unit))
        else:
            self.all_reduce(votes, unit, dist.ReduceOp.MAX).wait()
        return list(votes.tolist())

    def _disseminate(self, votes: torch.Tensor, label: str) -> None:
        """Takes the maximum of ``votes`` over ranks: in round k each rank tells the one 2^k further all it has heard. gloo's own ring would
        take twice as many messages one after the other as there are ranks, this as many as their number has digits."""
        group, distance = self.topology.group, 1
        while distance < self.world:
            heard = torch.empty_like(votes)
            source, target = (dist.get_global_rank(group, (self.rank + by) % self.world) for by in (-distance, distance))
            self.sent_bytes += votes.nbytes

            def exchange(heard: torch.Tensor = heard, source: int = source, target: int = target) -> list[Any]:
                receive = dist.irecv(heard, src=source, group=group, tag=_VOTE)
                return [dist.isend(votes, dst=target, group=group, tag=_VOTE), receive]

            Pending(label, self._launch(label, exchange)).wait()
            torch.maximum(votes, heard, out=votes)
            distance *= 2

    def connect(self) -> None:  # noqa: B027 - most back ends are connected when they are made
        """Lets a back end that connects at its first collective do so now, rather than in the first backward; collective."""

    @staticmethod
    def _launch(label: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise _collective_error(label, error) from error


class NativeCollectives(Collectives):
    """The back end's own all-gather and reduce-scatter (nccl, xccl, mpi)."""

    def connect(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.topology.device), "connect").wait()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        label = observe.note("all_gather", unit)
        if self.world == 1:
            return Pending(label, [], finish=lambda: _copy_unless_same(full, shard))
        self.sent_bytes += (self.world - 1) * shard.numel() * shard.element_size()
        work = self._launch(label, lambda: _all_gather_single(full, shard, group=self.topology.group, async_op=True))
        return Pending(label, [work], keep=(full, shard))

    def reduce_scatter(self, full: torch.Tensor, dtype: torch.dtype, unit: str) -> Pending:
        label = observe.note("reduce_scatter", unit)
        if self.world == 1:
            return Pending(label, [], lambda: full.to(dtype))
        part = torch.empty(full.numel() // self.world, dtype=full.dtype, device=full.device)
        self.sent_bytes += (self.world - 1) * part.numel() * full.element_size()
        work = self._launch(label, lambda: _reduce_scatter_single(part, full, group=self.topology.group, async_op=True))
        return Pending(label, [work], lambda: part.to(dtype), keep=(full, part))

    def exchange(self, messages: torch.Tensor, unit: str) -> Pending:
        label = observe.note("exchange", unit)
        if self.world == 1:
            return Pending(label, [], lambda: messages)
        received = torch.empty_like(messages)
        self.sent_bytes += (self.world - 1) * messages[0].numel() * messages.element_size()
        work = self._launch(label, lambda: dist.all_to_all_single(received, messages, group=self.topology.group, async_op=True))
        return Pending(label, [work], lambda: received, keep=(messages, received))

    def exchange_parts(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], unit: str) -> Pending:
        label = observe.note("exchange_parts", unit)
        if self.world == 1:
            return Pending(label, [])
        device = self.topology.device
        empty = outgoing[0].new_empty(0)
        send = [empty if rank == self.rank else part for rank, part in enumerate(outgoing)]
        receive = [0 if rank == self.rank else part.numel() for rank, part in enumerate(incoming)]
        message = torch.cat(send).to(device)
        received = torch.empty(sum(receive), dtype=message.dtype, device=device)
        self.sent_bytes += message.nbytes
        sizes = [part.numel() for part in send]
        work = self._launch(
            label, lambda: dist.all_to_all_single(received, message, receive, sizes, group=self.topology.group, async_op=True)
        )

        def finish() -> None:
            for target, part in zip(incoming, received.split(receive), strict=True):
                if part.numel():
                    target.copy_(part)

        return Pending(label, [work], finish, keep=(message, received))


class GlooCollectives(Collectives):
    """Direct exchange over gloo: each rank sends its peers their parts, and sums in rank order.

    [Note: direct exchange on gloo] gloo's own ring all-gather and reduce-scatter take 2 to 3 times as long as the same
    bytes sent directly to each peer (measured on 2 ranks), and the ring's order of summation depends on the rank.
    Sending directly and summing locally in rank order is faster and deterministic. 16-bit parts are summed in the dtype of
    ``out``, so a bf16 message is added up in fp32. Device tensors are staged through the host.
    """

    blocks_host = True

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._halves = 0  # reductions in rank order so far

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        label = observe.note("all_gather", unit)
        numel = shard.numel()
        if self.world == 1:
            return Pending(label, [], finish=lambda: _copy_unless_same(full, shard))
        if full.device.type != "cpu":
            host_full, host_shard = torch.empty(full.shape, dtype=full.dtype), shard.cpu()
            works = self._exchange(label, lambda peer: host_shard, lambda peer: host_full[peer * numel : (peer + 1) * numel])

            def finish() -> None:
                host_full[self.rank * numel : (self.rank + 1) * numel].copy_(host_shard)
                full.copy_(host_full)

            return Pending(label, works, finish, keep=(full, host_full, host_shard))
        _copy_unless_same(full[self.rank * numel : (self.rank + 1) * numel], shard)
        works = self._exchange(label, lambda peer: shard, lambda peer: full[peer * numel : (peer + 1) * numel])
        return Pending(label, works, keep=(full, shard))

    def reduce_scatter(self, full: torch.Tensor, dtype: torch.dtype, unit: str) -> Pending:
        label = observe.note("reduce_scatter", unit)
        if self.world == 1:
            return Pending(label, [], lambda: full.to(dtype))
        host = full if full.device.type == "cpu" else full.cpu()
        numel = full.numel() // self.world
        own = slice(self.rank * numel, (self.rank + 1) * numel)
        parts = [host[own]] * self.world
        for peer in self._peers():
            parts[peer] = host_memory.passing(numel, host.dtype, host.device)
        works = self._exchange(label, lambda peer: host[peer * numel : (peer + 1) * numel], lambda peer: parts[peer])
        scratch = 1 if self.rank == 0 else 0  # the sum may overwrite what was received from that rank, never what ``full`` holds
        return Pending(label, works, lambda: _sum_in_order(parts, dtype, scratch).to(full.device), keep=(full, host, *parts))

    def all_reduce(self, tensor: torch.Tensor, unit: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        if self.world == 1 or tensor.device.type == "cpu":
            return super().all_reduce(tensor, unit, op)
        host = tensor.cpu()
        pending = super().all_reduce(host, unit, op)

        def finish() -> None:
            tensor.copy_(host)

        pending.finish = finish
        return pending

    def broadcast(self, tensor: torch.Tensor, source: int, unit: str) -> None:
        if self.world == 1 or tensor.device.type == "cpu":
            super().broadcast(tensor, source, unit)
            return
        host = tensor.cpu()
        super().broadcast(host, source, unit)
        tensor.copy_(host)

    def all_reduce_in_order(self, tensor: torch.Tensor, unit: str) -> Pending:
        label = observe.note("all_reduce", unit)
        if self.world == 1:
            return Pending(label, [])
        host = tensor if tensor.device.type == "cpu" else tensor.cpu()
        parts = list(host.tensor_split(self.world))
        own = parts[self.rank]
        others = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.world)]
        works = self._exchange(label, lambda peer: parts[peer], lambda peer: others[peer])
        # The second half starts when this rank waits, which other ranks may do at another point of their sequence.
        self._halves = tag = self._halves % _TAGS + 1

        def finish() -> None:
            own.copy_(_sum_in_order(others, own.dtype))
            Pending(label, self._exchange(label, lambda peer: own, lambda peer: parts[peer], tag)).wait()
            _copy_unless_same(tensor, host)

        return Pending(label, works, finish, keep=(tensor, host, *others))

    def exchange(self, messages: torch.Tensor, unit: str) -> Pending:
        label = observe.note("exchange", unit)
        if self.world == 1:
            return Pending(label, [], lambda: messages)
        host = messages if messages.device.type == "cpu" else messages.cpu()
        received = torch.empty_like(host)
        received[self.rank] = host[self.rank]
        works = self._exchange(label, lambda peer: host[peer], lambda peer: received[peer])
        return Pending(label, works, lambda: received.to(messages.device), keep=(host, received))

    def exchange_parts(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], unit: str) -> Pending:
        label = observe.note("exchange_parts", unit)
        if self.world == 1:
            return Pending(label, [])
        send = [part.cpu() for part in outgoing]
        receive = [part if part.device.type == "cpu" else torch.empty(part.shape, dtype=part.dtype) for part in incoming]
        works = self._exchange(label, send.__getitem__, receive.__getitem__)

        def finish() -> None:
            for peer in self._peers():
                _copy_unless_same(incoming[peer], receive[peer])

        return Pending(label, works, finish, keep=(*send, *receive))

    def _peers(self) -> list[int]:
        # Start behind this rank, so that not all ranks send to rank 0 first.
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _exchange(
        self, label: str, outgoing: Callable[[int], torch.Tensor], incoming: Callable[[int], torch.Tensor], tag: int = 0
    ) -> list[Any]:
        group = self.topology.group
        works = []

        def launch() -> None:
            for peer in self._peers():
                target = dist.get_global_rank(group, peer)
                message, place = outgoing(peer), incoming(peer)
                if place.numel():
                    works.append(dist.irecv(place, src=target, group=group, tag=tag))
                if message.numel():
                    self.sent_bytes += message.numel() * message.element_size()
                    works.append(dist.isend(message, dst=target, group=group, tag=tag))

        self._launch(label, launch)
        return works


def _copy_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr() or target.device != source.device:
        target.copy_(source)


def _sum_in_order(parts: Sequence[torch.Tensor], dtype: torch.dtype, scratch: int | None = None) -> torch.Tensor:
    """parts[0] + parts[1] + ... , left to right, in ``dtype``; may use the memory of ``parts[scratch]``, one of the first two."""
    if parts[0].dtype == dtype:
        total = torch.add(parts[0], parts[1], out=parts[scratch] if scratch is not None else None)
    else:
        total = parts[0].to(dtype).add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


def build_collectives(topology: Topology) -> Collectives:
    """The back end that fits the group: direct exchange where gloo serves the device, the native calls elsewhere."""
    return GlooCollectives(topology) if serving_backend(topology) == "gloo" else NativeCollectives(topology)
