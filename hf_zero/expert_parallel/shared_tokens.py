"""Tokens that several ranks have alike, because they hold each layer together (tensor parallelism): each sends a part of them to experts.

[Note: who sends a token] The ranks of a model axis are given the same tokens and route them alike; were all of them to send theirs, experts
would compute them several times. So each takes a run of them, and what comes back is joined: between the two everything is as under
data parallelism, and around them whole, with whole gradients, as the split layers expect it (``tensor_parallel/solve.py``, [Note:
states]). Each token of a batch reaches its experts once, and their gradients need no correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import Range
from hf_zero.tensor_parallel.own_random import own_random


class SharedTokens:
    """Parts of rows among the ranks of a model axis.

    Args:
        collectives: These ranks.
        label: Name of the layer.
    """

    def __init__(self, collectives: Collectives, label: str) -> None:
        self.collectives, self.label = collectives, label

    def own(self, count: int) -> Range:
        """The run of ``count`` rows that this rank sends; it may be empty."""
        return _run(count, self.collectives.rank, self.collectives.world)

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's run of ``rows`` (n, ...), alike on all ranks; its gradient is joined from all. Collective in backward."""
        own = self.own(len(rows))
        if not rows.requires_grad:
            return rows[own.start : own.stop]
        found: torch.Tensor = _Part.apply(rows, self)  # type: ignore[no-untyped-call]
        return found

    def whole(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """All ``count`` rows, of which each rank has its run; each goes back through its own. Collective."""
        found: torch.Tensor = _Whole.apply(rows, self, count)  # type: ignore[no-untyped-call]
        return found

    def join(self, rows: torch.Tensor, count: int, label: str) -> torch.Tensor:
        """As ``whole``, of values."""
        runs = [_run(count, rank, self.collectives.world) for rank in range(self.collectives.world)]
        joined = rows.new_empty((count, *rows.shape[1:]))
        incoming = [joined[run.start : run.stop] for run in runs]
        incoming[self.collectives.rank].copy_(rows)
        outgoing = [rows.reshape(-1)] * self.collectives.world
        self.collectives.exchange_parts(outgoing, [part.view(-1) for part in incoming], f"{self.label}: {label}").wait()
        return joined

    @contextmanager
    def own_random(self, device: torch.device) -> Iterator[None]:
        """A context with random numbers of this rank's own: it computes with other tokens, and draws other numbers, than its neighbours."""
        restore: Callable[[], None] = own_random(self.collectives.rank, device)
        try:
            yield
        finally:
            restore()


def _run(count: int, rank: int, world: int) -> Range:
    return Range(count * rank // world, count * (rank + 1) // world)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, shared: SharedTokens) -> torch.Tensor:
        ctx.shared, ctx.count = shared, len(rows)
        own = shared.own(len(rows))
        return rows[own.start : own.stop]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.shared.join(gradient, ctx.count, "gradients of all tokens"), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, shared: SharedTokens, count: int) -> torch.Tensor:
        ctx.own = shared.own(count)
        return shared.join(rows, count, "results of all tokens")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return gradient[ctx.own.start : ctx.own.stop], None, None
