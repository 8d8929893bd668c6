"""Add to the engine's optimizer the methods that scripts and libraries call under DeepSpeed's names."""

from __future__ import annotations

import math
from typing import Any

import torch

from hf_zero.core.optimizer.segments import learning_rates
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.units.layout import FROZEN
from hf_zero.deepspeed import optimizer_getters, requests
from hf_zero.deepspeed.offload_handle import OffloadHandle
from hf_zero.deepspeed.optimizer_state import add_masters, set_masters, take_masters
from hf_zero.errors import ConfigError, StateError


def norm_groups(optimizer: DeepSpeedOptimizer) -> list[torch.Tensor]:
    """Return the norm of each param group's gradients that wait for ``step``, over all ranks, times ``loss_scale``, 0-dim; collective."""
    engine = optimizer._engine()
    parts = optimizer.averaged_gradients
    squares = torch.zeros(len(optimizer.param_groups), dtype=torch.float64, device=engine.device)
    for group, tensors in parts.items():
        for part in tensors:
            squares[group] += part.double().square().sum().to(squares.device)
    if engine.stage_policy.optimizer_sharded:
        engine.collectives.all_reduce(squares, "norms of param groups").wait()
    return list(squares.sqrt().float())


def _is(optimizer: DeepSpeedOptimizer, other: object) -> bool:
    """Compare equal to the inner optimizer too, because DeepSpeed returns the inner optimizer itself at stage 0."""
    return optimizer is other or optimizer.inner is other


class DeepSpeedOptimizer(ShardedOptimizer):
    """A mixin with DeepSpeed's methods that ``give_names`` adds to the class of an engine's optimizer; more are in ``optimizer_getters``.

    Attributes:
        engine: The engine that the optimizer belongs to; None after ``destroy``.
        scaler: The loss scale, with DeepSpeed's names: ``cur_scale``, ``cur_iter``, ``scale_window``, ...
        parameter_offload: Handle for libraries that look for DeepSpeed's hook object here.
    """

    engine: Any
    scaler: Any
    parameter_offload: OffloadHandle
    _get_norm_groups = norm_groups
    __eq__ = _is  # type: ignore[assignment]
    __hash__ = ShardedOptimizer.__hash__

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the inner torch optimizer."""
        return self.inner

    @property
    def loss_scale(self) -> float:
        """Return the factor that the loss is multiplied by; 1 without fp16."""
        return float(self.scaler.scale)

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.scaler.cur_scale = value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale changes."""
        return bool(self.scaler.dynamic)

    def needs_scaler(self) -> bool:
        """Return whether a script's own backward needs ``engine.scale(loss)``: the loss scale changes, or is not 1."""
        return self.dynamic_loss_scale or self.loss_scale != 1.0

    @property
    def clip_grad(self) -> float:
        """Return the norm that gradients are clipped to; 0 is off. A script may also set it between steps, alike on every rank.

        Raises:
            ConfigError: The number to set is negative or nan.
        """
        return float(self._engine().gradient_clipping())

    @clip_grad.setter
    def clip_grad(self, max_norm: float) -> None:
        if not max_norm >= 0:
            raise ConfigError(f"optimizer.clip_grad was set to {max_norm!r}; a number of at least 0 is allowed, and 0 turns clipping off")
        requests.set_gradient_clipping(self._engine(), 0.0 if math.isinf(max_norm) else float(max_norm))

    @property
    def loss_scaler(self) -> Any:
        """Return the loss scale object (``scaler``)."""
        return self.scaler

    loss_scale_config = loss_scaler

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Return the learning rate of the first param group; nan if the optimizer computes it itself."""
        return learning_rates(self.param_groups[:1])[0]

    @property
    def _global_grad_norm(self) -> float | None:
        """Return the gradient norm (``norm``) as a float."""
        return None if self.norm is None else float(self.norm)

    def _engine(self) -> Any:
        if self.engine is None:
            raise StateError("this optimizer no longer belongs to an engine, because engine.destroy() was called")
        return self.engine

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """Return the dtype in which parameters are trained."""
        dtype: torch.dtype | None = self._engine().precision.param_dtype
        return dtype if dtype is not None else torch.float32

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """Return this rank's fp32 masters, each (elements,): the tensors that the inner optimizer updates in place, in its order.

        If the optimizer updates whole tensors, which exist only during a step, return one tensor per unit.
        """
        self.state_store.settle()
        return [segment.tensor for segment in self.segments] or [unit.master for unit in self.units if unit.master is not None]

    single_partition_of_fp32_groups = fp32_groups_flat = fp32_partitioned_groups_flat

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """Return the model's parameters by param group, in the order of ``averaged_gradients``."""
        groups: list[list[torch.Tensor]] = [[] for _ in self.param_groups]
        for unit in self.units:
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                if slot.group != FROZEN and param is not None:
                    groups[slot.group].append(param)
        return groups

    bit16_groups = fp16_groups

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """Return this rank's part of each parameter's gradient by param group: (elements,), maybe empty, times ``loss_scale``, not copied.

        The dict is empty if no gradients wait for ``step``.
        """
        parts: dict[int, list[torch.Tensor]] = {}
        for gradients in self._engine().stepper.reducer.gradients:
            held = gradients.held()
            for index, slot in enumerate(gradients.unit.layout.slots if held is not None else ()):
                if slot.group != FROZEN:
                    parts.setdefault(slot.group, []).append(gradients.unit.shard_part(index, held))
        return parts

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Return ``averaged_gradients`` in fp32: group index -> position in the group -> this rank's part of the gradient."""
        return {group: {place: part.float() for place, part in enumerate(parts)} for group, parts in self.averaged_gradients.items()}

    def _own_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer state, with masters and a dynamic loss scale; not for checkpoints of the engine."""
        state = super()._own_state_dict()
        if self.dynamic_loss_scale:
            state = {**state, "loss_scaler": self.scaler.state_dict()}
        return state if self.engine is None else add_masters(state, self, self.engine.zero_optimization_stage())

    def _load_own_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of ``state_dict`` of the same rank and world size; the weights change with the masters, which is collective.

        Raises:
            StateError: The state belongs to another model or another number of ranks.
        """
        state = dict(state_dict)
        scale, masters = state.pop("loss_scaler", None), take_masters(state, self)
        super()._load_own_state_dict(state)
        if scale is not None:
            self.scaler.load_state_dict(scale)
        if masters is not None:
            set_masters(self, masters)

    def refresh_fp32_params(self) -> None:
        """Copy the 16-bit weights to the masters, after a script wrote to the module (``load_state_dict``) at stages 0 to 2; local."""
        for unit in self.units:
            unit.own.refresh_master()

    def dismiss(self) -> None:
        """Free state and segments; the param groups remain, without parameters."""
        super().dismiss()
        self.engine = None


optimizer_getters.bind(DeepSpeedOptimizer)

_kinds: dict[str, type[Any]] = {}  # combined classes by name


def give_names(optimizer: ShardedOptimizer, engine: Any) -> None:
    """Change the class of ``optimizer``, which ``engine`` steps, to a subclass with DeepSpeed's methods."""
    kind = type(optimizer)
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    optimizer.__class__ = _kinds.setdefault(kind.__name__, type(kind.__name__, (DeepSpeedOptimizer, kind), names))
    named: Any = optimizer  # Any, because the class changes at run time
    named.engine, named.scaler = engine, engine.scaler
    named.parameter_offload = OffloadHandle(engine.module)
