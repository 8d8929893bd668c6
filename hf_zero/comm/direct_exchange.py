"""Collectives over gloo: send each peer its part, and sum in rank order.

For many ranks, parts are sent by one all-to-all instead. A relay thread forwards messages of other nodes to the ranks of this node while
this rank computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from hf_zero import observe
from hf_zero.comm.collectives import TAGS, Collectives, Pending, as_sent, copy_unless_same
from hf_zero.comm.topology import Topology
from hf_zero.memory import host_memory

_Task = tuple[Callable[[], None], "Future[None]"]


class Forwarded:
    """Handle of a task on the relay thread; its ``wait`` works like that of a torch.distributed work."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until the task is done.

        Raises:
            RuntimeError: The network failed.
        """
        self._future.result()


class Relay:
    """Runner of tasks in the order of submission, in a thread that ends with this object."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # A daemon: a task that waits for a dead rank must not keep the process from ending.
        Thread(target=_run, args=(self._tasks,), daemon=True, name="hf_zero relay").start()
        weakref.finalize(self, self._tasks.put, None)

    def start(self, task: Callable[[], None]) -> Forwarded:
        """Submit ``task``, to run after all earlier ones; return its handle."""
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return Forwarded(future)


def _run(tasks: SimpleQueue[_Task | None]) -> None:
    while (given := tasks.get()) is not None:
        task, future = given
        try:
            task()
        except BaseException as error:  # the waiting thread raises it
            future.set_exception(error)
        else:
            future.set_result(None)
        del given, task, future  # frees the tensors that they reference


_RELAYED = TAGS + 2  # tag of messages of another node that a rank of this node forwards


class GlooCollectives(Collectives):
    """Direct exchange over gloo: each rank sends its peers their parts, and sums in rank order.

    [Note: direct exchange on gloo] gloo's own ring all-gather and reduce-scatter take 2 to 3 times as long as the same bytes sent directly
    to each peer (measured on 2 ranks), and the ring's order of summation depends on the rank. Sending directly and summing locally in rank
    order is faster and deterministic. 16-bit parts are summed in ``dtype``, so a bf16 message can be summed in fp32. Device
    tensors are copied through the host.

    [Note: gathers over nodes] Sent directly, a shard crosses to another node once for each rank there. Where the nodes are known, a rank
    sends its shard to one rank of each other node, the rank at its own position there. That rank forwards the shard to the ranks of its
    node, so each shard enters a node once, and the number of messages stays the same. A thread forwards (``Relay``), and it waits only for
    messages that the main threads of other nodes send, so a rank that waits late for a gather delays no other rank. Reductions are sent
    directly, because sums inside nodes first would round differently.
    """

    blocks_host = True

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._halves = 0  # number of reductions in rank order so far
        self._per_node = 0  # ranks of the axis on each node, if there are several nodes and a node has several ranks
        self._relay: Relay | None = None

    def set_ranks_per_node(self, per_node: int) -> None:
        self._per_node = per_node if 1 < per_node < self.world else 0

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        label, full, shard = observe.note("all_gather", unit), as_sent(full), as_sent(shard)
        if self.world == 1:
            return Pending(label, [], finish=lambda: copy_unless_same(full, shard))
        host = full if full.device.type == "cpu" else torch.empty(full.shape, dtype=full.dtype)
        parts = host.view(self.world, shard.numel())
        copy_unless_same(parts[self.rank], shard)
        if self._per_node and shard.numel():
            works = self._gather_over_nodes(label, parts)
        else:
            works = self._exchange(label, lambda peer: parts[self.rank], parts.__getitem__)
        return Pending(
            label,
            works,
            None if host is full else lambda: copy_unless_same(full, host),
            group=self.topology.group,
            keep=(full, host, shard),
        )

    def _gather_over_nodes(self, label: str, parts: torch.Tensor) -> list[Any]:
        """Send every rank's row of ``parts`` (world, n) to all ranks; each row crosses the links between two nodes once."""
        (here, place), nodes = divmod(self.rank, self._per_node), self.world // self._per_node
        away = [(here + step) % nodes for step in range(1, nodes)]
        mates = [here * self._per_node + (place + step) % self._per_node for step in range(1, self._per_node)]
        own, group = parts[self.rank], self.topology.group
        far = [self._exchange(label, lambda _: own, parts.__getitem__, peers=[node * self._per_node + place]) for node in away]
        works = self._exchange(label, lambda _: own, parts.__getitem__, peers=mates)
        known = {mate: dist.get_global_rank(group, mate) for mate in mates}

        def receive() -> None:
            for mate, source in known.items():
                rows = [parts[node * self._per_node + mate % self._per_node] for node in away]
                works.extend(dist.irecv(row, src=source, group=group, tag=_RELAYED) for row in rows)

        def forward() -> None:
            sends: list[Any] = []
            for node, arriving in zip(away, far, strict=True):
                for work in arriving:
                    work.wait()
                row = parts[node * self._per_node + place]
                sends += [dist.isend(row, dst=target, group=group, tag=_RELAYED) for target in known.values()]
            for work in sends:
                work.wait()

        self.launch(label, receive)
        self.sent_bytes += len(away) * len(mates) * own.nbytes
        return [self._hand_on(forward), *works]

    def _hand_on(self, task: Callable[[], None]) -> Forwarded:
        """Run ``task``, which forwards shards of other nodes to the ranks of this node, beside the computation."""
        self._relay = self._relay or Relay()
        return self._relay.start(task)

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
        scratch = 1 if self.rank == 0 else 0  # the sum may overwrite the part received from that rank, never memory of ``full``
        return Pending(
            label, works, lambda: sum_in_order(parts, dtype, scratch).to(full.device), group=self.topology.group, keep=(full, host, *parts)
        )

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
        # The second half starts when this rank waits; other ranks may wait at another point of their sequence.
        self._halves = tag = self._halves % TAGS + 1

        def finish() -> None:
            own.copy_(sum_in_order(others, own.dtype))
            Pending(label, self._exchange(label, lambda peer: own, lambda peer: parts[peer], tag), group=self.topology.group).wait()
            copy_unless_same(tensor, host)

        return Pending(label, works, finish, group=self.topology.group, keep=(tensor, host, *others))

    def exchange(self, messages: torch.Tensor, unit: str) -> Pending:
        label = observe.note("exchange", unit)
        if self.world == 1:
            return Pending(label, [], lambda: messages)
        host = messages if messages.device.type == "cpu" else messages.cpu()
        received = torch.empty_like(host)
        received[self.rank] = host[self.rank]
        works = self._exchange(label, lambda peer: host[peer], lambda peer: received[peer])
        return Pending(label, works, lambda: received.to(messages.device), group=self.topology.group, keep=(host, received))

    def exchange_parts(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], unit: str) -> Pending:
        label = observe.note("exchange_parts", unit)
        if self.world == 1:
            return Pending(label, [])
        send = [part.cpu() for part in outgoing]
        receive = [part if part.device.type == "cpu" else torch.empty(part.shape, dtype=part.dtype) for part in incoming]
        works = self._exchange(label, send.__getitem__, receive.__getitem__)

        def finish() -> None:
            for peer in self._peers():
                copy_unless_same(incoming[peer], receive[peer])

        return Pending(label, works, finish, group=self.topology.group, keep=(*send, *receive))

    def _peers(self) -> list[int]:
        # Start with the next rank, so that not all ranks send to rank 0 first.
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _exchange(
        self,
        label: str,
        outgoing: Callable[[int], torch.Tensor],
        incoming: Callable[[int], torch.Tensor],
        tag: int = 0,
        peers: Sequence[int] | None = None,
    ) -> list[Any]:
        group = self.topology.group
        works = []

        def launch() -> None:
            for peer in self._peers() if peers is None else peers:
                message, place = outgoing(peer), incoming(peer)
                if place.numel():
                    works.append(dist.irecv(place, group=group, tag=tag, group_src=peer))
                if message.numel():
                    self.sent_bytes += message.numel() * message.element_size()
                    works.append(dist.isend(message, group=group, tag=tag, group_dst=peer))

        self.launch(label, launch)
        return works


def sum_in_order(parts: Sequence[torch.Tensor], dtype: torch.dtype, scratch: int | None = None) -> torch.Tensor:
    """Return parts[0] + parts[1] + ... , left to right, in ``dtype``; may reuse the memory of ``parts[scratch]`` (0 or 1)."""
    if parts[0].dtype == dtype:
        total = torch.add(parts[0], parts[1], out=parts[scratch] if scratch is not None else None)
    else:
        total = parts[0].to(dtype).add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


class AllToAllCollectives(GlooCollectives):
    """Direct exchange whose reductions send all parts in one all-to-all of gloo.

    [Note: many ranks on gloo] A reduction is the same number of messages and bytes either way. But a send and a receive per peer take time
    of the host: for small units on 32 ranks, twice the time of one all-to-all (``benchmarks/collectives/gloo_ranks.py``). Parts are summed
    here in the same rank order, so the result does not depend on which class is used. gloo's own reduce-scatter sums in another order, sums
    16-bit parts in 16 bits, and takes longer than both; its all-gather takes longer, too.
    """

    def reduce_scatter(self, full: torch.Tensor, dtype: torch.dtype, unit: str) -> Pending:
        label = observe.note("reduce_scatter", unit)
        host = full if full.device.type == "cpu" else full.cpu()
        received = host_memory.passing(host.numel(), host.dtype, host.device)
        parts = received.view(self.world, -1).unbind()
        return self._swap(label, host, received, lambda: sum_in_order(parts, dtype, scratch=0).to(full.device))

    def exchange(self, messages: torch.Tensor, unit: str) -> Pending:
        label = observe.note("exchange", unit)
        host = messages.contiguous() if messages.device.type == "cpu" else messages.cpu()
        received = torch.empty_like(host)
        return self._swap(label, host, received, lambda: received.to(messages.device))

    def _swap(self, label: str, host: torch.Tensor, received: torch.Tensor, finish: Callable[[], torch.Tensor]) -> Pending:
        self.sent_bytes += host.nbytes // self.world * (self.world - 1)
        work = self.launch(label, lambda: dist.all_to_all_single(received, host, group=self.topology.group, async_op=True))
        return Pending(label, [work], finish, group=self.topology.group, keep=(host, received))
