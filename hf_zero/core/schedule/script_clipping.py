"""Find the engines that shard gradients which a script clips with ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hf_zero.core.units.marks import is_part
from hf_zero.core.units.sharded_parameter import gradients_of
from hf_zero.errors import UnsupportedError


def clip_by_norm(attached: Iterable[Any], params: list[torch.Tensor], max_norm: float, norm_type: float, total_norm: torch.Tensor) -> bool:
    """Let the engine that trains ``params`` clip their sharded gradients, and write their norm to ``total_norm``; collective then.

    Args:
        attached: The ``Runtime`` of each engine whose hooks are on a module.
        params: The parameters, or tensors that an engine's optimizer holds in their place.
        max_norm: Largest norm.
        norm_type: Order of the norm.
        total_norm: Norm of the gradients that torch sees, 0-dim.

    Returns:
        Whether an engine has clipped them; otherwise torch does.

    Raises:
        UnsupportedError: Gradients of other parameters are to be clipped by the same norm.
    """
    own_grads = dict(zip(map(id, params), gradients_of(params), strict=True))
    for clip, own in _hiding(attached, params, own_grads):
        norm = clip(params, max_norm, norm_type)
        if norm is None:
            continue
        if any(grad is not None and key not in own for key, grad in own_grads.items()):
            raise UnsupportedError(
                "torch.nn.utils.clip_grad_norm_ was given parameters of an engine that shards their gradients together with others: clip "
                "each by itself"
            )
        total_norm.data = norm.to(total_norm.device, total_norm.dtype)
        return True
    return False


def clip_by_value(attached: Iterable[Any], params: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    """Let the engines that train ``params`` clip their sharded gradients by value; collective if there are such engines.

    Returns:
        The parameters whose gradients torch has to clip; all, if no engine has clipped any.
    """
    own_grads = dict(zip(map(id, params), gradients_of(params), strict=True))
    clipped: set[int] = set()  # with parameters that begin to train with this step, whose gradients are visible
    for clip, own in _hiding(attached, params, own_grads):
        if clip(params, limit, None) is not None:
            clipped |= own
    return [param for param in params if own_grads[id(param)] is not None and id(param) not in clipped] if clipped else params


def _hiding(
    attached: Iterable[Any], params: list[torch.Tensor], own_grads: dict[int, Any]
) -> Iterator[tuple[Callable[..., torch.Tensor | None], set[int]]]:
    """Yield ``on_clip`` of each engine whose gradients of ``params`` are sharded or not reduced yet, and the ids of what it trains."""
    # torch's norm of visible gradients would leave out parts of them that other ranks have.
    hidden = {id(param) for param in params if own_grads[id(param)] is None or is_part(param)}
    for runtime in list(attached):
        updated = runtime.updated() if runtime.updated is not None else None
        joining = runtime.joining() if runtime.joining is not None else None
        own = {id(param) for param in runtime.module.parameters() if param.requires_grad}
        own.update(updated() if updated is not None else ())
        waiting = joining() & own_grads.keys() if joining is not None else set()
        if runtime.on_clip is not None and not own.isdisjoint(hidden | waiting):
            yield runtime.on_clip, own
