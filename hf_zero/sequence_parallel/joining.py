"""Join slices of sequences to whole ones, and cut them again, with gradients; join losses and outputs per token in the same way.

A joined tensor is whole on every rank; each rank computes with all of it and keeps its slice of the result, so that the gradient of
a joined tensor is a summand on each rank: backward adds them up and leaves each rank the sum for its slice. A tensor that was cut on this
rank is remembered, so that joining it again needs no message. Backwards call functions that have a derivative themselves
([Note: derivatives of collectives]).
"""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.torch_internals import outside_compile
from hf_zero.sequence_parallel.exchange import join_slices


class Layout:
    """Division of sequences over the ranks of one group: the tokens of each rank, and the two ways between slices and whole sequences.

    [Note: head and tail] In causal attention a token attends to those before it, so the last part of a sequence costs most. Of 2N equal
    parts the rank with number r of N holds part r and part 2N-1-r: the two together cost the same on every rank. With sequence parallelism
    inside, the ranks of each place divide what that place holds, in its order, and attention sees it whole.
    Attributes:
        collectives: The group: ``places * inside`` ranks.
        places: Ranks, or groups of ranks that exchange heads, each with other tokens; context parallelism.
        inside: Ranks of one place; sequence parallelism.
        place: This rank's place.
    """

    def __init__(self, collectives: Collectives, inside: int = 1) -> None:
        self.collectives = collectives
        self.inside = inside
        self.places = collectives.world // self.inside
        self.place, self._turn = divmod(collectives.rank, self.inside)

    @property
    def multiple(self) -> int:
        """Return the number that a sequence's length has to be a multiple of."""
        return 2 * self.places * self.inside

    def parts(self, length: int, place: int | None = None) -> list[tuple[int, int]]:
        """Return the two runs of tokens of a place, as (first, end).

        Args:
            length: Tokens of a whole sequence; a multiple of ``multiple``.
            place: The place; None is this rank's.
        """
        place, width = self.place if place is None else place, length // (2 * self.places)
        return [(first * width, (first + 1) * width) for first in (place, 2 * self.places - 1 - place)]

    def tokens_of_place(self, length: int, place: int | None = None) -> torch.Tensor:
        """Return the numbers of the tokens that a place holds, (length / places,); arguments as ``parts``."""
        return torch.cat([torch.arange(first, end) for first, end in self.parts(length, place)])

    def tokens(self, length: int) -> torch.Tensor:
        """Return the numbers of this rank's tokens among the ``length`` of whole sequences, (length / ranks,)."""
        return self.tokens_of_place(length).chunk(self.inside)[self._turn]

    def in_order(self, by_place: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a tensor whose dimension ``dim`` has the tokens of all places, one place after the other, in the order of sequences."""
        halves = by_place.unflatten(dim, (self.places, 2, -1))
        head, tail = halves.select(dim + 1, 0), halves.select(dim + 1, 1).flip(dim)
        return torch.cat([head, tail], dim).flatten(dim, dim + 1)

    def by_place(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the inverse of ``in_order``."""
        head, tail = whole.unflatten(dim, (2, self.places, -1)).unbind(dim)
        return torch.stack([head, tail.flip(dim)], dim + 1).flatten(dim, dim + 2)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor that has whole sequences along ``dim``."""
        return whole.index_select(dim, self.tokens(whole.shape[dim]).to(whole.device))

    def join(self, part: torch.Tensor, dim: int, what: str) -> torch.Tensor:
        """Return the tensor of whole sequences of which every rank holds its part along ``dim``, without gradient; collective.

        Args:
            part: This rank's part, of one shape on all ranks.
            dim: The sequence's dimension.
            what: Name for labels.
        """
        dim %= part.dim()
        return self.in_order(join_slices(self.collectives, part, dim, what), dim)


_CUT_FROM = "_hf_zero_cut_from"  # attribute of a slice, which torch.compile can read: the tensor it was cut from, and the dimension


class _Join(torch.autograd.Function):
    """All-gather along a dimension; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, slice_: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.collectives, ctx.dim = collectives, dim
        return _gathered(collectives, slice_, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:  # type: ignore[override]
        return None, _SumOfSlices.apply(ctx.collectives, gradient, ctx.dim), None  # type: ignore[no-untyped-call]


class _SumOfSlices(torch.autograd.Function):
    """Reduce-scatter along a dimension; backward all-gathers."""

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, summand: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.collectives, ctx.dim = collectives, dim
        rows = summand.unflatten(dim, (collectives.world, -1)).movedim(dim, 0).contiguous()
        dtype = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
        summed = collectives.reduce_scatter(rows.to(dtype).view(-1), dtype, "joined gradients").received()
        return summed.view(rows.shape[1:]).to(summand.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:  # type: ignore[override]
        return None, _Join.apply(ctx.collectives, gradient, ctx.dim), None  # type: ignore[no-untyped-call]


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
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        # Every rank has computed with the joined loss: their gradients add up.
        added = _SumOfRanks.apply(gradient.double(), ctx.collectives, "loss")  # type: ignore[no-untyped-call]
        return (added * ctx.share).to(gradient.dtype), None, None, None


class _SumOfRanks(torch.autograd.Function):
    """The sum over ranks of a tensor of one shape on all of them; backward sums its gradient in the same way."""

    @staticmethod
    def forward(ctx: Any, summand: torch.Tensor, collectives: Collectives, label: str) -> torch.Tensor:
        ctx.collectives, ctx.label = collectives, label
        total = summand.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(total.view(-1), label).wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _SumOfRanks.apply(gradient, ctx.collectives, ctx.label), None, None  # type: ignore[no-untyped-call]


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
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _SumOfTokens.apply(gradient, ctx.layout), None  # type: ignore[no-untyped-call]


class _SumOfTokens(torch.autograd.Function):
    """This rank's part of the sum over ranks of tensors (batch, tokens, ...) of whole sequences; backward joins the parts' gradients."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        rows = layout.by_place(whole, 1).unflatten(1, (layout.collectives.world, -1)).movedim(1, 0).contiguous()
        wide = torch.promote_types(whole.dtype, torch.float32)
        summed = layout.collectives.reduce_scatter(rows.view(-1), wide, "outputs").received()
        return summed.to(whole.dtype).view(rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return join_tokens(ctx.layout, gradient), None


def join_tokens(layout: Layout, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor (batch, tokens, ...) of whole sequences, of which every rank has its part; collective.

    All ranks compute with the whole: the gradient of each part is the sum over ranks, as with ``join_loss``.
    """
    found: torch.Tensor = _JoinTokens.apply(part, layout)  # type: ignore[no-untyped-call]
    return found


class _GivenToAll(torch.autograd.Function):
    """A tensor that every rank has; its gradient is the mean of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, collectives: Collectives) -> torch.Tensor:
        ctx.collectives = collectives
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        total = _SumOfRanks.apply(gradient, ctx.collectives, "gradients of inputs")  # type: ignore[no-untyped-call]
        return total / ctx.collectives.world, None


def given_to_all(collectives: Collectives, whole: torch.Tensor) -> torch.Tensor:
    """Return ``whole``, which every rank has and of which each uses its part; a gradient reaches it as on one rank. Collective in backward.

    As each rank's own part has the gradient of one rank times the number of ranks (``join_loss``), the mean is that of one rank.
    """
    found: torch.Tensor = _GivenToAll.apply(whole, collectives)  # type: ignore[no-untyped-call]
    return found
