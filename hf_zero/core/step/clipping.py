"""Clip gradients that wait for ``step`` when a script calls ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_``, although they
are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.script_clipping import EPSILON
from hf_zero.core.step.step import Stepper
from hf_zero.core.units.marks import is_part
from hf_zero.core.units.unit import Unit, trained_of
from hf_zero.errors import StateError, UnsupportedError


class WaitingGradients:
    """Gradients of one engine between the last backward and the step, all or some of them.

    Attributes:
        norm: Their norm, 0-dim, without loss scale; the same on every rank. If they are to be clipped by value, some norm.
        loss_scale: The loss scale that they contain.

    Args:
        norm: See the attribute.
        loss_scale: See the attribute.
        pieces: This rank's parts of them.
    """

    def __init__(self, norm: torch.Tensor, loss_scale: float, pieces: Sequence[torch.Tensor]) -> None:
        self.norm = norm
        self.loss_scale = loss_scale
        self._pieces = pieces

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply the gradients by ``factor``, 0-dim; local."""
        for piece in self._pieces:
            piece.mul_(factor.to(piece.device, piece.dtype))

    def limit(self, value: float) -> None:
        """Limit the gradients without loss scale to the absolute value ``value``; local."""
        for piece in self._pieces:
            piece.clamp_(-value * self.loss_scale, value * self.loss_scale)


def clip_waiting(
    engine_of: Callable[[], Any], params: Sequence[torch.Tensor] | None, limit: float, norm_type: float | None
) -> torch.Tensor | None:
    """Clip the waiting gradients of ``params`` as ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` does; collective.

    Args:
        engine_of: As for ``find_waiting``.
        params: As for ``find_waiting``.
        limit: Largest norm, or largest absolute value.
        norm_type: Order of the norm; None clips by value.

    Returns:
        The norm before clipping, 0-dim, without loss scale; None if no gradients wait.
    """
    waiting = find_waiting(engine_of, params, norm_type)
    if waiting is None:
        return None
    if norm_type is None:
        waiting.limit(limit)
    else:
        waiting.multiply(torch.clamp(limit / (waiting.norm + EPSILON), max=1.0))
    return waiting.norm


def find_waiting(engine_of: Callable[[], Any], params: Sequence[torch.Tensor] | None, norm_type: float | None) -> WaitingGradients | None:
    """Return the waiting gradients of ``params``, which a script clips, and their norm; collective.

    [Note: a script's clipping] Where gradients are sharded, ``param.grad`` is None, torch finds nothing to clip and says nothing. Where
    they are visible with the loss scale of fp16, torch would clip by a norm that contains it. So its function is told to clip the reduced
    gradients instead. Every rank calls it, as every rank calls it under DistributedDataParallel. A ``gradient_clipping`` of the
    configuration applies to the result, as at stage 0. Visible gradients of parameters that the engine does not train are part of the
    norm, too ([Note: untrained parameters]). Several engines are asked in the order in which they were built, then all clip by the norm of
    all their gradients together.

    Args:
        engine_of: Refers to the engine that trains the parameters.
        params: Parameters, or the tensors that the engine's optimizer holds in their place; None for all that it trains, those included
            that it begins to train with the coming step.
        norm_type: Order of the norm; None if they are clipped by value.

    Returns:
        The gradients; None if none wait.

    Raises:
        StateError: The gradients are those of an unfinished accumulation.
        UnsupportedError: The norm is not the 2-norm where ranks have parts of the gradients, or the optimizer or parallelism has no norm of
            these parameters alone.
    """
    engine = engine_of()
    if engine is None or engine.stepper is None or not engine.accumulation.in_window:
        return None
    name = "clip_grad_value_" if norm_type is None else "clip_grad_norm_"
    if not engine.accumulation.awaits_update:
        raise StateError(
            f"torch.nn.utils.{name} was called in the middle of a gradient accumulation, whose gradients are sharded: call it only "
            "after the backward that completes the optimizer step"
        )
    if norm_type not in (None, 2) and not _has_all(engine.stepper):
        raise UnsupportedError(
            f"torch.nn.utils.clip_grad_norm_(norm_type={norm_type:g}) of sharded gradients is not supported: the engine computes the "
            "2-norm. Remove norm_type, or use stage 0"
        )
    given = None if params is None else {id(param) for param in params}
    return _choose(engine.stepper, given, norm_type, name)


def _has_all(stepper: Stepper) -> bool:
    """Return whether each rank has all gradients."""
    return type(stepper) is Stepper and not stepper.settings.stage.optimizer_sharded and stepper.everyone is stepper.collectives.data


def _choose(stepper: Stepper, given: set[int] | None, norm_type: float | None, name: str) -> WaitingGradients:
    """Return the gradients of the tensors with the ids ``given``, or all if None, and measure them. Collective."""
    stepper.reducer.shown.reads.forget_read()
    norm, shards, units = stepper.measure(), stepper.reduced(), trained_of(stepper.optimizer.units)
    segments, pieces, some = stepper.optimizer.group_of_tensors().keys(), list(shards), False
    if given is not None and given.isdisjoint(segments):
        chosen = [_positions(unit, given) for unit in units]
        some = any(len(found) < sum(bool(slot.numel) for slot in unit.layout.slots) for unit, found in zip(units, chosen, strict=True))
        if some:
            parts = zip(units, shards, chosen, strict=True)
            pieces = [unit.shard_part(index, shard) for unit, shard, found in parts for index in found]
    elif given is not None and (not segments <= given or type(stepper.optimizer).group_of_tensors is not ShardedOptimizer.group_of_tensors):
        raise UnsupportedError(
            f"torch.nn.utils.{name} was given some of the tensors in optimizer.param_groups, which are flat parts of this rank's "
            "shards: pass parameters of the model, or the tensors of all groups"
        )
    scale, outside = stepper.scaler.scale, _outside(stepper, given, name)
    if norm_type == 2:
        norm = stepper.norm_of_pieces(pieces) / scale if some else norm
        if outside:
            squares = [grad.norm(dtype=torch.float32).to(norm.device).square() for grad in outside]
            norm = (norm.square() + torch.stack(squares).sum() / scale**2).sqrt()
    elif norm_type is not None and (tensors := [piece for piece in (*pieces, *outside) if piece.numel()]):
        norms = [torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32).to(norm.device) for tensor in tensors]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) / scale
    return WaitingGradients(norm, scale, pieces + outside)


def _outside(stepper: Stepper, given: set[int] | None, name: str) -> list[torch.Tensor]:
    """Return the visible gradients of parameters with the ids ``given`` that the engine does not train; collective where ranks divide it.

    Raises:
        UnsupportedError: Other ranks have further parts of one; on every rank.
    """
    if given is None:
        return []
    over_stages, untrained = stepper.trained.over_stages, stepper.trained.untrained
    found = untrained.of(given)
    labels = [label for label, param, _ in found if over_stages or is_part(param)]
    if over_stages or any(map(is_part, untrained.among(given))):  # a rank without such a gradient takes part
        gathered: list[list[str]] = stepper.everyone.gather_objects(labels, "gradients of untrained parameters")
        labels = sorted({label for by_rank in gathered for label in by_rank})
    if labels:
        raise UnsupportedError(
            f"torch.nn.utils.{name} was given {labels[0]}, which requires a gradient and is in no param group of the engine's optimizer, "
            f"while ranks divide the model. Pass the parameters of the optimizer, or call {labels[0]}.requires_grad_(False)"
        )
    return [grad for _, _, grad in found]


def _positions(unit: Unit, given: set[int]) -> list[int]:
    """Return the positions in ``unit`` of the parameters with the ids ``given``, the same on all ranks."""
    slots = enumerate(zip(unit.params, unit.layout.slots, strict=True))
    return [index for index, (param, slot) in slots if slot.numel and param is not None and id(param) in given]
