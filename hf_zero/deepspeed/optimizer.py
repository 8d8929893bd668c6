"""Add the names of DeepSpeed's optimizers to the engine's optimizer: methods, tables of attributes, and fp32 masters in its state dict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from hf_zero.core.optimizer.segments import learning_rates
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import all_gather_updated, publish
from hf_zero.deepspeed import replaced, requests, safe_values
from hf_zero.deepspeed.offload_handle import OffloadHandle
from hf_zero.deepspeed.served.state_files import FP32_FLAT_GROUPS, SINGLE_PARTITION_OF_FP32_GROUPS
from hf_zero.errors import ConfigError, StateError
from hf_zero.observe import warn_once


def _parts_by_rank(engine: Any) -> list[list[torch.Tensor]]:
    """Return, for each unit, views of every rank's part of the unsharded flat buffer, each (shard_numel,); empty at stage 3, where no rank
    keeps that buffer.
    """
    return [] if engine.stage_policy.parameters_sharded else [list(unit.full.chunk(unit.layout.world)) for unit in engine.optimizer.units]


VALUES: dict[str, Callable[[Any], Any]] = {
    "dp_process_group": lambda engine: engine.seq_data_parallel_group,
    "real_dp_process_group": lambda engine: [engine.seq_data_parallel_group for _ in engine.optimizer.param_groups],
    "partition_count": lambda engine: [engine.collectives.topology.world for _ in engine.optimizer.param_groups],
    "parallel_partitioned_bit16_groups": _parts_by_rank,
    "nccl_start_alignment_factor": lambda engine: 2,  # DeepSpeed's value; parts of units start at multiples of 16 elements
    "partition_gradients": lambda engine: engine.stage_policy.stage >= 2,
    "dtype": lambda engine: engine.optimizer.low_precision_dtype,
    "device": lambda engine: engine.device,
    "gradient_accumulation_dtype": lambda engine: engine.precision.accumulation_dtype,
    "gradient_accumulation_steps": lambda engine: engine.accumulation.steps,
    "communication_data_type": lambda engine: engine.communication_data_type,
    "sequence_parallel_size": lambda engine: engine.sequence_parallel_size,
    "has_moe_layers": lambda engine: engine.has_moe_layers,
    "param_names": lambda engine: engine.param_names,
    "module": lambda engine: engine.module,
    "cpu_offload": lambda engine: engine.zero_cpu_offload(),
    **{
        key: lambda engine, key=key: getattr(engine.settings.zero_optimization, key)  # type: ignore[misc]
        for key in ("contiguous_gradients", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "sub_group_size")
    },
}


class Value:
    """A descriptor of an optimizer attribute that is computed from the engine at each read; a value that a script assigns replaces it."""

    def __init__(self, getter: Callable[[Any], Any]) -> None:
        self._getter = getter

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else self._getter(optimizer._engine())


def _reader(whole: Callable[..., Any], state: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that reads the fp32 value of a parameter with ``whole``, or its state ``optim_state_key`` with ``state``.

    Errors and collectives are those of the two functions, which are in ``safe_values``.
    """

    def read(optimizer: Any, param: torch.Tensor, optim_state_key: str | None = None) -> torch.Tensor | None:
        found: torch.Tensor | None = whole(param) if optim_state_key is None else state(param, optim_state_key)
        return found

    return read


def _writer(whole: Callable[..., Any], state: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that sets the fp32 value of a parameter with ``whole``, or its state ``optim_state_key`` with ``state``."""

    def write(optimizer: Any, value: torch.Tensor, param: torch.Tensor, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            whole(param, value)
        else:
            state(param, value, optim_state_key)

    return write


def _quantize_nontrainable_params(optimizer: Any) -> None:
    """Do nothing if the configuration quantizes frozen weights already; otherwise log a warning that this call has no effect."""
    if not optimizer._engine().zero_quantized_nontrainable_weights():
        warn_once("quantize_nontrainable_params() does nothing: zero_optimization.zero_quantized_nontrainable_weights is not set")


METHODS: dict[str, Callable[..., Any]] = {
    "quantize_nontrainable_params": _quantize_nontrainable_params,
    "get_full_hp_param": _reader(safe_values.safe_get_full_fp32_param, safe_values.safe_get_full_optimizer_state),
    "set_full_hp_param": _writer(safe_values.safe_set_full_fp32_param, safe_values.safe_set_full_optimizer_state),
    "get_local_fp32_param": _reader(safe_values.safe_get_local_fp32_param, safe_values.safe_get_local_optimizer_state),
    "set_local_hp_param": _writer(safe_values.safe_set_local_fp32_param, safe_values.safe_set_local_optimizer_state),
    "get_fp32_grad_for_param": lambda optimizer, param: safe_values.safe_get_full_grad(param),
    "set_fp32_grad_for_param": lambda optimizer, value, param: safe_values.safe_set_full_grad(param, value),
    "get_local_fp32_grad_for_param": lambda optimizer, param: safe_values.safe_get_local_grad(param),
    "set_local_grad_for_param": lambda optimizer, value, param: safe_values.safe_set_local_grad(param, value),
    **{
        name: lambda optimizer, *args, name=name, **kwargs: getattr(optimizer._engine(), name)(*args, **kwargs)
        for name in ("empty_partition_cache", "offload_states", "reload_states")
    },
    # DeepSpeed's stage 3 puts masters into the inner optimizer's groups during a step; hf_zero never changes these groups.
    **dict.fromkeys(("_set_fp32_optimizer_param_groups", "_clear_fp32_optimizer_param_groups"), lambda optimizer: None),
}


def bind(optimizer_class: type[Any]) -> None:
    """Add all attributes and methods of the tables to ``optimizer_class``."""
    for name, getter in VALUES.items():
        setattr(optimizer_class, name, Value(getter))
    for name, method in METHODS.items():
        setattr(optimizer_class, name, method)


def add_masters(state: dict[str, Any], optimizer: ShardedOptimizer, stage: int) -> dict[str, Any]:
    """Return ``state`` with this rank's masters, not copied: one tensor (shard_numel,) per trained unit.

    Without the masters a 16-bit run would resume from rounded weights. At stage 0 in fp32 they are the model's own weights.
    """
    units = _trained(optimizer)
    if stage == 0 and all(unit.master is unit.shard for unit in units):
        return state
    return {**state, FP32_FLAT_GROUPS if stage == 3 else SINGLE_PARTITION_OF_FP32_GROUPS: [unit.master for unit in units]}


def take_masters(state: dict[str, Any], optimizer: ShardedOptimizer) -> list[torch.Tensor] | None:
    """Remove from ``state`` the masters that ``add_masters`` added and return them; None if there are none.

    Raises:
        StateError: The masters belong to another number of ranks or to another model.
    """
    found = [state.pop(key) for key in (FP32_FLAT_GROUPS, SINGLE_PARTITION_OF_FP32_GROUPS) if key in state]
    if not found:
        return None
    saved, own = [tuple(master.shape) for master in found[0]], [(unit.layout.shard_numel,) for unit in _trained(optimizer)]
    if saved != own:
        raise StateError(
            f"this optimizer state holds fp32 masters of {sum(shape[0] for shape in saved):,} elements in {len(saved)} parts, "
            f"but this optimizer has {sum(shape[0] for shape in own):,} in {len(own)}: the state is from another model or "
            "another number of ranks. To change the number of ranks, use save_checkpoint and load_checkpoint"
        )
    return list(found[0])


@torch.no_grad()
def set_masters(optimizer: DeepSpeedOptimizer, masters: Sequence[torch.Tensor]) -> None:
    """Write this rank's masters, and update the weights of all ranks from them; collective.

    A script that only resets the optimizer, in plain PyTorch, would lose the weights that it has trained, so it gets a warning.
    """
    optimizer.state_store.settle()
    units = _trained(optimizer)
    trained = optimizer.engine is not None and optimizer.engine.global_steps > 0
    if trained and any(not torch.equal(cast(Any, unit.master), master) for unit, master in zip(units, masters, strict=True)):
        warn_once(
            "optimizer.load_state_dict: the state holds fp32 masters, as DeepSpeed's does, so the model has the weights of the moment at "
            "which the state was taken. To reset the optimizer alone, use state_dict and load_state_dict of the object given to "
            "initialize() (engine.optimizer.inner), assign engine.optimizer.state = collections.defaultdict(dict), or "
            f"remove {SINGLE_PARTITION_OF_FP32_GROUPS!r} (at stage 3 {FP32_FLAT_GROUPS!r}) from the state"
        )
    for unit, master in zip(units, masters, strict=True):
        own: Any = unit.master
        own.copy_(master)
    publish(units)
    for pending in [all_gather_updated(unit) for unit in units]:
        if pending is not None:
            pending.wait()


def _trained(optimizer: ShardedOptimizer) -> list[Unit]:
    return [unit for unit in optimizer.units if unit.master is not None]


def norm_groups(optimizer: DeepSpeedOptimizer) -> list[torch.Tensor]:
    """Return the norm of each param group's gradients that wait for ``step``, over all ranks, times ``loss_scale``, 0-dim; collective."""
    engine = optimizer._engine()
    parts = optimizer._gradient_parts()
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
    """A mixin with DeepSpeed's methods that ``give_names`` adds to the class of an engine's optimizer; more are in the tables above.

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
        if value != self.loss_scale and self._engine().accumulation.in_window:
            raise StateError(
                f"the loss scale was set to {value!r}, but gradients that were scaled by {self.loss_scale:g} wait for step(): set it "
                "before the first micro-step of an optimizer step"
            )
        self.scaler.cur_scale = value

    cur_scale = loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """Multiply the loss by ``loss_scale`` from the next micro-step on, in place of the engine's own scale, until the next call.

        Raises:
            ConfigError: The number is not a finite number above 0.
            StateError: Gradients with another scale wait for ``step``.
        """
        self.loss_scale, self.scaler.dynamic = loss_scale, False

    def check_overflow(self, *_args: Any, **_kwargs: Any) -> bool:
        """Return whether a gradient that waits for ``step`` is not finite on any rank, and set ``overflow``; collective.

        False before the backward that completes an optimizer step.
        """
        engine = self._engine()
        self.overflow = engine.accumulation.awaits_update and not math.isfinite(engine.stepper.measure())
        return self.overflow

    @property
    def skip_step(self) -> bool:
        """Return False: an assigned True has taken effect at once."""
        return False

    @skip_step.setter
    def skip_step(self, skip: bool) -> None:
        """Leave out the update that waits: its ``step`` changes nothing, also not the schedule; every rank must assign the same.

        DeepSpeed-Chat assigns it to the model without an overflow, where one of two models has one.

        Raises:
            StateError: No gradients wait for ``step``.
        """
        if not skip:
            return
        engine = self._engine()
        if not engine.accumulation.awaits_update:
            raise StateError(
                "engine.optimizer.skip_step was set to True, but no gradients wait for step(), so none would be left out: set it between "
                "the backward that completes an optimizer step and step()"
            )
        engine.zero_grad()

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

    def __setattr__(self, name: str, value: Any) -> None:
        replaced.report(name, value, "engine.optimizer", method=True)
        super().__setattr__(name, value)

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
        shown = self._engine().stepper.reducer.shown
        shown.begin_read()
        shown.reads.exposed = True
        return self._gradient_parts()

    def _gradient_parts(self) -> dict[int, list[torch.Tensor]]:
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

    def free_states(self) -> None:
        """Free state and segments; the param groups remain, without parameters."""
        super().free_states()
        self.engine = None


bind(DeepSpeedOptimizer)

_kinds: dict[str, type[Any]] = {}  # combined classes by name


def give_names(optimizer: ShardedOptimizer, engine: Any) -> None:
    """Change the class of ``optimizer``, which ``engine`` steps, to a subclass with DeepSpeed's methods."""
    kind = type(optimizer)
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    optimizer.__class__ = _kinds.setdefault(kind.__name__, type(kind.__name__, (DeepSpeedOptimizer, kind), names))
    named: Any = optimizer  # Any, because the class changes at run time
    named.engine, named.scaler = engine, engine.scaler
    named.parameter_offload = OffloadHandle(engine.module)
