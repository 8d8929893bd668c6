"""The collectives of a split model as differentiable functions: copy, reduce, gather, take.

Each function has the variants that the states of a trace need ([Note: states] in ``solve.py``). A "whole" gradient is the same on every
rank; a "partial" gradient is one summand per rank.

[Note: derivatives of collectives] A backward with ``create_graph`` (a gradient penalty) is differentiated again, so a backward calls these
functions, not the collectives: copy and reduce are derivatives of each other, and so are gather and take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.graph_ops import gather_from_ranks, in_graph, sum_over_ranks
from hf_zero.core.step.step_sum import StepSum


class ModelGroup:
    """The ranks that hold one model together.

    Attributes:
        collectives: The collectives over these ranks.
        inputs: Norms of the whole tensors that have entered divided layers since the last step.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.inputs = StepSum()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelGroup:
        return self  # a process group cannot be copied

    @property
    def rank(self) -> int:
        """Return this rank's position in the group."""
        return self.collectives.rank

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.collectives.world

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Return the ranks as numbered in the default group."""
        return self.collectives.topology.ranks

    def sum(self, tensor: torch.Tensor, label: object) -> torch.Tensor:
        """Return the sum of ``tensor`` over ranks, a new tensor of the same shape.

        Args:
            tensor: This rank's summand.
            label: An object whose ``str`` is the label. A graph does not read it, because another name would be another graph.
        """
        if in_graph():
            return sum_over_ranks(tensor, self.collectives.number)
        total = tensor.contiguous().clone()
        self.collectives.all_reduce(total, str(label)).wait()
        return total

    def note_input(self, whole: torch.Tensor) -> torch.Tensor:
        """Add the norm of ``whole``, of any shape, to ``inputs`` if gradients are recorded; return ``whole``. Local."""
        if self.inputs.wanted and torch.is_grad_enabled() and whole.is_floating_point() and not in_graph():
            self.inputs.add(torch.linalg.vector_norm(whole.detach(), dtype=torch.float32))
        return whole

    def gather(self, tensor: torch.Tensor, label: object) -> torch.Tensor:
        """Return every rank's ``tensor`` (all of one shape), stacked: (ranks, ...); ``label`` as for ``sum``."""
        if in_graph():
            return gather_from_ranks(tensor, self.collectives.number, self.world)
        part = tensor.contiguous()
        full = torch.empty((self.world, *part.shape), dtype=part.dtype, device=part.device)
        self.collectives.all_gather(full.view(-1), part.view(-1), str(label)).wait()
        return full


class Part:
    """Indices of one dimension that each rank holds.

    Attributes:
        dim: The dimension, counted from the front or, if negative, from the back.
        ranges: Per rank, half-open ranges of indices in the order of its tensor.
        full: Size of the whole dimension.
    """

    def __init__(self, dim: int, ranges: list[list[tuple[int, int]]], full: int) -> None:
        self.dim = dim
        self.ranges = ranges
        self.full = full
        self._indices: dict[torch.device, list[torch.Tensor]] = {}

    @property
    def numel(self) -> int:
        """Return the number of indices on one rank."""
        return sum(stop - start for start, stop in self.ranges[0])

    @property
    def in_order(self) -> bool:
        """Return whether each rank holds one range, and the ranges follow one another."""
        return all(len(part) == 1 for part in self.ranges) and [stop for [(_, stop)] in self.ranges] == [
            self.numel * (rank + 1) for rank in range(len(self.ranges))
        ]

    def indices(self, device: torch.device) -> list[torch.Tensor]:
        """Return the indices of each rank as tensors on ``device``."""
        if device not in self._indices:
            self._indices[device] = [torch.cat([torch.arange(start, stop, device=device) for start, stop in part]) for part in self.ranges]
        return self._indices[device]

    def holders(self, rank: int, device: torch.device) -> torch.Tensor | None:
        """Return how many ranks hold each of the indices of ``rank``; None where one rank holds each index."""
        if sum(stop - start for part in self.ranges for start, stop in part) <= self.full:
            return None
        counts = torch.zeros(self.full, dtype=torch.long, device=device)
        for part in self.indices(device):
            counts[part] += 1
        return counts[self.indices(device)[rank]]

    def take(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of ``tensor`` that ``rank`` holds."""
        if len(self.ranges[rank]) == 1:
            start, stop = self.ranges[rank][0]
            return tensor.narrow(self.dim, start, stop - start)
        return tensor.index_select(self.dim, self.indices(tensor.device)[rank])

    def join(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor that the stacked parts (ranks, ...) make up."""
        if self.in_order:
            return torch.cat(list(parts), dim=self.dim)
        shape = list(parts.shape[1:])
        shape[self.dim] = self.full
        whole = parts.new_empty(shape)
        for part, indices in zip(parts, self.indices(parts.device), strict=True):
            whole.index_copy_(self.dim % len(shape), indices, part)
        return whole

    def place(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a tensor of the whole shape with ``tensor`` at the indices of ``rank`` and zeros elsewhere."""
        shape = list(tensor.shape)
        shape[self.dim] = self.full
        whole = tensor.new_zeros(shape)
        return whole.index_copy_(self.dim % len(shape), self.indices(tensor.device)[rank], tensor)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ModelGroup, label: object) -> torch.Tensor:
        ctx.group, ctx.label = group, label
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Reduce.apply(grad, ctx.group, ctx.label, False), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ModelGroup, label: object, both: bool) -> torch.Tensor:
        ctx.group, ctx.label, ctx.both = group, label, both
        return group.sum(tensor, label)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        summed = _Reduce.apply(grad, ctx.group, ctx.label, True) if ctx.both else copy(grad, ctx.group, ctx.label)
        return summed, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ModelGroup, part: Part, label: object, both: bool) -> torch.Tensor:
        ctx.group, ctx.part, ctx.label, ctx.both = group, part, label, both
        return part.join(group.gather(tensor, label))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        whole = _Reduce.apply(grad, ctx.group, ctx.label, False) if ctx.both else grad
        mine = _Take.apply(whole, ctx.group, ctx.part, ctx.label, False)
        holders = ctx.part.holders(ctx.group.rank, grad.device)
        if holders is not None:  # several ranks hold an index: sum their gradients
            mine = mine / holders.view(-1, *[1] * (mine.dim() - 1 - ctx.part.dim % mine.dim()))
        return mine, None, None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ModelGroup, part: Part, label: object, partial: bool) -> torch.Tensor:
        ctx.group, ctx.part, ctx.label, ctx.partial = group, part, label, partial
        return part.take(tensor, group.rank).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.partial:
            return ctx.part.place(grad.contiguous(), ctx.group.rank), None, None, None, None
        if ctx.part.holders(ctx.group.rank, grad.device) is not None:
            summand = ctx.part.place(grad.contiguous(), ctx.group.rank)
            return _Reduce.apply(summand, ctx.group, ctx.label, False), None, None, None, None
        return _Gather.apply(grad, ctx.group, ctx.part, ctx.label, False), None, None, None, None


class _OfFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank = rank
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad if ctx.rank == 0 else torch.zeros_like(grad), None


def of_first(tensor: torch.Tensor, group: ModelGroup) -> torch.Tensor:
    """Return the tensor itself; backward makes its whole gradient a partial one: that of rank 0, and zeros elsewhere."""
    found: torch.Tensor = _OfFirst.apply(tensor, group.rank)  # type: ignore[no-untyped-call]
    return found


def copy(tensor: torch.Tensor, group: ModelGroup, label: object) -> torch.Tensor:
    """Return the tensor itself; backward sums its gradient, a summand on each rank, over ranks."""
    return _Copy.apply(tensor, group, label) if tensor.requires_grad else tensor


def reduce(tensor: torch.Tensor, group: ModelGroup, label: object, both: bool = False) -> torch.Tensor:
    """Return the sum over ranks; backward passes its gradient unchanged if it is whole, or sums it over ranks if partial (``both``)."""
    return _Reduce.apply(tensor, group, label, both)


def gather(tensor: torch.Tensor, group: ModelGroup, part: Part, label: object, both: bool = False) -> torch.Tensor:
    """Return all ranks' parts joined; backward gives each rank its part of the gradient, summed first if it is partial (``both``)."""
    return _Gather.apply(tensor, group, part, label, both)


def take(tensor: torch.Tensor, group: ModelGroup, part: Part, label: object, partial: bool = False) -> torch.Tensor:
    """Return this rank's part; backward joins the gradient from all parts, or leaves a summand, zero elsewhere (``partial``)."""
    return _Take.apply(tensor, group, part, label, partial)
