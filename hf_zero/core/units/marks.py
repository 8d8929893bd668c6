"""Mark parameters: packed bytes of a quantized weight, casts to float8, and the part that one of several ranks of a model axis holds.

A package above marks parameters with attributes of its own through a ``ParamListener``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_zero.comm.collectives import Collectives, is_narrow
from hf_zero.core.units.layout import Range, UnitState

_PACKED = "_hf_zero_packed"
OUTER = "_hf_zero_outer"
_FLOAT8 = "_hf_zero_float8"
_TP_SHARD = "_hf_zero_tp_shard"
_CALLED = "_hf_zero_called"
_STAGES = "_hf_zero_stages"  # attribute of a parameter that is complete on several stages
_WHOLE_READER = "_hf_zero_whole_reader"  # attribute of a module
_OWN_BUFFERS = "_hf_zero_own_buffers"  # attribute of a module

Wholes = dict[tuple[int, bool], torch.Tensor]
WholeReader = Callable[[str, torch.Tensor, Wholes], torch.Tensor | None]


def mark_packed(param: torch.Tensor) -> None:
    """Mark ``param`` as packed: its elements are not numbers to compute with; they are sharded and gathered unchanged, and never cast."""
    setattr(param, _PACKED, True)


def is_packed(param: torch.Tensor) -> bool:
    """Return whether ``param`` was marked as packed, or has a floating-point dtype of one byte (its scales are separate tensors)."""
    return is_of_library(param) or is_narrow(param)


def is_of_library(param: torch.Tensor) -> bool:
    """Return whether ``param`` was marked as packed: only the library that packed it can interpret its bytes."""
    return bool(getattr(param, _PACKED, False))


def mark_float8(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Mark ``param`` as a weight that its layer casts to ``dtype`` with one scale, so that a gather may send these values."""
    setattr(param, _FLOAT8, dtype)


def float8_type(param: torch.Tensor) -> torch.dtype | None:
    """Return the float8 dtype that ``param`` was marked with; None without."""
    found: torch.dtype | None = getattr(param, _FLOAT8, None)
    return found


def note_call(param: torch.Tensor, called: bool) -> None:
    """Note whether a forward that trains has ``called`` the expert that ``param`` belongs to."""
    setattr(param, _CALLED, called or getattr(param, _CALLED, False))


def forget_calls(param: torch.Tensor) -> None:
    """Forget the notes about ``param``: a step has ended."""
    vars(param).pop(_CALLED, None)


def has_only_zeros(param: torch.Tensor) -> bool:
    """Return whether all gradients of ``param`` since the last step are the zeros of an expert that no forward has called, where plain
    PyTorch has no gradient.
    """
    return getattr(param, _CALLED, None) is False


def is_wrapped(param: torch.Tensor) -> bool:
    """Return whether ``param`` is a tensor of a library's own class around other tensors (torchao): it has no flat elements to shard.

    [Note: inner tensors] The tensors inside a wrapped parameter can be sharded: codes and scales are plain tensors, which are adjacent in a
    unit of packed weights. They are sharded and unsharded; the outer parameter keeps its shape, belongs to the unit of its first inner
    tensor, and counts as unsharded when they are.
    """
    if not is_traceable_wrapper_subclass(param):
        return False
    from torch.distributed.tensor import DTensor  # the import takes half a second; only users of wrapped tensors pay it

    return not isinstance(param, DTensor)


def inner_tensors(outer: Any) -> dict[str, torch.Tensor]:
    """Return the inner tensors of a wrapped one, by the names of its attributes."""
    names, _ = outer.__tensor_flatten__()
    return {name: getattr(outer, name) for name in names}


def mark_inner(outer: torch.Tensor) -> bool:
    """Mark the inner tensors of a wrapped parameter as packed, see [Note: inner tensors]; return whether it can be sharded, that is,
    whether all of them are plain tensors with values.
    """
    inner = list(inner_tensors(outer).values())
    if not inner or any(type(tensor) is not torch.Tensor or tensor.is_meta for tensor in inner):
        return False
    for tensor in inner:
        mark_packed(tensor)
    setattr(inner[0], OUTER, ref(outer))  # weak, because the outer tensor references the inner one
    return True


def with_outer(param: torch.Tensor) -> Iterator[Any]:
    """Yield ``param``, and the wrapped parameter whose first inner tensor it is, if there is one."""
    yield param
    outer = getattr(param, OUTER, None)
    if outer is not None and (found := outer()) is not None:
        yield found


def bytes_as(part: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return the first bytes of ``part``, 1D and contiguous, as a tensor of another dtype and ``shape``; shares its memory."""
    return part.view(torch.uint8)[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


@dataclass(frozen=True)
class TpShard:
    """A part of a parameter along one dimension.

    Attributes:
        full_shape: Shape of the full parameter.
        dim: The dimension that is divided.
        ranges: Indices along ``dim`` that this rank holds, in the order of its tensor; several if the full parameter consists of parts that
            are divided separately (query, key and value in one weight).
        copies: Ranges along ``dim`` of this rank's tensor that other ranks hold too, each with the number of ranks that hold it.
        expert: Whether the other parts are on the ranks of the expert group, not on those of the model axis.
        stages: Stages of a pipeline that hold the parameter, if there are several (tied weights); otherwise ().
        elsewhere: Whether only other stages of a pipeline hold it.
    """

    full_shape: torch.Size
    dim: int
    ranges: tuple[Range, ...]
    copies: tuple[tuple[Range, int], ...] = ()
    expert: bool = False
    stages: tuple[int, ...] = ()
    elsewhere: bool = False


def mark_tp_shard(param: torch.Tensor, part: TpShard) -> None:
    """Mark ``param`` as ``part`` of a parameter that several ranks hold together."""
    setattr(param, _TP_SHARD, part)


def unmark_tp_shard(param: torch.Tensor) -> None:
    """Undo ``mark_tp_shard``."""
    vars(param).pop(_TP_SHARD, None)


def tp_shard_of(param: torch.Tensor) -> TpShard | None:
    """Return the part that ``param`` was marked as; None for a parameter of which each rank has the same full copy."""
    return getattr(param, _TP_SHARD, None)


def mark_whole_reader(module: nn.Module, reader: WholeReader) -> None:
    """Register ``reader`` for code that reads a parameter of ``module`` outside of the module's forward.

    ``reader(name, part, kept)`` returns the full tensor, or None to use the part. ``kept`` contains the tensors that this forward of the
    model has read before.
    """
    module.__dict__[_WHOLE_READER] = reader


def whole_reader_of(module: nn.Module) -> WholeReader | None:
    """Return the reader given to ``mark_whole_reader`` for ``module``, or None."""
    return module.__dict__.get(_WHOLE_READER)


def mark_own_buffers(module: nn.Module) -> None:
    """Mark ``module`` as one that only some data-parallel ranks run, so that its buffers, and those inside of it, differ between ranks."""
    module.__dict__[_OWN_BUFFERS] = True


def has_own_buffers(module: nn.Module) -> bool:
    """Return whether ``module`` was marked by ``mark_own_buffers``."""
    return _OWN_BUFFERS in module.__dict__


def is_expert(param: torch.Tensor) -> bool:
    """Return whether ``param`` belongs to this rank's experts: it is sharded only over the ranks that hold the same experts."""
    part = tp_shard_of(param)
    return part is not None and part.expert


def whole_shape(param: torch.Tensor) -> torch.Size | None:
    """Return the full shape of a parameter of which ``param`` is a part; None if ``param`` is complete."""
    part = tp_shard_of(param)
    return part.full_shape if part is not None else None


def own_shape(param: torch.Tensor) -> torch.Size:
    """Return the shape of this rank's tensor, also where ``param.shape`` shows the full shape to a loss."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.shape


def cut(whole: torch.Tensor, part: TpShard) -> torch.Tensor:
    """Return the ranges of ``part`` out of ``whole``, concatenated, in memory of their own."""
    pieces = [whole.narrow(part.dim, piece.start, piece.numel) for piece in part.ranges]
    return torch.cat(pieces, part.dim).contiguous() if pieces else whole.narrow(part.dim, 0, 0).clone()


def paste(whole: torch.Tensor, values: torch.Tensor, dim: int, ranges: Iterable[Range]) -> None:
    """Copy ``values``, any view of the result of ``cut``, to its place in ``whole``."""
    pieces = list(ranges)
    shape = (*whole.shape[:dim], sum(piece.numel for piece in pieces), *whole.shape[dim + 1 :])
    first = 0
    for piece in pieces:
        whole.narrow(dim, piece.start, piece.numel).copy_(values.view(shape).narrow(dim, first, piece.numel))
        first += piece.numel


def is_elsewhere(param: torch.Tensor) -> bool:
    """Return whether other stages of a pipeline hold ``param``, and this rank no part of it."""
    part = tp_shard_of(param)
    return part is not None and part.elsewhere


def is_part(param: torch.Tensor) -> bool:
    """Return whether ranks divide ``param``; a module of a list of experts is whole on some of them."""
    part = tp_shard_of(param)
    return part is not None and (part.expert or sum(run.numel for run in part.ranges) < part.full_shape[part.dim])


def stages_of(param: torch.Tensor) -> tuple[int, ...]:
    """Return the stages of a pipeline that hold ``param``, if there are several; otherwise ()."""
    part = tp_shard_of(param)
    found: tuple[int, ...] = part.stages if part is not None else getattr(param, _STAGES, ())
    return found


def mark_on_all_stages(param: torch.Tensor, stages: tuple[int, ...]) -> None:
    """Mark ``param``, a single number, as held completely by all ``stages`` of a pipeline; it is not divided."""
    setattr(param, _STAGES, stages)


class ParamListener:
    """Listener that is notified of changes to parameters; this base class ignores them.

    Attributes:
        attributes: Names of the attributes that the listener sets on parameters. They are removed from a parameter that leaves its unit,
            and left out when a parameter is pickled.
    """

    attributes: tuple[str, ...] = ()

    def registered(self, param: nn.Parameter, shape: torch.Size, part: torch.Tensor, collectives: Collectives) -> None:
        """Note that a parameter was registered: it is in a unit, or in an engine's model and in no unit. It is unsharded until
        ``state_changed`` reports another state.

        Args:
            param: The parameter.
            shape: Its full shape.
            part: This rank's part of it, 1D.
            collectives: Network of the data-parallel axis.
        """

    def state_changed(self, params: Iterable[nn.Parameter | None], state: UnitState) -> None:
        """Note that the unit of ``params`` entered ``state``; None in ``params`` is a parameter that has moved to another unit."""

    def stays_unsharded(self, params: Iterable[nn.Parameter | None], stays: bool) -> None:
        """Note whether ``params`` are always unsharded, or resharded between uses."""


# -- parameters that torch.compile meets -----------------------------------------------------------------------------------


def tracing_now() -> bool:
    """Return whether torch.compile traces code in this thread."""
    return TracingContext.try_get() is not None


def unshard_in_trace(unshard_for_use: Callable[[], bool]) -> None:
    """Begin the running trace again if ``unshard_for_use`` unshards the parameter that it has met.

    [Note: reads that a trace finds] A block unshards its own parameters before its graph runs, and those of other blocks that it is known
    to read. torch.compile traces an attribute lookup without running it, so an unknown outside read calls no guard
    (``GuardedParameters``): the trace meets the empty parameter itself, whose class reports the first question about it. The engine then
    unshards the block as it does for the same read in an uncompiled forward, by the same collectives at the same place, and records the
    reader. The trace is begun again and meets an ordinary parameter; no code of the model has run in between. Later forwards unshard the
    block before the graph runs, so one graph serves the first forward and all later ones. A graph compares shape and class of the
    parameters that it reads: if a later forward runs while the block is sharded, as in an evaluation that frees blocks earlier, the trace
    that follows finds the read.

    Args:
        unshard_for_use: Unshards the parameter if code of the model computes with it now, and returns whether it did; collective then.
    """
    with tracing(None):  # the engine's own questions about parameters are not the trace's
        unsharded = unshard_for_use()
    if unsharded:
        from torch._dynamo.exc import RestartAnalysis

        raise RestartAnalysis(restart_reason="a parameter of another block was unsharded")
