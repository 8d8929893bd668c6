"""Join slices of sequences to whole ones, and cut them again, with gradients.

A joined tensor is whole on every rank; each rank computes with all of it and keeps its slice of what comes out, so that the gradient of
a joined tensor is a summand on each rank: backward adds them up and leaves each rank the sum for its slice. What was cut on this rank is
remembered, so that joining it again needs no message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.torch_internals import outside_compile

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
