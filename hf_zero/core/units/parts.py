"""Join parts of a divided parameter, and let a script know that it computes with a part.

Tensor parallelism and experts leave a part of a parameter on this rank. A package above registers the function that joins the parts. By it
gradients, masters and moments that a script reads are whole, and those that it writes are cut. Where nothing may communicate, because one
rank alone may read, a script gets the part, in a class that warns of reductions to a number. Losses: ``divided.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.marks import cut, tp_shard_of, whole_shape
from hf_zero.core.units.sharded_parameter import ShardedParameter, WaitingParameter
from hf_zero.errors import StateError
from hf_zero.observe import warn_once

Join = Callable[[torch.Tensor], torch.Tensor]
joins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> its join, its name in the model, and ranks that vote
WITHOUT_FUNCTION: Any = torch._C.DisableTorchFunctionSubclass
REDUCTIONS = frozenset(
    (
        "norm", "vector_norm", "matrix_norm", "sum", "mean", "max", "min", "amax", "amin", "std", "var", "prod", "median", "logsumexp",
        "dot", "vdot", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm", "cosine_similarity",
    )
)  # fmt: skip
SHAPES = frozenset(
    (torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.numel, torch.Tensor.__len__)  # type: ignore[attr-defined]
)


def mark_join(param: torch.Tensor, join: Join, name: str, voters: Collectives | None = None) -> None:
    """Register ``join`` for losses that compute with ``param``, the model's ``name``, see [Note: parts in a loss].

    ``join(part)`` returns the whole parameter; its backward gives ``param`` this rank's part of the gradient. Both may be collective over
    the ranks that divide the parameter. ``voters`` has these ranks if some of them may hold no element. The record is kept beside the
    parameter, because attributes of a parameter are pickled.
    """
    joins[param] = join, name, voters


def is_divided(param: torch.Tensor) -> bool:
    """Return whether this rank's tensor is a part of a parameter, which ``whole_of`` can join; local."""
    part = tp_shard_of(param)
    return part is not None and not part.elsewhere and param in joins


def whole_of(param: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the whole of ``own``, this rank's part of a gradient, master or moment of ``param``, as a new tensor without a graph; ``own``
    itself if ``param`` is not divided. Collective over the ranks that divide it.

    Args:
        param: The parameter; it may be sharded.
        own: Of the shape of this rank's part.
    """
    if not is_divided(param):
        return own
    with torch.no_grad():
        return joins[param][0](own)


def voters_of(param: torch.Tensor | None) -> Collectives | None:
    """Return the ranks that divide ``param`` if some of them may hold no element of it, such as of an expert in a list; None otherwise.

    A rank without elements cannot determine whether another rank keeps a state of the parameter, so these ranks vote. Local.
    """
    voters: Collectives | None = joins[param][2] if param is not None and is_divided(param) else None
    return voters


def part_of(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``whole``, a gradient, master or moment of ``param``; ``whole`` itself if ``param`` is not divided. Local.

    Raises:
        StateError: ``whole`` has another shape than the whole parameter.
    """
    part = tp_shard_of(param)
    if part is None or not is_divided(param):
        return whole
    if whole.shape != part.full_shape:
        raise StateError(
            f"{joins[param][1]} has shape {tuple(part.full_shape)}, of which this rank has a part; a tensor of shape "
            f"{tuple(whole.shape)} was given. Give all of it, the same on all ranks"
        )
    return cut(whole.detach(), part)


class PartOfGradient(torch.Tensor):
    """A gradient of this rank's part of a parameter; a reduction of it to a number gets a warning.

    Attributes:
        text: End of the warning, after the called function.
    """

    text: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in REDUCTIONS:
            first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PartOfGradient))
            warn_once(f"{func.__name__}() of {first.text}")
        with WITHOUT_FUNCTION():
            return func(*args, **(kwargs or {}))


def warns_of_norms(own: torch.Tensor, text: str) -> torch.Tensor:
    """Return ``own`` as a tensor in the same memory that warns of reductions to a number; ``text`` says of which part they are. Local."""
    shown = own.as_subclass(PartOfGradient)
    shown.text = text
    return shown


def shown_part(param: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return ``own``, the gradient of this rank's part of ``param``, as a script sees it without ``show_gradients``; ``own``
    itself if ``param`` is not divided. Local.
    """
    if not joins or not is_divided(param) or type(own) is not torch.Tensor:  # a plan's tensors are of a class of torch's
        return own
    return warns_of_norms(
        own,
        f"{joins[param][1]}.grad covers only this rank's part {tuple(own.shape)} of {tuple(whole_shape(param) or own.shape)} (tensor "
        'parallelism, experts). With "hf_zero": {"show_gradients": true} in the configuration param.grad is the whole gradient; read it on '
        "all ranks",
    )


class _Counted(nn.Parameter):
    """A part while a library counts the elements of a model: shape and numbers of elements are those of the whole parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SHAPES:
            return of_whole_shape(func, args, kwargs or {})
        with WITHOUT_FUNCTION():
            return func(*args, **(kwargs or {}))


@contextmanager
def counting_divided(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let parts among ``params`` have the shape and number of elements of the whole parameter inside the ``with``, in which a library
    counts the elements or bytes of a model; local.
    """
    parts = [(param, type(param)) for param in params if whole_shape(param) is not None]
    # Other classes are those of a library (4-bit weights), which its own functions recognize.
    counted = [(param, kind) for param, kind in parts if kind in (nn.Parameter, ShardedParameter) or issubclass(kind, WaitingParameter)]
    for param, _ in counted:
        param.__class__ = _Counted  # type: ignore[assignment]
    try:
        yield
    finally:
        for param, kind in counted:
            param.__class__ = kind  # type: ignore[assignment]


def of_whole_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of ``func``, a question about the shape of a divided parameter (its first argument), for the whole parameter."""
    with WITHOUT_FUNCTION():
        part = args[0]
        shape = whole_shape(part) or part.shape
        return func(torch.empty(shape, dtype=part.dtype, device="meta"), *args[1:], **kwargs)
