"""Whole fp32 values, gradients and optimizer state of single parameters: DeepSpeed's ``safe_get`` and ``safe_set`` functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from hf_zero.core.optimizer.sharded import OwnedSegment, ShardedOptimizer
from hf_zero.core.optimizer.whole_tensors import WholeTensorOptimizer
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.step.loss_scale import LossScaler
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.core.units.values import all_gather_updated, publish
from hf_zero.errors import StateError


@dataclass(frozen=True)
class Training:
    """What trains a unit: its gradients, the optimizer and the loss scale. The engine holds it; with the engine it goes."""

    gradients: UnitGradients
    optimizer: ShardedOptimizer
    scaler: LossScaler


_training: WeakValueDictionary[Unit, Training] = WeakValueDictionary()


def register_training(unit: Unit, training: Training) -> None:
    """Notes who trains ``unit``, for the functions of this file, for as long as somebody holds ``training``."""
    _training[unit] = training


def _find(param: torch.Tensor) -> tuple[Unit, int] | None:
    owner = find_unit(param)
    if owner is not None and owner[0].own.offloaded:
        raise StateError(
            "values of a parameter were asked for while state of its engine waits on the host; call engine.reload_states() first"
        )
    return owner if owner is not None and owner[0].master is not None and owner[0] in _training else None


def _must_find(param: torch.Tensor, what: str) -> tuple[Unit, int]:
    owner = _find(param)
    if owner is None:
        raise StateError(f"{what}: this tensor (shape {tuple(param.shape)}) is not a parameter that an engine trains")
    return owner


def _master(unit: Unit) -> torch.Tensor:
    if unit.master is None:
        raise StateError(f"unit {unit.name} is not trained")
    return unit.master


def _write(unit: Unit, index: int, flat: torch.Tensor, value: torch.Tensor) -> None:
    """Writes this rank's part of the whole ``value`` of parameter ``index`` into the sharded ``flat``."""
    slot = unit.layout.slots[index]
    if value.numel() != slot.numel:
        raise StateError(f"parameter {slot.name} has shape {tuple(slot.shape)}, the value has {tuple(value.shape)}")
    part = slot.range.intersect(unit.owned)
    if part.numel:
        source = value.detach().reshape(-1)[part.start - slot.offset : part.stop - slot.offset]
        flat[part.start - unit.owned.start : part.stop - unit.owned.start].copy_(source)


def _gather(unit: Unit, index: int, flat: torch.Tensor, what: str) -> torch.Tensor:
    """The full value of parameter ``index`` in a sharded (shard_numel,) tensor such as a moment; a new tensor. Collective."""
    slot = unit.layout.slots[index]
    flat = flat.to(unit.collectives.topology.device)
    if unit.layout.world > 1:
        whole = torch.empty(unit.layout.padded_numel, dtype=flat.dtype, device=flat.device)
        unit.collectives.all_gather(whole, flat.contiguous(), f"{unit.name}: {what}").wait()
        flat = whole
    return flat[slot.range.start : slot.range.stop].view(slot.shape).clone()


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The whole master of ``param``, of its full shape; None if no engine trains it. Collective."""
    owner = _find(param)
    return _gather(*owner, _master(owner[0]), "master") if owner else None


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets master and 16-bit value of ``param`` from ``value`` (full shape, the same on every rank); collective.

    Raises:
        StateError: No engine trains ``param``, or the shapes differ.
    """
    unit, index = _must_find(param, "safe_set_full_fp32_param")
    _write(unit, index, _master(unit), value)
    _publish(unit)


def _publish(unit: Unit) -> None:
    publish([unit])
    pending = all_gather_updated(unit)
    if pending is not None:
        pending.wait()


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient of ``param``, averaged over ranks, without loss scale, between backward and step; else None. Collective."""
    owner = _find(param)
    if owner is None:
        return None
    training = _training[owner[0]]
    if training.gradients.exchange.keeps_whole and training.gradients.has_local:
        grad = training.gradients.mean_over_ranks(owner[1]).view(owner[0].layout.slots[owner[1]].shape)
        return grad / training.scaler.scale
    held = training.gradients.held()
    if held is None:
        return None
    grad = _gather(*owner, held, "gradient")
    return grad if training.scaler.scale == 1.0 else grad / training.scaler.scale


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the gradient that the coming step will use, from ``value`` (full shape, without loss scale).

    Raises:
        StateError: No engine trains ``param``, or the shapes differ.
    """
    unit, index = _must_find(param, "safe_set_full_grad")
    training = _training[unit]
    if training.gradients.exchange.keeps_whole:
        slot = unit.layout.slots[index]
        own = training.gradients.reduced()[slot.range.start : slot.range.stop]
        own.copy_((value * training.scaler.scale).reshape(-1))
        return
    _write(unit, index, training.gradients.writable(), value * training.scaler.scale)


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replaces each gradient by ``update_func(gradient, param)``, whole and without loss scale; those without gradient stay so. Collective.

    Raises:
        StateError: The new gradient has another shape.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def _state_parts(unit: Unit, key: str) -> list[tuple[OwnedSegment, torch.Tensor]] | None:
    optimizer = _training[unit].optimizer
    parts = []
    for segment in optimizer.segments_of(unit):
        value = optimizer.state.get(segment.tensor, {}).get(key)
        if not isinstance(value, torch.Tensor) or value.shape != segment.tensor.shape:
            return None
        parts.append((segment, value))
    return parts


def _state_flat(unit: Unit, key: str) -> torch.Tensor | None:
    parts = _state_parts(unit, key)
    if parts is None:
        return None
    flat = torch.zeros_like(_master(unit))
    for segment, value in parts:
        flat[segment.range.start : segment.range.stop] = value
    return flat


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """The whole state ``optim_state_key`` (``exp_avg``, ...) of ``param``; None before the first step. Collective.

    Of an optimizer that needs whole tensors it has the shape that it has there (a row's moments, say).
    """
    owner = _find(param)
    if owner is None:
        return None
    unit, index = owner
    optimizer = _training[unit].optimizer
    if isinstance(optimizer, WholeTensorOptimizer):
        return _state_of_owner(optimizer, unit, index, optim_state_key)
    flat = _state_flat(unit, optim_state_key)
    if unit.layout.world > 1:
        # A rank whose shard is padding alone has no state and cannot tell whether there is one.
        known = flat is not None and bool(_training[unit].optimizer.segments_of(unit))
        if not unit.collectives.any_rank(known, f"{unit.name}: {optim_state_key}"):
            return None
        flat = flat if flat is not None else torch.zeros_like(_master(unit))
    return _gather(unit, index, flat, optim_state_key) if flat is not None else None


def _state_of_owner(optimizer: WholeTensorOptimizer, unit: Unit, index: int, key: str) -> torch.Tensor | None:
    """A tensor that the owner of a parameter keeps for it, sent to all; None where it keeps none of that name. Collective."""
    name = unit.layout.slots[index].name
    value = (optimizer.state_of(name) or {}).get(key)
    value = value.detach().clone() if isinstance(value, torch.Tensor) else None
    if unit.layout.world == 1:
        return value
    net, owner = unit.collectives, optimizer.owner_of(name)
    if owner is None:
        return None
    kind = net.broadcast_object((tuple(value.shape), value.dtype) if value is not None else None, owner, f"{unit.name}: {key}")
    if kind is None:
        return None
    device = net.topology.device
    flat = value.to(device).reshape(-1) if value is not None else torch.empty(kind[0], dtype=kind[1], device=device).view(-1)
    net.broadcast(flat, owner, f"{unit.name}: {key}")
    return flat.view(kind[0])


def _set_state_of_owner(optimizer: WholeTensorOptimizer, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
    """The owner writes, and all learn whether it can. Collective at stages 1 to 3."""
    name = unit.layout.slots[index].name
    present = (optimizer.state_of(name) or {}).get(key)
    shape = tuple(present.shape) if isinstance(present, torch.Tensor) else None
    owner = optimizer.owner_of(name)
    if unit.layout.world > 1 and owner is not None:
        shape = unit.collectives.broadcast_object(shape, owner, f"{unit.name}: {key}")
    if shape is None:
        raise _no_state(key)
    if shape != tuple(value.shape):
        raise StateError(f"the state {key!r} of parameter {name} has shape {shape}, the value has {tuple(value.shape)}")
    if isinstance(present, torch.Tensor):
        present.copy_(value.detach())


def _no_state(key: str) -> StateError:
    return StateError(f"there is no optimizer state {key!r}; states exist after the first step")


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets the state ``optim_state_key`` of ``param`` from ``value`` (full shape, or the state's own); every rank must call it.

    Collective where an optimizer needs whole tensors.

    Raises:
        StateError: No engine trains ``param``, there is no such state yet, or the shapes differ.
    """
    unit, index = _must_find(param, "safe_set_full_optimizer_state")
    optimizer = _training[unit].optimizer
    if isinstance(optimizer, WholeTensorOptimizer):
        _set_state_of_owner(optimizer, unit, index, optim_state_key, value)
        return
    parts, flat = _state_parts(unit, optim_state_key), _state_flat(unit, optim_state_key)
    if parts is None or flat is None:
        raise _no_state(optim_state_key)
    _write(unit, index, flat, value)
    for segment, state in parts:
        state.copy_(flat[segment.range.start : segment.range.stop])


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the master of ``param``, 1D, maybe empty; None if no engine trains it."""
    owner = _find(param)
    return owner[0].shard_part(owner[1], _master(owner[0])) if owner else None


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the gradient of ``param``, without loss scale, 1D; None when there is none."""
    owner = _find(param)
    if owner is None:
        return None
    training = _training[owner[0]]
    held = training.gradients.held()
    if held is None:
        return None
    part = owner[0].shard_part(owner[1], held)
    return part if training.scaler.scale == 1.0 else part / training.scaler.scale


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of an optimizer state of ``param``, 1D; None before the first step, and where another rank updates it whole."""
    owner = _find(param)
    optimizer = _training[owner[0]].optimizer if owner else None
    if owner and isinstance(optimizer, WholeTensorOptimizer):
        value = (optimizer.state_of(owner[0].layout.slots[owner[1]].name) or {}).get(optim_state_key)
        return value.reshape(-1) if isinstance(value, torch.Tensor) else None
    flat = _state_flat(owner[0], optim_state_key) if owner else None
    return owner[0].shard_part(owner[1], flat) if owner and flat is not None else None


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's part of the master of ``param``; every rank must call it. Collective at stages 1 and 2.

    Raises:
        StateError: No engine trains ``param``.
    """
    unit, index = _must_find(param, "safe_set_local_fp32_param")
    unit.shard_part(index, _master(unit)).copy_(value)
    _publish(unit)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's part of the gradient of ``param`` (without loss scale).

    Raises:
        StateError: No engine trains ``param``.
    """
    unit, index = _must_find(param, "safe_set_local_grad")
    training = _training[unit]
    unit.shard_part(index, training.gradients.writable()).copy_(value * training.scaler.scale)


def _set_own_state(optimizer: WholeTensorOptimizer, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
    name = unit.layout.slots[index].name
    present = (optimizer.state_of(name) or {}).get(key)
    if not isinstance(present, torch.Tensor):
        if unit.layout.world > 1 and optimizer.owner_of(name) != unit.collectives.rank:
            return  # nothing of it is here
        raise _no_state(key)
    if present.numel() != value.numel():
        raise StateError(f"the state {key!r} of parameter {name} has shape {tuple(present.shape)}, the value has {tuple(value.shape)}")
    present.copy_(value.detach().reshape(present.shape))


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of an optimizer state of ``param``; nothing where another rank updates it whole. Local.

    Raises:
        StateError: No engine trains ``param``, there is no such state yet, or the shapes differ.
    """
    unit, index = _must_find(param, "safe_set_local_optimizer_state")
    optimizer = _training[unit].optimizer
    if isinstance(optimizer, WholeTensorOptimizer):
        _set_own_state(optimizer, unit, index, optim_state_key, value)
        return
    parts, flat = _state_parts(unit, optim_state_key), _state_flat(unit, optim_state_key)
    if parts is None or flat is None:
        raise _no_state(optim_state_key)
    unit.shard_part(index, flat).copy_(value)
    for segment, state in parts:
        state.copy_(flat[segment.range.start : segment.range.stop])
