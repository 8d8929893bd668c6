"""Choose the collectives that fit a group, and carry them over a back end that has all of them (nccl, xccl, mpi)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from hf_zero import observe
from hf_zero.comm.collectives import Collectives, Pending, copy_unless_same
from hf_zero.comm.comms_log import current_log
from hf_zero.comm.direct_exchange import AllToAllCollectives, Forwarded, GlooCollectives
from hf_zero.comm.process_groups import MOST_CONNECTED, all_gather_single, is_pretended, serving_backend
from hf_zero.comm.recorded import RecordedCollectives
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
            return Pending(label, [], lambda: full.to(dtype))
        part = torch.empty(full.numel() // self.world, dtype=full.dtype, device=full.device)
        self.sent_bytes += (self.world - 1) * part.numel() * full.element_size()
        work = self.launch(label, lambda: _reduce_scatter_single(part, full, group=self.topology.group, async_op=True))
        return Pending(label, [work], lambda: part.to(dtype), group=self.topology.group, keep=(full, part))

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
        message = torch.cat(send).to(device)
        received = torch.empty(sum(receive), dtype=message.dtype, device=device)
        self.sent_bytes += message.nbytes
        sizes = [part.numel() for part in send]
        work = self.launch(
            label, lambda: dist.all_to_all_single(received, message, receive, sizes, group=self.topology.group, async_op=True)
        )

        def finish() -> None:
            for target, part in zip(incoming, received.split(receive), strict=True):
                if part.numel():
                    target.copy_(part)

        return Pending(label, [work], finish, group=self.topology.group, keep=(message, received))


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
