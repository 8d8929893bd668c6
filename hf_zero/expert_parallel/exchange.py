"""Send rows of tokens to the ranks that hold their experts, and back: one all-to-all each way; the gradient is the reverse all-to-all.

[Note: who sends a token] The ranks of a model axis have the same tokens and route them in the same way. If all of them sent their tokens,
experts would compute each token several times. So each rank sends a part of the tokens, and the results are all-gathered. Between the two
steps ranks have different tokens, as in data parallelism. Before and after, tensors and gradients are complete, as the split layers expect
(``tensor_parallel/solve.py``, [Note: states]). Each token of a batch reaches its experts once, and gradients need no correction.

[Note: derivatives of exchanges] A backward with ``create_graph`` (a gradient penalty) is differentiated again, so a backward calls these
functions, not the collectives ([Note: derivatives of collectives]): an all-to-all is the derivative of the reverse one, and so are part
and whole. All ranks must issue the same exchanges in the same order then too, and autograd orders them by the graph. So the graph of a
backward has the same exchanges in the same chain on every rank: a rank without tokens gets the ties and the idle gradients there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, cut, paste
from hf_zero.tensor_parallel.same_data import own_random


class _Exchange(torch.autograd.Function):
    """Differentiable all-to-all of rows; the rows for each rank are contiguous, in the order of ranks, and so are the received rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, anchor: torch.Tensor, collectives: Collectives, sends: list[int], receives: list[int], label: str
    ) -> torch.Tensor:
        ctx.collectives, ctx.sends, ctx.receives, ctx.label = collectives, sends, receives, label
        return exchange_rows(collectives, rows, sends, receives, label)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        label = f"{ctx.label} gradients"
        rows = exchange(ctx.collectives, gradient, ctx.receives, ctx.sends, label, trained=torch.is_grad_enabled())
        return rows, None, None, None, None, None


def exchange(
    collectives: Collectives, rows: torch.Tensor, sends: Sequence[int], receives: Sequence[int], label: str, trained: bool = False
) -> torch.Tensor:
    """Send ``sends[r]`` rows to each rank r, and return the ``receives[r]`` rows from each; differentiable; collective, also in backward.

    Args:
        collectives: The ranks that hold all experts together.
        rows: (sum of ``sends``, width) rows, contiguous for each rank, in the order of ranks.
        sends: Number of rows for each rank; may be 0.
        receives: Number of rows from each rank.
        label: Name of the message.
        trained: Whether backward will run through this layer, even if ``rows`` need no gradient on this rank.
    """
    # Gives a rank without rows a backward too, for which the other ranks wait.
    anchor = torch.empty(0, device=rows.device, requires_grad=trained)
    exchanged: torch.Tensor = _Exchange.apply(rows, anchor, collectives, list(sends), list(receives), label)  # type: ignore[no-untyped-call]
    return exchanged


def exchange_rows(collectives: Collectives, rows: torch.Tensor, sends: list[int], receives: list[int], label: str) -> torch.Tensor:
    """Exchange rows like ``exchange``, but without autograd; collective."""
    width, rank = rows.shape[1], collectives.rank
    received = torch.empty((sum(receives), width), dtype=rows.dtype, device=rows.device)
    outgoing, incoming = rows.contiguous().split(sends), received.split(receives)
    incoming[rank].copy_(outgoing[rank])
    collectives.exchange_parts([part.reshape(-1) for part in outgoing], [part.view(-1) for part in incoming], label).wait()
    return received


class _Tie(torch.autograd.Function):
    """Identity of ``output`` whose backward also runs the graphs of ``sources``, with no gradient for them, or with zeros that depend on
    the gradient if it is differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.layouts = _layouts_of(sources)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if not torch.is_grad_enabled():
            return gradient, *[None] * len(ctx.layouts)
        return gradient, *(tie(zeros, gradient) for zeros in _zeros(ctx.layouts))


_Layouts = list[tuple[torch.Size, torch.dtype, torch.device]]


def _layouts_of(tensors: Iterable[torch.Tensor]) -> _Layouts:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


def _zeros(layouts: _Layouts) -> Iterator[torch.Tensor]:
    """Yield zeros of each shape, which occupy the memory of one element."""
    return (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in layouts)


def tie(output: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """Return ``output`` with a graph in which backward also reaches ``sources``, even if ``output`` does not depend on them (on a rank
    without tokens).
    """
    tied: torch.Tensor = _Tie.apply(output, *sources)  # type: ignore[no-untyped-call]
    return tied


class _Idle(torch.autograd.Function):
    """Identity of ``output`` whose backward also gives gradients of zero to ``weights``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.weights, ctx.layouts = weights, _layouts_of(weights)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return beside_idle(gradient, ctx.weights), *_zeros(ctx.layouts)


def beside_idle(output: torch.Tensor, weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return ``output`` with a backward that gives gradients of zero to ``weights``, the weights of experts without tokens.

    [Note: gradients of idle experts] The zero gradients arrive at the same point of backward as the gradients on other ranks. Without them
    the rank would postpone the reduction of their unit, and of all units after it, to the end of backward, and so reduce in another order
    than the other ranks.
    """
    trained = [weight for weight in weights if weight.requires_grad] if torch.is_grad_enabled() else []
    if not trained:
        return output
    found: torch.Tensor = _Idle.apply(output, *trained)  # type: ignore[no-untyped-call]
    return found


class _Join(torch.autograd.Function):
    """The whole of a parameter of which each rank holds some experts; backward sums its gradient over ranks, and takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, part: TpShard, collectives: Collectives, counts: bool, label: str) -> torch.Tensor:
        ctx.part, ctx.collectives, ctx.counts, ctx.label = part, collectives, counts, label
        whole = values.new_zeros(part.full_shape)
        paste(whole, values, part.dim, part.ranges)
        collectives.all_reduce(whole, label).wait()
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _CutSum.apply(gradient, ctx.part, ctx.collectives, ctx.counts, ctx.label), None, None, None, None  # type: ignore[no-untyped-call]


class _CutSum(torch.autograd.Function):
    """This rank's part of the sum over ranks of the tensors that count; backward gives these the whole of the parts' gradients."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, part: TpShard, collectives: Collectives, counts: bool, label: str) -> torch.Tensor:
        ctx.part, ctx.collectives, ctx.counts, ctx.label = part, collectives, counts, label
        total = whole.clone(memory_format=torch.contiguous_format) if counts else torch.zeros_like(whole).contiguous()
        collectives.all_reduce(total, f"gradient of {label}").wait()
        return cut(total, part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        whole = join_experts(gradient, ctx.part, ctx.collectives, ctx.counts, ctx.label)
        return whole * ctx.counts, None, None, None, None


def join_experts(values: torch.Tensor, part: TpShard, collectives: Collectives, counts: bool, label: str) -> torch.Tensor:
    """Return the parameter with all experts for a loss that computes with it; collective, also in backward.

    Ranks have other batches, so the gradient of a penalty is a mean over ranks as that of any loss: each rank's part gets the gradients of
    all ranks.

    Args:
        values: This rank's tensor; it may be empty.
        part: The part of the parameter that it is.
        collectives: The ranks that hold all experts together.
        counts: Whether this rank's gradient counts: of ranks that compute one loss together, one does.
        label: Name of the parameter.
    """
    found: torch.Tensor = _Join.apply(values, part, collectives, counts, label)  # type: ignore[no-untyped-call]
    return found


class SharedTokens:
    """The division of rows among the ranks of a model axis, which all have the same rows.

    Args:
        collectives: Collectives of the model axis.
        label: Name of the layer.
    """

    def __init__(self, collectives: Collectives, label: str) -> None:
        self.collectives, self.label = collectives, label

    def own(self, count: int) -> Range:
        """Return the contiguous range of ``count`` rows that this rank sends; it may be empty."""
        return _run(count, self.collectives.rank, self.collectives.world)

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``rows`` (n, ...), which are equal on all ranks; backward all-gathers the gradients of the parts.
        Collective in backward.
        """
        own = self.own(len(rows))
        if not rows.requires_grad:
            return rows[own.start : own.stop]
        found: torch.Tensor = _Part.apply(rows, self, "gradients of all tokens")  # type: ignore[no-untyped-call]
        return found

    def whole(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """All-gather ``count`` rows, of which each rank has its part; backward gives each rank the gradient of its part. Collective."""
        found: torch.Tensor = _Whole.apply(rows, self, count, "results of all tokens")  # type: ignore[no-untyped-call]
        return found

    def join(self, rows: torch.Tensor, count: int, label: str) -> torch.Tensor:
        """All-gather rows like ``whole``, but without autograd; collective."""
        runs = [_run(count, rank, self.collectives.world) for rank in range(self.collectives.world)]
        joined = rows.new_empty((count, *rows.shape[1:]))
        incoming = [joined[run.start : run.stop] for run in runs]
        incoming[self.collectives.rank].copy_(rows)
        outgoing = [rows.reshape(-1)] * self.collectives.world
        self.collectives.exchange_parts(outgoing, [part.view(-1) for part in incoming], f"{self.label}: {label}").wait()
        return joined

    @contextmanager
    def own_random(self, device: torch.device) -> Iterator[None]:
        """Return a context with random numbers of this rank's own: it computes with other tokens than the other ranks, so dropout must
        differ.
        """
        restore: Callable[[], None] = own_random(self.collectives.rank, device)
        try:
            yield
        finally:
            restore()


def _run(count: int, rank: int, world: int) -> Range:
    return Range(count * rank // world, count * (rank + 1) // world)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, shared: SharedTokens, label: str) -> torch.Tensor:
        ctx.shared, ctx.count, ctx.label = shared, len(rows), label
        own = shared.own(len(rows))
        return rows[own.start : own.stop]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _Whole.apply(gradient, ctx.shared, ctx.count, ctx.label), None, None  # type: ignore[no-untyped-call]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, shared: SharedTokens, count: int, label: str) -> torch.Tensor:
        ctx.shared = shared
        return shared.join(rows, count, label)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _Part.apply(gradient, ctx.shared, "gradients of results"), None, None, None  # type: ignore[no-untyped-call]
