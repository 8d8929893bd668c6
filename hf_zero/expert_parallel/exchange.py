"""Rows of tokens on their way to the ranks that hold their experts, and back: one all-to-all each way, its gradient the reverse one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_zero.comm.collectives import Collectives


class _Exchange(torch.autograd.Function):
    """Rows for rank ``r`` lie together, by rising rank; so do those that come back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, anchor: torch.Tensor, collectives: Collectives, sends: list[int], receives: list[int], label: str
    ) -> torch.Tensor:
        ctx.collectives, ctx.sends, ctx.receives, ctx.label = collectives, sends, receives, label
        return exchange_rows(collectives, rows, sends, receives, label)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = exchange_rows(ctx.collectives, gradient, ctx.receives, ctx.sends, f"{ctx.label} gradients")
        return rows, None, None, None, None, None


def exchange(
    collectives: Collectives, rows: torch.Tensor, sends: Sequence[int], receives: Sequence[int], label: str, trained: bool = False
) -> torch.Tensor:
    """Sends ``sends[r]`` rows to each rank and returns the ``receives[r]`` that each has sent; differentiable, collective both ways.

    Args:
        collectives: The ranks that hold all experts together.
        rows: (sum of ``sends``, width), those for one rank together, by rising rank.
        sends: Rows for each rank; may be 0.
        receives: Rows from each rank.
        label: Name of the message.
        trained: Backward comes through here, whether or not ``rows`` depend on anything that is trained on this rank.
    """
    # Without it a rank that has no rows would have nothing to go back through, and leave the others waiting.
    anchor = torch.empty(0, device=rows.device, requires_grad=trained)
    exchanged: torch.Tensor = _Exchange.apply(rows, anchor, collectives, list(sends), list(receives), label)  # type: ignore[no-untyped-call]
    return exchanged


def exchange_rows(collectives: Collectives, rows: torch.Tensor, sends: list[int], receives: list[int], label: str) -> torch.Tensor:
    """As ``exchange``, of values."""
    width, rank = rows.shape[1], collectives.rank
    received = torch.empty((sum(receives), width), dtype=rows.dtype, device=rows.device)
    outgoing, incoming = rows.contiguous().split(sends), received.split(receives)
    incoming[rank].copy_(outgoing[rank])
    collectives.exchange_parts([part.reshape(-1) for part in outgoing], [part.view(-1) for part in incoming], label).wait()
    return received


class _Tie(torch.autograd.Function):
    """``output`` as it is; a backward that comes to it goes on to ``sources`` too, with nothing to add."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.others = len(sources)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return gradient, *[None] * ctx.others


def tie(output: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """``output``, through which backward reaches ``sources`` even where it was not computed from them: a rank without tokens."""
    tied: torch.Tensor = _Tie.apply(output, *sources)  # type: ignore[no-untyped-call]
    return tied


class _Idle(torch.autograd.Function):
    """``output`` as it is, and zeros for ``weights``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.alike = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return gradient, *(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.alike)


def beside_idle(output: torch.Tensor, weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """``output``, whose backward gives ``weights`` zeros for gradients: those of experts without tokens.

    [Note: gradients of idle experts] They come when those of other ranks do. If they did not come at all, the rank would hold their unit,
    and all that is reduced after it, until backward ends, and reduce behind messages that other ranks send later.
    """
    trained = [weight for weight in weights if weight.requires_grad] if torch.is_grad_enabled() else []
    if not trained:
        return output
    found: torch.Tensor = _Idle.apply(output, *trained)  # type: ignore[no-untyped-call]
    return found
