"""What part of a parameter this rank holds when several ranks hold one model together (tensor parallelism, pipelines), or its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.core.units.layout import Range

_TP_SHARD = "_hf_zero_tp_shard"
_STAGES = "_hf_zero_stages"  # of a parameter that is no part
_WHOLE_READER = "_hf_zero_whole_reader"  # of a module

Wholes = dict[tuple[int, bool], torch.Tensor]
WholeReader = Callable[[str, torch.Tensor, Wholes], torch.Tensor | None]


@dataclass(frozen=True)
class TpShard:
    """A part of a parameter along one dimension.

    Attributes:
        full_shape: Shape of the whole parameter.
        dim: The dimension that is divided.
        ranges: Indices along ``dim`` that this rank holds, in the order in which its tensor has them; several where the whole is
            made of parts that are each divided (query, key and value in one weight).
        copies: Ranges along ``dim`` of this rank's tensor that other ranks hold too, each with the number of ranks.
        expert: The ranks that hold all experts together have the rest of it, not those of the model axis.
        stages: Of a pipeline, those that hold it, where they are several (tied weights); () elsewhere.
        elsewhere: Other stages of a pipeline hold it, and this rank nothing.
    """

    full_shape: torch.Size
    dim: int
    ranges: tuple[Range, ...]
    copies: tuple[tuple[Range, int], ...] = ()
    expert: bool = False
    stages: tuple[int, ...] = ()
    elsewhere: bool = False


def mark_tp_shard(param: torch.Tensor, part: TpShard) -> None:
    """Says that ``param`` is ``part`` of a whole that several ranks hold together."""
    setattr(param, _TP_SHARD, part)


def unmark_tp_shard(param: torch.Tensor) -> None:
    """Takes what ``mark_tp_shard`` said back."""
    vars(param).pop(_TP_SHARD, None)


def tp_shard_of(param: torch.Tensor) -> TpShard | None:
    """Return the part that ``param`` is; None for a parameter of which each rank has the same, whole copy."""
    return getattr(param, _TP_SHARD, None)


def mark_whole_reader(module: nn.Module, reader: WholeReader) -> None:
    """Who reads a parameter of ``module`` outside of its forward gets ``reader(name, part, kept)``: the whole, or None for the part.

    ``kept`` has what this forward of the model has read before.
    """
    module.__dict__[_WHOLE_READER] = reader


def whole_reader_of(module: nn.Module) -> WholeReader | None:
    """What ``mark_whole_reader`` has said of ``module``."""
    return module.__dict__.get(_WHOLE_READER)


def is_expert(param: torch.Tensor) -> bool:
    """Return whether ``param`` is the experts of this rank, or one of them: the ranks that hold the same shard it among them."""
    part = tp_shard_of(param)
    return part is not None and part.expert


def whole_shape(param: torch.Tensor) -> torch.Size | None:
    """Return the shape of the whole that ``param`` is a part of; None where it is all of it."""
    part = tp_shard_of(param)
    return part.full_shape if part is not None else None


def cut(whole: torch.Tensor, part: TpShard) -> torch.Tensor:
    """Return the ranges of ``part`` out of ``whole``, one behind the other, in memory of their own."""
    pieces = [whole.narrow(part.dim, piece.start, piece.numel) for piece in part.ranges]
    return torch.cat(pieces, part.dim).contiguous() if pieces else whole.narrow(part.dim, 0, 0).clone()


def paste(whole: torch.Tensor, values: torch.Tensor, dim: int, ranges: Iterable[Range]) -> None:
    """Copies ``values``, any view of what ``cut`` gives, to where they belong in ``whole``."""
    pieces = list(ranges)
    shape = (*whole.shape[:dim], sum(piece.numel for piece in pieces), *whole.shape[dim + 1 :])
    first = 0
    for piece in pieces:
        whole.narrow(dim, piece.start, piece.numel).copy_(values.view(shape).narrow(dim, first, piece.numel))
        first += piece.numel


def is_elsewhere(param: torch.Tensor) -> bool:
    """Return whether other stages of a pipeline hold ``param``, and this rank nothing of it."""
    part = tp_shard_of(param)
    return part is not None and part.elsewhere


def is_part(param: torch.Tensor) -> bool:
    """Return whether this rank has less than all of ``param``."""
    part = tp_shard_of(param)
    return part is not None and sum(run.numel for run in part.ranges) < part.full_shape[part.dim]


def stages_of(param: torch.Tensor) -> tuple[int, ...]:
    """Return the stages of a pipeline that hold ``param``, where they are several."""
    part = tp_shard_of(param)
    found: tuple[int, ...] = part.stages if part is not None else getattr(param, _STAGES, ())
    return found


def mark_on_all_stages(param: torch.Tensor, stages: tuple[int, ...]) -> None:
    """Says that all ``stages`` of a pipeline hold ``param``, a single number: no part of a whole, and no stage can leave it empty."""
    setattr(param, _STAGES, stages)
