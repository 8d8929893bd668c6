"""Record collectives in a comms log while another back end carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.comms_log import Call, CommsLog
from hf_zero.comm.watch import DeviceWatch, HostWatch, Watch


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

    def lie_in_nodes(self, per_node: int) -> None:
        self.inner.lie_in_nodes(per_node)

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

    def told(self, vote: Pending | None, values: Sequence[float]) -> list[float]:
        return self.inner.told(vote, values)

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
