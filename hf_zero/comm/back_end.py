"""Choose the collectives that fit a group, carry them over a back end that has all of them (nccl, xccl, mpi), and record them in a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from hf_zero import observe
from hf_zero.comm.collectives import Collectives, Pending, copy_unless_same
from hf_zero.comm.comms_log import Call, CommsLog, DeviceWatch, HostWatch, Watch, current_log
from hf_zero.comm.direct_exchange import AllToAllCollectives, Forwarded, GlooCollectives
from hf_zero.comm.process_groups import MOST_CONNECTED, all_gather_single, is_pretended, serving_backend
from hf_zero.comm.roll_call import sign_in
from hf_zero.comm.topology import Topology
from hf_zero.system.planning import planned_value

# torch 2.13 renamed this function; both names are the same.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NativeCollectives(Collectives):
    """Collectives that use the back end's own all-gather and reduce-scatter (nccl, xccl, mpi)."""

    def connect(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.topology.device), "connect").wait()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        label = observe.note("all_gather", unit)
        if self.world == 1:
            return Pending(label, [], finish=lambda: copy_unless_same(full, shard))
        self.sent_bytes += (self.world - 1) * shard.numel() * shard.element_size()
        work = self.launch(label, lambda: all_gather_single(full, shard, group=self.topology.group, async_op=True))
        return Pending(label, [work], group=self.topology.group, keep=(full, shard))

    def reduce_scatter(self, full: torch.Tensor, dtype: torch.dtype, unit: str) -> Pending:
        label = observe.note("reduce_scatter", unit)
        if self.world == 1:
            return Pending(label, [], lambda: full)
        part = torch.empty(full.numel() // self.world, dtype=full.dtype, device=full.device)
        self.sent_bytes += (self.world - 1) * part.numel() * full.element_size()
        work = self.launch(label, lambda: _reduce_scatter_single(part, full, group=self.topology.group, async_op=True))
        return Pending(label, [work], lambda: part, group=self.topology.group, keep=(full, part))

    def exchange(self, messages: torch.Tensor, unit: str) -> Pending:
        label = observe.note("exchange", unit)
        if self.world == 1:
            return Pending(label, [], lambda: messages)
        received = torch.empty_like(messages)
        self.sent_bytes += (self.world - 1) * messages[0].numel() * messages.element_size()
        work = self.launch(label, lambda: dist.all_to_all_single(received, messages, group=self.topology.group, async_op=True))
        return Pending(label, [work], lambda: received, group=self.topology.group, keep=(messages, received))

    def exchange_parts(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], unit: str) -> Pending:
        label = observe.note("exchange_parts", unit)
        if self.world == 1:
            return Pending(label, [])
        device = self.topology.device
        empty = outgoing[0].new_empty(0)
        send = [empty if rank == self.rank else part for rank, part in enumerate(outgoing)]
        receive = [0 if rank == self.rank else part.numel() for rank, part in enumerate(incoming)]
        message, received = _single(send, device), _single([incoming[rank] for rank, numel in enumerate(receive) if numel], device)
        message = torch.cat(send).to(device) if message is None else message
        copied = received is None
        received = torch.empty(sum(receive), dtype=message.dtype, device=device) if received is None else received
        self.sent_bytes += message.nbytes
        sizes = [part.numel() for part in send]
        work = self.launch(
            label, lambda: dist.all_to_all_single(received, message, receive, sizes, group=self.topology.group, async_op=True)
        )

        def finish() -> None:
            for target, part in zip(incoming, received.split(receive), strict=True):
                if copied and part.numel():
                    target.copy_(part)

        return Pending(label, [work], finish, group=self.topology.group, keep=(message, received))


def _single(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return the only part that is not empty, if the network can read and write it in place; else None."""
    filled = [part for part in parts if part.numel()]
    return filled[0] if len(filled) == 1 and filled[0].is_contiguous() and filled[0].device == device else None


class _Pretended(Collectives):
    """Collectives of a memory plan: they send nothing, and results are as if all ranks had this rank's values."""

    pretended = True

    def broadcast_object(self, value: Any, source: int, unit: str) -> Any:
        observe.note("broadcast_object", unit)
        return value if self.world == 1 else planned_value(self.rank == source, value, unit)

    def gather_objects(self, value: Any, unit: str) -> list[Any]:
        observe.note("gather_objects", unit)
        return [value] * self.world

    def _read(self, votes: torch.Tensor, own: Sequence[float]) -> list[float]:
        return list(own)


class _PretendedNative(_Pretended, NativeCollectives):
    pass


class _PretendedGloo(_Pretended, GlooCollectives):
    def _hand_on(self, task: Callable[[], None]) -> Forwarded:
        task()  # in this thread, because a plan counts the work of one thread
        done: Future[None] = Future()
        done.set_result(None)
        return Forwarded(done)


class _PretendedAllToAll(AllToAllCollectives, _PretendedGloo):
    pass


def build_collectives(topology: Topology) -> Collectives:
    """Return direct exchange if gloo serves the device, with all-to-alls for many ranks; otherwise the native collectives. In a memory
    plan, return collectives of the same kind for ranks that do not exist.
    """
    pretended = is_pretended(topology.group)
    if serving_backend(topology.group, topology.device) != "gloo":
        return (_PretendedNative if pretended else NativeCollectives)(topology)
    if topology.world <= MOST_CONNECTED:
        return (_PretendedGloo if pretended else GlooCollectives)(topology)
    return (_PretendedAllToAll if pretended else AllToAllCollectives)(topology)


def open_collectives(topology: Topology) -> Collectives:
    """Return ``build_collectives(topology)``, recorded if this process has a comms log, and with the collectives of all data-parallel ranks
    if there are replicas.
    """
    sign_in()
    inner, log = build_collectives(topology), current_log()
    opened = inner if log is None else RecordedCollectives(inner, log)
    if topology.replicate is not None and topology.joint is not None:
        opened.joint = open_collectives(topology.joint)
    return opened


class _Stamp:
    """Object in front of a collective's works; its ``wait`` records when a caller begins to wait for them."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def wait(self) -> None:
        """Record the present time as the begin of the wait."""
        self._call.waits = self._call.watch.now()


class RecordedCollectives(Collectives):
    """Wrapper that forwards every call to ``inner`` and records kind, bytes and times of the calls that use the network.

    Attributes:
        inner: The wrapped collectives.
        log: The comms log.
    """

    def __init__(self, inner: Collectives, log: CommsLog) -> None:
        self.inner = inner
        self.topology = inner.topology
        self.take_number()
        self.log = log
        self.blocks_host, self.pretended = inner.blocks_host, inner.pretended
        self._watch: Watch = HostWatch() if inner.blocks_host or inner.topology.device.type == "cpu" else DeviceWatch(inner.topology.device)

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """Return the number of bytes sent so far."""
        return self.inner.sent_bytes

    def set_ranks_per_node(self, per_node: int) -> None:
        self.inner.set_ranks_per_node(per_node)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        return self._record("all_gather", unit, full, lambda: self.inner.all_gather(full, shard, unit))

    def reduce_scatter(self, full: torch.Tensor, dtype: torch.dtype, unit: str) -> Pending:
        return self._record("reduce_scatter", unit, full, lambda: self.inner.reduce_scatter(full, dtype, unit))

    def exchange(self, messages: torch.Tensor, unit: str) -> Pending:
        return self._record("all_to_all", unit, messages, lambda: self.inner.exchange(messages, unit))

    def exchange_parts(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], unit: str) -> Pending:
        nbytes = sum(part.nbytes for rank, part in enumerate(outgoing) if rank != self.rank)
        return self._record_bytes("all_to_all", unit, nbytes, lambda: self.inner.exchange_parts(outgoing, incoming, unit))

    def all_reduce_in_order(self, tensor: torch.Tensor, unit: str) -> Pending:
        return self._record("all_reduce", unit, tensor, lambda: self.inner.all_reduce_in_order(tensor, unit))

    def all_reduce(self, tensor: torch.Tensor, unit: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        return self._record("all_reduce", unit, tensor, lambda: self.inner.all_reduce(tensor, unit, op))

    def begin_vote(self, values: Sequence[float], unit: str) -> Pending | None:
        call = self.log.begin("all_reduce", unit, 4 * len(values), self.world, self._watch) if self.world > 1 else None
        vote = self.inner.begin_vote(values, unit)
        if call is None or vote is None:
            return vote
        # Messages between ranks of gloo can be waited for once, so the end of the wait is the vote's.
        return self._noted(call, vote)

    def wait_for_vote(self, vote: Pending | None, values: Sequence[float]) -> list[float]:
        return self.inner.wait_for_vote(vote, values)

    def connect(self) -> None:
        self.inner.connect()

    def broadcast(self, tensor: torch.Tensor, source: int, unit: str) -> None:
        self._record_blocking("broadcast", unit, tensor.nbytes, lambda: self.inner.broadcast(tensor, source, unit))

    def broadcast_object(self, value: Any, source: int, unit: str) -> Any:
        return self._record_blocking("broadcast_object", unit, 0, lambda: self.inner.broadcast_object(value, source, unit))

    def gather_objects(self, value: Any, unit: str) -> list[Any]:
        values: list[Any] = self._record_blocking("gather_objects", unit, 0, lambda: self.inner.gather_objects(value, unit))
        return values

    def _record(self, operation: str, unit: str, message: torch.Tensor, issue: Callable[[], Pending]) -> Pending:
        return self._record_bytes(operation, unit, message.nbytes, issue)

    def _record_bytes(self, operation: str, unit: str, nbytes: int, issue: Callable[[], Pending]) -> Pending:
        call = self.log.begin(operation, unit, nbytes, self.world, self._watch) if self.world > 1 else None
        pending = issue()
        if call is None:
            return pending
        call.ended = self._watch.end_of(pending.works)
        return self._noted(call, pending)

    def _noted(self, call: Call, pending: Pending) -> Pending:
        """Record when this rank begins to wait for ``pending``, and the end of the wait."""
        finish = pending.finish

        def finish_and_note() -> torch.Tensor | None:
            result = finish() if finish is not None else None
            self.log.end(call)
            return result

        pending.works = [_Stamp(call), *pending.works]
        pending.finish = finish_and_note
        return pending

    def _record_blocking(self, operation: str, unit: str, nbytes: int, run: Callable[[], Any]) -> Any:
        call = self.log.begin(operation, unit, nbytes, self.world, self._watch) if self.world > 1 else None
        result = run()
        if call is not None:
            self.log.end(call)
        return result
