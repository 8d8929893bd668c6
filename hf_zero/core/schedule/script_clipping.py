"""Find the engines with gradients that a script clips with ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_``, and clip them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from hf_zero.core.units.marks import is_part
from hf_zero.core.units.sharded_parameter import gradients_of
from hf_zero.errors import UnsupportedError

# torch.nn.utils.clip_grad_norm_ adds the same constant, so that a clipped step equals PyTorch's exactly.
EPSILON = 1e-6


class Waiting(Protocol):
    """Gradients of one engine that wait for its step, all or some of them.

    Attributes:
        norm: Their norm, 0-dim, without loss scale; the same on every rank.
        loss_scale: The loss scale that they contain.
    """

    norm: torch.Tensor
    loss_scale: float

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply the gradients by ``factor``, 0-dim; local."""

    def limit(self, value: float) -> None:
        """Limit the gradients without loss scale to the absolute value ``value``; local."""


class LossScale(Protocol):
    """Owner of a loss scale.

    Attributes:
        scale: The present factor.
    """

    scale: float


OnClip = Callable[[list[torch.Tensor], float | None], Waiting | None]


def clip_by_norm(attached: Iterable[Any], params: list[torch.Tensor], max_norm: float, norm_type: float, total_norm: torch.Tensor) -> float:
    """Make the engines that train ``params`` clip their gradients by the norm of all together, and write it to ``total_norm``; collective
    then.

    Args:
        attached: The ``Runtime`` of each engine whose hooks are on a module, in an order that all ranks share.
        params: The parameters, or tensors that an engine's optimizer holds in their place.
        max_norm: Largest norm.
        norm_type: Order of the norm.
        total_norm: Norm of the gradients that torch sees, 0-dim.

    Returns:
        The loss scale of the gradients, if an engine has clipped them; otherwise 0, and torch clips them.

    Raises:
        UnsupportedError: Gradients that no engine knows are to be clipped by the same norm.
    """
    own_grads = dict(zip(map(id, params), gradients_of(params), strict=True))
    asked = [(on_clip(params, norm_type), own) for on_clip, own in _engines(attached, params, own_grads)]
    found = [(waiting, own) for waiting, own in asked if waiting is not None]
    if not found:
        return 0.0
    known = set[int]().union(*(own for _, own in found))
    if any(grad is not None and key not in known for key, grad in own_grads.items()):
        raise UnsupportedError(
            "torch.nn.utils.clip_grad_norm_ got parameters of an engine, whose gradients wait for its step, together with others: "
            "clip them in separate calls"
        )
    first, *others = [waiting for waiting, _ in found]
    norms = [first.norm, *(waiting.norm.to(first.norm.device) for waiting in others)]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if others else first.norm
    factor = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    for waiting in (first, *others):
        waiting.multiply(factor)
    total_norm.data = norm.to(total_norm.device)  # torch's norm of no gradients has the default dtype of the script
    return first.loss_scale


def clip_by_value(attached: Iterable[Any], params: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    """Let the engines that train ``params`` clip their gradients by value; collective if there are such engines.

    Returns:
        The parameters whose gradients torch has to clip; all, if no engine has clipped any.
    """
    own_grads = dict(zip(map(id, params), gradients_of(params), strict=True))
    clipped: set[int] = set()  # with parameters that begin to train with this step, whose gradients are visible
    for on_clip, own in _engines(attached, params, own_grads):
        waiting = on_clip(params, None)
        if waiting is not None:
            waiting.limit(limit)
            clipped |= own
    return [param for param in params if own_grads[id(param)] is not None and id(param) not in clipped] if clipped else params


def _engines(attached: Iterable[Any], params: list[torch.Tensor], own_grads: dict[int, Any]) -> list[tuple[OnClip, set[int]]]:
    """Return ``on_clip`` of each engine that trains some of ``params``, and the ids of the parameters it trains.

    The list is empty if all these gradients are as torch should clip them: visible, reduced, and without loss scale.
    """
    # torch's norm of visible gradients would leave out parts of them that other ranks have.
    hidden = {id(param) for param in params if own_grads[id(param)] is None or is_part(param)}
    engines, needed = [], False
    for runtime in list(attached):
        updated = runtime.updated() if runtime.updated is not None else None
        joining = runtime.joining() if runtime.joining is not None else None
        own = {id(param) for param in runtime.module.parameters() if param.requires_grad}
        own.update(updated() if updated is not None else ())
        waiting = joining() & own_grads.keys() if joining is not None else set()
        if runtime.on_clip is not None and not own.isdisjoint(own_grads):
            engines.append((runtime.on_clip, own))
            needed |= not own.isdisjoint(hidden | waiting) or (runtime.scaler is not None and runtime.scaler.scale != 1.0)
    return engines if needed else []
