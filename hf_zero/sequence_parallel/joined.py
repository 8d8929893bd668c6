"""Values of whole sequences from those that ranks have of their parts: losses, and outputs per token; differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_zero.comm.collectives import Collectives
from hf_zero.sequence_parallel.layout import Layout


class _JoinLoss(torch.autograd.Function):
    """The sum of the ranks' losses, each times its weight; divided by the sum of weights for a mean."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, weight: torch.Tensor, is_mean: bool, collectives: Collectives) -> torch.Tensor:
        weight = weight.double()
        part = torch.where(weight > 0, loss.detach().double(), 0.0)  # a mean over no token is no number
        sums = torch.stack([part * weight, weight]) if is_mean else torch.stack([loss.detach().double(), weight])
        collectives.all_reduce(sums, "loss").wait()
        ctx.collectives = collectives
        ctx.share = torch.where(weight > 0, weight / sums[1], 0.0) if is_mean else torch.ones_like(weight)
        return (sums[0] / sums[1] if is_mean else sums[0]).to(loss.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = gradient.double().reshape(1)  # every rank has computed with the joined loss: their gradients add up
        ctx.collectives.all_reduce(total, "loss").wait()
        return (total.view(()) * ctx.share).to(gradient.dtype), None, None, None


def join_loss(collectives: Collectives, loss: torch.Tensor, counted: torch.Tensor, is_mean: bool) -> torch.Tensor:
    """Return the loss of whole sequences, the same on all ranks; collective.

    ZeRO takes the mean over the ranks' gradients: so the gradient of each rank's own part is that of one rank times the number of ranks.

    Args:
        collectives: The ranks that share sequences.
        loss: This rank's, (): of its tokens.
        counted: Number of its tokens that have a label, ().
        is_mean: ``loss`` is the mean over them; otherwise it is a sum, divided by a number that is the same on all ranks.
    """
    found: torch.Tensor = _JoinLoss.apply(loss, counted, is_mean, collectives)  # type: ignore[no-untyped-call]
    return found


class _JoinTokens(torch.autograd.Function):
    """A tensor (batch, tokens, ...) of whole sequences."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        return layout.join(part, 1, "outputs")

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout: Layout = ctx.layout
        ranks = layout.collectives.world
        rows = layout.by_place(gradient, 1).unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
        wide = torch.promote_types(gradient.dtype, torch.float32)
        summed = layout.collectives.reduce_scatter(rows.view(-1), wide, "outputs").received()
        return summed.to(gradient.dtype).view(rows.shape[1:]), None


def join_tokens(layout: Layout, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor (batch, tokens, ...) of whole sequences, of which every rank has its part; collective.

    All ranks compute with the whole: the gradient of each part is the sum over ranks, as with ``join_loss``.
    """
    found: torch.Tensor = _JoinTokens.apply(part, layout)  # type: ignore[no-untyped-call]
    return found
