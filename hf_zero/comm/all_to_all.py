"""Collectives over gloo for many ranks: sums of parts that one all-to-all has brought."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hf_zero import observe
from hf_zero.comm.collectives import Pending
from hf_zero.comm.direct_exchange import GlooCollectives, sum_in_order
from hf_zero.memory import host_memory


class AllToAllCollectives(GlooCollectives):
    """Direct exchange whose reductions send their parts in one call of gloo.

    [Note: many ranks on gloo] A reduction is as many messages either way, and as many bytes. But a send and a receive of our own for each
    peer take time of the host, on 32 ranks twice what one all-to-all takes for small units (``benchmarks/gloo_ranks.py``). Parts are
    summed here in rank order as before, so no bit depends on the number at which the one takes over from the other. gloo's own
    reduce-scatter sums in another order, 16-bit parts in 16 bit, and takes longer than both; so does its all-gather.
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
