"""Read and write unsharded fp32 values, gradients and optimizer state of single parameters: DeepSpeed's ``safe_get`` and ``safe_set``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.param_states import gather_param, write_param
from hf_zero.core.optimizer.segments import master_of
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.read_gradients import ShownGradients
from hf_zero.core.step.precision import LossScaler
from hf_zero.core.step.trained_units import TrainedUnits
from hf_zero.core.step.written import write_gradient, written_gradient
from hf_zero.core.units.marks import stages_of
from hf_zero.core.units.parts import part_of, whole_of
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.core.units.values import adopt_present_writes, all_gather_updated, publish
from hf_zero.errors import StateError


@dataclass(frozen=True)
class Training:
    """The objects that train a unit: its gradients, the optimizer and the loss scale. The engine keeps this record alive.

    Attributes:
        gradients: Gradients of the unit.
        shown: Gradients that scripts see in ``param.grad``.
        optimizer: Optimizer that updates the unit.
        scaler: Loss scale.
        defers: Whether gradients may wait for their reduction (``no_sync``).
    """

    gradients: UnitGradients
    shown: ShownGradients
    optimizer: ShardedOptimizer
    scaler: LossScaler
    defers: bool


_training: WeakValueDictionary[Unit, Training] = WeakValueDictionary()
_joining: WeakKeyDictionary[TrainedUnits, LossScaler] = WeakKeyDictionary()


def register_training(unit: Unit, training: Training) -> None:
    """Register ``training`` for ``unit``, for the functions of this file; the registration ends when nothing refers to ``training``."""
    _training[unit] = training


def register_joining(trained: TrainedUnits, scaler: LossScaler) -> None:
    """Register the parameters that an engine may train later: they have gradients before they have a unit."""
    _joining[trained] = scaler


def _find(param: torch.Tensor) -> tuple[Unit, int] | None:
    owner = find_unit(param)
    if owner is not None and owner[0].own.offloaded:
        raise StateError(
            "values of a parameter are not available while state of its engine is offloaded to the host; call engine.reload_states() first"
        )
    return owner if owner is not None and owner[0].master is not None and owner[0] in _training else None


def _must_find(param: torch.Tensor, what: str) -> tuple[Unit, int]:
    owner = _find(param)
    if owner is None:
        raise StateError(f"{what}: this tensor (shape {tuple(param.shape)}) is not a parameter that an engine trains")
    return owner


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return the unsharded fp32 master of ``param``, in its full shape; None if no engine trains it. Collective."""
    owner = _find(param)
    if owner is None:
        return None
    adopt_present_writes(owner[0])
    return whole_of(param, gather_param(*owner, master_of(owner[0]), "master"))


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the fp32 master and the 16-bit value of ``param`` to ``value`` (full shape, the same on every rank); collective.

    Raises:
        StateError: No engine trains ``param``, or the shapes differ.
    """
    unit, index = _must_find(param, "safe_set_full_fp32_param")
    adopt_present_writes(unit)
    write_param(unit, index, master_of(unit), part_of(param, value))
    _publish(unit)


def _publish(unit: Unit) -> None:
    publish([unit])
    pending = all_gather_updated(unit)
    if pending is not None:
        pending.wait()


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the unsharded gradient of ``param`` that the next step will use, averaged over ranks, without loss scale; collective.

    Returns:
        A new tensor; None if there is no gradient. In a loop over accelerate the gradients of a step stay until ``zero_grad`` or the next
        forward, see [Note: gradients after a step].

    Raises:
        StateError: A script has written a gradient to ``param.grad`` that the step would refuse; on every rank. In the middle of an
            accumulation, for a parameter that several stages of a pipeline hold; on these.
    """
    owner = _find(param)
    if owner is None:
        waiting = ((grad, scaler) for trained, scaler in _joining.items() if (grad := trained.gradient_of(param)) is not None)
        found = next(((grad, scaler) for grad, scaler in waiting), None) or _untrained(param)
        return None if found is None else whole_of(param, found[0] / found[1].scale)
    training = _training[owner[0]]
    training.shown.begin_read([param])
    grad = written_gradient(training.gradients, owner[1], training.shown, _everyone(training.gradients))
    grad = grad if grad is not None else _summed(training, *owner)
    if grad is None:
        return training.shown.reads.of_last_step(*owner)
    if stages_of(param) and not training.shown.reads.complete:
        raise StateError(
            f"safe_get_full_grad of {owner[0].layout.slots[owner[1]].name}: several stages of the pipeline hold this parameter, and their "
            "gradients are added up with the backward that completes an optimizer step: read it after that backward"
        )
    return whole_of(param, grad if training.scaler.scale == 1.0 else grad / training.scaler.scale)


def _untrained(param: torch.Tensor) -> tuple[torch.Tensor, LossScaler] | None:
    """Return the gradient, and the loss scaler, of a parameter that requires one and that an engine does not train; local."""
    found = ((trained.untrained.of({id(param)}), scaler) for trained, scaler in _joining.items())
    return next(((own[0][2], scaler) for own, scaler in found if own), None)


def _summed(training: Training, unit: Unit, index: int) -> torch.Tensor | None:
    """Return the unsharded accumulated gradient, averaged over ranks and multiplied by the loss scale; collective."""
    gradients = training.gradients
    if not gradients.exchange.reduces and gradients.has_local:
        return _mean_over_ranks(gradients, index)
    held = gradients.held()
    grad = gather_param(unit, index, held, "gradient") if held is not None else None
    waits = gradients.collected.late or (training.defers and gradients.has_local)
    if _everyone(gradients).any_rank(waits, "waiting gradients"):
        waiting = _mean_over_ranks(gradients, index)
        grad = waiting if grad is None else grad + waiting
    return grad


def _require_own(training: Training, unit: Unit, index: int, what: str) -> None:
    """Raise if a script has assigned its own gradient to ``param.grad``, because no rank has a part of its mean; local.

    Raises:
        StateError: The script has assigned a gradient.
    """
    param = unit.params[index]
    if param is not None and training.shown.is_written(param):
        name = unit.layout.slots[index].name
        raise StateError(f"{what} of {name}: {name}.grad was written by the script; use safe_get_full_grad and safe_set_full_grad instead")


def _everyone(gradients: UnitGradients) -> Collectives:
    """Return the collectives of all ranks whose gradients are summed, including ranks with the same shards (replicas)."""
    network = gradients.exchange.collectives
    return network if network.topology.of_experts else network.data


def _mean_over_ranks(gradients: UnitGradients, index: int) -> torch.Tensor:
    """Return a copy of the gradient of parameter ``index``, which is not reduced yet, averaged over ranks; collective."""
    slot, network = gradients.unit.layout.slots[index], _everyone(gradients)
    own = gradients.collected.own()[slot.range.start : slot.range.stop].clone()
    network.all_reduce(own, f"{gradients.unit.name}: gradient").wait()
    own = own.mul_(gradients.exchange.policy.post_scale) if gradients.exchange.reduces else own.div_(network.world)
    return own.view(slot.shape)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the gradient that the next step will use to ``value`` (full shape, without loss scale), instead of ``param.grad``.

    Raises:
        StateError: No engine trains ``param``, or the shapes differ.
    """
    unit, index = _must_find(param, "safe_set_full_grad")
    training = _training[unit]
    training.shown.begin_read([param])
    write_gradient(training.gradients, index, part_of(param, value) * training.scaler.scale)
    training.shown.replace_written(param)


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replace each unsharded gradient, without loss scale, by ``update_func(gradient, param)``; skip parameters without a gradient.
    Collective.

    Raises:
        StateError: The new gradient has another shape.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return the unsharded optimizer state ``optim_state_key`` (``exp_avg``, ...) of ``param``; None before the first step. Collective.

    If the optimizer updates whole tensors, the state has the optimizer's own shape (for example one moment per row).
    """
    owner = _find(param)
    return _training[owner[0]].optimizer.param_states.read(*owner, optim_state_key) if owner else None


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the optimizer state ``optim_state_key`` of ``param`` to ``value`` (full shape, or the state's own); every rank must call it.

    Collective if the optimizer updates whole tensors.

    Raises:
        StateError: No engine trains ``param``, there is no such state yet, or the shapes differ.
    """
    unit, index = _must_find(param, "safe_set_full_optimizer_state")
    _training[unit].optimizer.param_states.write(unit, index, optim_state_key, value)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of the master of ``param``, 1-dim and possibly empty; None if no engine trains it."""
    owner = _find(param)
    if owner is None:
        return None
    adopt_present_writes(owner[0])
    return owner[0].shard_part(owner[1], master_of(owner[0]))


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of the gradient of ``param``, without loss scale, 1-dim; None if there is no gradient.

    Raises:
        StateError: The script has written ``param.grad``.
    """
    owner = _find(param)
    if owner is None:
        return None
    training = _training[owner[0]]
    training.shown.begin_read([param])
    _require_own(training, *owner, "safe_get_local_grad")
    held = training.gradients.held()
    if held is None:
        return None
    part = owner[0].shard_part(owner[1], held)
    training.shown.reads.exposed |= training.scaler.scale == 1.0
    return part if training.scaler.scale == 1.0 else part / training.scaler.scale


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of an optimizer state of ``param``, 1-dim; None before the first step, or if another rank has all of it."""
    owner = _find(param)
    return _training[owner[0]].optimizer.param_states.read_own(*owner, optim_state_key) if owner else None


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's part of the master of ``param``; every rank must call it. Collective at stages 1 and 2.

    Raises:
        StateError: No engine trains ``param``.
    """
    unit, index = _must_find(param, "safe_set_local_fp32_param")
    adopt_present_writes(unit)
    unit.shard_part(index, master_of(unit)).copy_(value)
    _publish(unit)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's part of the gradient of ``param`` (without loss scale).

    Raises:
        StateError: No engine trains ``param``, or the script has written ``param.grad``.
    """
    unit, index = _must_find(param, "safe_set_local_grad")
    training = _training[unit]
    training.shown.begin_read([param])
    _require_own(training, unit, index, "safe_set_local_grad")
    unit.shard_part(index, training.gradients.writable(index)).copy_(value * training.scaler.scale)
    training.shown.replace_written(param)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of an optimizer state of ``param``; it does nothing if another rank has all of the state. Local.

    Raises:
        StateError: No engine trains ``param``, there is no such state yet, or the shapes differ.
    """
    unit, index = _must_find(param, "safe_set_local_optimizer_state")
    _training[unit].optimizer.param_states.write_own(unit, index, optim_state_key, value)
