"""Join slices of sequences to whole ones, and cut them again, with gradients; join losses and outputs per token in the same way.

A joined tensor is whole on every rank; each rank computes with all of it and keeps its slice of the result, so that the gradient of
a joined tensor is a summand on each rank: backward adds them up and leaves each rank the sum for its slice. A tensor that was cut on this
rank is remembered, so that joining it again needs no message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.torch_internals import outside_compile
from hf_zero.sequence_parallel.layout import Layout

_CUT_FROM = "_hf_zero_cut_from"  # attribute of a slice, which torch.compile can read: the tensor it was cut from, and the dimension


class _Join(torch.autograd.Function):
    """All-gather along a dimension; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, slice_: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.collectives, ctx.dim = collectives, dim
        return _gathered(collectives, slice_, dim)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        collectives, dim = ctx.collectives, ctx.dim
        rows = gradient.unflatten(dim, (collectives.world, -1)).movedim(dim, 0).contiguous()
        dtype = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
        summed = collectives.reduce_scatter(rows.to(dtype).view(-1), dtype, "joined gradients").received()
        return None, summed.view(rows.shape[1:]).to(gradient.dtype), None


_join = outside_compile(_Join.apply)


def _gathered(collectives: Collectives, slice_: torch.Tensor, dim: int) -> torch.Tensor:
    given = slice_.detach().contiguous()
    values = torch.view_as_real(given) if given.is_complex() else given.view(torch.uint8) if given.dtype == torch.bool else given
    whole = torch.empty((collectives.world, *values.shape), dtype=values.dtype, device=values.device)
    collectives.all_gather(whole.view(-1), values.view(-1), "tokens").wait()
    joined = whole.movedim(0, dim).flatten(dim, dim + 1)
    if given.is_complex():
        return torch.view_as_complex(joined.contiguous())
    return joined.view(torch.bool) if given.dtype == torch.bool else joined


def join(collectives: Collectives, slice_: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the whole of a tensor of which each rank holds a slice; collective, differentiable.

    Args:
        collectives: The sequence-parallel group.
        slice_: This rank's slice, of one shape on all ranks.
        dim: The dimension of the tokens, from the front.
    """
    known = getattr(slice_, _CUT_FROM, None)
    if known is not None and known[1] == dim:
        whole: torch.Tensor = known[0]
        return whole
    joined: torch.Tensor = _join(collectives, slice_, dim)
    return joined


def cut(collectives: Collectives, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's slice of ``whole`` along ``dim``, which the group's size divides; differentiable, no message."""
    length = whole.shape[dim] // collectives.world
    slice_ = whole.narrow(dim, collectives.rank * length, length)
    if not whole.requires_grad:  # a computed tensor would outlive its use
        setattr(slice_, _CUT_FROM, (whole, dim))
    return slice_


def whole_of(slice_: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this rank has cut ``slice_`` from; None for other tensors."""
    known: tuple[torch.Tensor, int] | None = getattr(slice_, _CUT_FROM, None)
    return None if known is None else known[0]


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
