"""The engine users hold: a module whose ``backward`` and ``step`` train a sharded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import nn

from hf_zero.checkpoint import engine_checkpoints as checkpoints
from hf_zero.checkpoint.export import consolidated_state_dict
from hf_zero.checkpoint.model_files import MAX_SHARD_SIZE
from hf_zero.comm.collectives import Collectives
from hf_zero.core import hooks
from hf_zero.core.offloaded_states import Storages, offload_states, reload_states, require_states
from hf_zero.core.optimizer.readable import learning_rates
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.accumulation import Accumulation
from hf_zero.core.step.loss_scale import LossScaler, NullScaler
from hf_zero.core.step.precision import PrecisionPolicy
from hf_zero.core.step.step import Stepper, StepResult
from hf_zero.core.units.unit import Unit
from hf_zero.deepspeed import getters, requests
from hf_zero.deepspeed.offload_handle import OffloadHandle
from hf_zero.errors import ConfigError, StateError
from hf_zero.memory.buffers import HostPool
from hf_zero.observe import log_rank0, warn_once
from hf_zero.profiling.step_profile import build_clock
from hf_zero.sequence_parallel.state import SequenceParallel

if TYPE_CHECKING:  # pydantic costs 0.1 s, and every accelerate program imports this file for an isinstance
    from hf_zero.config.resolve import ResolvedConfig
    from hf_zero.config.schema.root import ZeroConfig
    from hf_zero.metrics import Sink

_running_scales: list[float] = []  # loss scales of the ``Engine.backward`` calls that run now, innermost last


@dataclass
class Progress:
    """Counters of one engine.

    Attributes:
        global_steps: Optimizer steps taken, skipped ones included.
        skipped_steps: Steps skipped for a gradient that is not finite.
        global_samples: Samples of all ranks seen at the boundaries.
        last_step_applied: Whether the last call of ``step`` updated the weights: not off the boundary, not on overflow.
        last_norm: Gradient norm of the last boundary, before clipping, inf if it was skipped; 0-dim tensor, or None before the first.
        last_loss: Loss given to the last backward, detached; on the device.
    """

    global_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    last_step_applied: bool = False
    last_norm: torch.Tensor | None = None
    last_loss: torch.Tensor | None = None


@dataclass(frozen=True)
class EngineParts:
    """What ``build`` has made for an engine.

    Attributes:
        runtime: Hooks on the module.
        units: All units, trainable and frozen.
        collectives: The data-parallel axis.
        policy: The ZeRO stage.
        precision: Element types.
        scaler: Loss scale.
        optimizer: None for an engine that only runs forward.
        stepper: None likewise.
        scheduler: Stepped by the engine; None when the caller steps his own.
        sinks: Monitors of the configuration, on rank 0.
        slices: Groups of ranks that share their samples; None where sequences are whole.
        give_back: Lets go of the process groups that only training needs; every rank calls it.
    """

    runtime: Runtime
    units: list[Unit]
    collectives: Collectives
    policy: StagePolicy
    precision: PrecisionPolicy
    scaler: LossScaler | NullScaler
    optimizer: ShardedOptimizer | None = None
    stepper: Stepper | None = None
    scheduler: Any = None
    sinks: list[Sink] = field(default_factory=list)
    slices: SequenceParallel | None = None
    give_back: Callable[[], None] | None = None


class Engine(nn.Module):
    """Trains ``module`` with ZeRO; what ``hf_zero.initialize`` returns first.

    DeepSpeed's read-only methods and counters (``global_steps``, ``train_batch_size()``, ``get_lr()``, ...) are served from the
    table in ``getters.py``, those that change something from ``requests.py``; any other unknown name is looked up on the wrapped module.

    Attributes:
        module: The user's module, the same object.
        optimizer: ``ShardedOptimizer``, or at stage 3 without optimizer a handle for libraries that expect one, or None.
        lr_scheduler: Stepped inside ``step``; may be set to None.
        training_dataloader: Loader of ``training_data``, if that was given.
        units: The flat buffers.
        destroyed: Whether ``destroy`` was called.
        resolved: The configuration with the source of every value.
    """

    def __init__(self, module: nn.Module, resolved: ResolvedConfig, parts: EngineParts) -> None:
        super().__init__()
        self.module = module
        self.resolved = resolved
        self.settings: ZeroConfig = resolved.config
        self.runtime = parts.runtime
        self.units = parts.units
        self.collectives = parts.collectives
        self.policy = parts.policy
        self.precision = parts.precision
        self.scaler = parts.scaler
        self.stepper = parts.stepper
        self.lr_scheduler = parts.scheduler
        self.sinks = parts.sinks
        self.slices = parts.slices
        self._give_back = parts.give_back
        self.training_dataloader: Any = None
        self.collate_fn: Callable[[Any], Any] | None = None
        self.background = checkpoints.background_of(self.settings, parts.collectives)
        self.progress = Progress()
        self.destroyed = False
        self.aside: list[Storages] = []
        self.aside_pool: HostPool | None = None  # where they wait
        self.aside_guards: list[Any] = []  # handles of hooks
        self.accumulation = Accumulation(resolved.batch.accumulation, self.settings.managed_gradient_accumulation)
        self.clock = build_clock(self.settings, parts.collectives, module, self.progress)
        handle = OffloadHandle(module)
        self.optimizer: Any = parts.optimizer
        if parts.optimizer is not None:
            self._scaled_by_user = False
            # Weak: the module's hooks outlive an engine that is dropped.
            self.runtime.backward.on_user_backward = WeakMethod(self._begin_user_backward)
            parts.optimizer.connect(
                self.step, self.zero_grad, offload_states=partial(offload_states, self), reload_states=partial(reload_states, self)
            )
            parts.optimizer.parameter_offload = handle
        elif self.policy.shards_parameters:
            self.optimizer = handle

    # -- forward, backward, step ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; its hooks gather and release.

        Raises:
            StateError: The engine was destroyed and is asked to train.
        """
        if self.destroyed and self.training and torch.is_grad_enabled():
            raise StateError(
                "a forward for training on an engine that was destroyed (accelerator.free_memory() does that): prepare or initialize the "
                "module again. With Trainer, write trainer.model_wrapped = trainer.model before the next trainer.train()"
            )
        if self.precision.casts_inputs and self.precision.param_dtype is not None:
            args, kwargs = _cast_floating((args, kwargs), self.precision.param_dtype)
        with self.clock.phase("forward"), self._autocast():
            return self.module(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        device_type = self.collectives.topology.device.type
        if self.precision.autocast_dtype is not None:
            return torch.autocast(device_type, dtype=self.precision.autocast_dtype)
        if torch.is_autocast_enabled(device_type):
            warn_once(
                "torch.autocast is on around the engine but torch_autocast.enabled is not set: it is switched off inside forward, as "
                'DeepSpeed does. Write "torch_autocast": {"enabled": true, "dtype": "bfloat16"} to have it'
            )
            return torch.autocast(device_type, enabled=False)
        return nullcontext()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> torch.Tensor:
        """Back-propagates ``loss`` and reduces gradients as the stage says; collective.

        Args:
            loss: Scalar of this rank's micro-batch.
            retain_graph: As in ``Tensor.backward``.
            scale_wrt_gas: Divide by ``gradient_accumulation_steps``; False when the caller has normalised the loss.
            **kwargs: Passed to ``Tensor.backward`` (``inputs``, ``create_graph``).

        Returns:
            ``loss``, divided as it was back-propagated (without the loss scale).

        Raises:
            StateError: The engine has no optimizer, or another engine has taken its module.
            TypeError: ``loss`` is no tensor.
        """
        self._require_optimizer("backward")
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"backward() needs the loss as a tensor, not {type(loss).__name__} {loss!r}; do not call .item() on it before")
        if scale_wrt_gas and self.accumulation.steps > 1:
            loss = loss / self.accumulation.steps
        self.progress.last_loss = loss.detach()
        scale = self.scaler.scale
        scaled = loss if scale == 1.0 else loss.float() * scale
        with self.clock.phase("backward"):
            self._begin_micro_step()
            self.runtime.backward.begin()
            _running_scales.append(scale)
            try:
                scaled.backward(retain_graph=retain_graph, **kwargs)  # type: ignore[no-untyped-call]
            except BaseException:
                self.runtime.backward.abort()
                raise
            finally:
                _running_scales.pop()
            self.runtime.backward.end()
        return loss

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Multiplies ``loss`` with the loss scale, for callers who write ``engine.scale(loss).backward()`` themselves.

        ``retain_graph`` changes nothing: a second backward over the graph gathers again.

        Raises:
            StateError: The engine has no optimizer, or another engine has taken its module.
        """
        self._require_optimizer("scale")
        self.progress.last_loss = loss.detach()
        self._scaled_by_user = True
        return loss if self.scaler.scale == 1.0 else loss.float() * self.scaler.scale

    def _begin_micro_step(self, factor: float = 1.0) -> None:
        """A backward begins whose gradients count, times ``factor``."""
        boundary = self.accumulation.begin(self.runtime.forwards)
        self.stepper.begin_micro_step(boundary, self.accumulation.in_no_sync, factor)  # type: ignore[union-attr]

    def _begin_user_backward(self) -> None:
        """[Note: a backward the user starts]

        ``loss.backward()`` on a loss made of the engine's outputs is a micro-step like ``engine.backward(loss)``: its gradients are divided
        by ``gradient_accumulation_steps``, on their way into the flat buffers. With a loss scale the caller must have multiplied
        with it (``scale``). Another engine's ``backward`` that reaches this module (the two halves of a GAN) has divided already, and
        has scaled with its own loss scale, which is exchanged for ours.
        """
        self._require_optimizer("a backward of its module")
        scale, scaled, self._scaled_by_user = self.scaler.scale, self._scaled_by_user, False
        if _running_scales:
            self._begin_micro_step(scale / _running_scales[-1])
            return
        if scale != 1.0 and not scaled:
            raise StateError(
                f"loss.backward() without the loss scale of {scale:g}, so small fp16 gradients would be lost: "
                "call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._begin_micro_step(1.0 / self.accumulation.steps)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At a boundary: clips, updates, spreads the new weights and steps the scheduler; otherwise nothing. Collective.

        Args:
            lr_kwargs: Keyword arguments for the scheduler's ``step``.

        Raises:
            StateError: The engine has no optimizer, or another engine has taken its module.
        """
        self._require_optimizer("step")
        had_backward, self.progress.last_step_applied = self.accumulation.awaits_step, False
        if not self.accumulation.step_called():
            if not had_backward:
                self._warn_of_gradients_by_hand()
            return
        with self.clock.phase("step"):
            result = self.stepper.take()  # type: ignore[union-attr]
        self.accumulation.stepped()
        progress = self.progress
        progress.global_steps += 1
        progress.global_samples += self.resolved.batch.total
        progress.skipped_steps += result.skipped
        progress.last_step_applied = not result.skipped
        progress.last_norm = result.norm
        if self.lr_scheduler is not None and not result.skipped:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._report(result)

    def _warn_of_gradients_by_hand(self) -> None:
        name = next((name for name, param in self.module.named_parameters() if param.grad is not None), None)
        if name is not None:
            warn_once(
                f"step() without a backward, while {name}.grad is there: gradients written to parameters are not read. Call "
                "engine.backward(loss), and change gradients between it and step() with deepspeed.utils.safe_set_full_grad"
            )

    def _report(self, result: StepResult) -> None:
        progress = self.progress
        offloaded = self.optimizer.state_store.tiers(self.optimizer) if self.clock.memory else {}
        self.clock.end_step(progress.global_steps, self.resolved.batch.total, offloaded)
        every = self.settings.steps_per_print
        print_line = bool(every) and progress.global_steps % every == 0  # type: ignore[operator]
        if not (print_line or self.sinks):
            return
        rates = learning_rates(self.optimizer.param_groups)
        loss = float(progress.last_loss) if progress.last_loss is not None else float("nan")
        if print_line:
            log_rank0(
                "step=%d, skipped=%d, lr=%s, loss=%.6g, grad_norm=%.6g, samples/s=%.2f",
                progress.global_steps,
                progress.skipped_steps,
                rates,
                loss,
                float(result.norm),
                self.clock.samples_per_second(),
            )
        # DeepSpeed's names, so that dashboards made for it go on working.
        record = {"Train/Samples/train_loss": loss, "Train/Samples/lr": rates[0] if rates else 0.0}
        record["Train/Samples/grad_norm"] = float(result.norm)
        if self.scaler.scale != 1.0:
            record["Train/Samples/loss_scale"] = self.scaler.scale
        for sink in self.sinks:
            sink.write(record, progress.global_samples)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that wait for ``step``, and ``param.grad`` of parameters that no unit trains; every rank must call it.

        In the middle of an accumulation the gradients so far are kept, as in DeepSpeed: scripts call this after every micro-step.
        """
        if self.accumulation.awaits_update:
            self.discard_gradients()
        for param in self.module.parameters():
            param.grad = None

    def discard_gradients(self) -> None:
        """Forgets gradients accumulated since the last step, on this rank; every rank must call it."""
        if self.stepper is not None:
            self.stepper.reducer.clear()
            self.accumulation.discarded()

    # -- accumulation -------------------------------------------------------------------------------------------------

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the coming backward completes an optimizer step; the engine's own count is not asked from then on."""
        self.accumulation.say(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-steps inside are not the last of an optimizer step.

        At stages 0 and 1 their gradients stay whole and local, and are reduced with the first backward outside. At stages 2 and 3
        they are reduced at once, because only their shards are kept.
        """
        self.accumulation.enter_no_sync()
        try:
            yield
        finally:
            self.accumulation.leave_no_sync()

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last boundary, before clipping and without loss scale; None before the first.

        A step that was skipped for gradients that are not finite has the norm inf, those that are NaN included, as in DeepSpeed. Where
        such steps are taken (fp32, and bf16 without ``check_grad_overflow``) the norm is what it is, nan included.
        """
        return None if self.progress.last_norm is None else float(self.progress.last_norm)

    # -- saving and loading -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes ``<save_dir>/<tag>/`` with everything a run needs to go on, at any number of ranks; collective.

        Args:
            save_dir: Folder of all checkpoints of the run.
            tag: Name of this one; ``global_step{N}`` when None. Rank 0's counts, as do its other arguments.
            client_state: Values of the caller, returned by ``load_checkpoint``; no pickle, so plain values and tensors only.
            save_latest: Let ``<save_dir>/latest`` name it.
            exclude_frozen_parameters: Leave frozen parameters out (a PEFT base model).

        Raises:
            CheckpointError: On every rank, when it cannot be written; earlier checkpoints stay as they are.
        """
        return checkpoints.save(self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Restores what ``save_checkpoint`` wrote, at any number of ranks and any stage; collective.

        Args:
            load_dir: Folder of all checkpoints of the run.
            tag: Name of one; None is what ``<load_dir>/latest`` names.
            load_module_strict: The checkpoint must hold exactly this model's parameters and buffers.
            load_optimizer_states: Restore moments, param groups and loss scale; without, masters come from the weights.
            load_lr_scheduler_states: Restore the engine's scheduler.
            load_module_only: Restore parameters and buffers alone.
            custom_load_fn: Called with ``src=`` whole state dict and ``dst=`` module, gathered, to load the parameters.

        Returns:
            The folder and the client state; (None, None) when no tag is given and there is no ``latest``.

        Raises:
            CheckpointError: On every rank, naming the file or parameter that does not fit.
        """
        return checkpoints.load(
            self,
            load_dir,
            tag,
            custom_load_fn,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str = MAX_SHARD_SIZE,
    ) -> bool:
        """Writes the whole weights of the training type as safetensors (``pytorch_model.bin`` becomes ``model.safetensors``); collective.

        No rank holds more than its shards and one unit: each unit goes from its gather to its place in the file. ``max_shard_size``
        (bytes, or text like "5GB") divides a larger model into numbered files with the index that ``from_pretrained`` reads.

        Returns:
            False when ``stage3_gather_16bit_weights_on_model_save`` forbids it at stage 3.

        Raises:
            CheckpointError: On every rank, when a file cannot be written.
            ConfigError: ``max_shard_size`` is no size.
        """
        return checkpoints.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters, max_shard_size)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Whole weights of the training type: a dict on rank 0, None elsewhere; collective."""
        require_states(self, "gathering the weights")
        return consolidated_state_dict(self.module, self.collectives, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """As ``_consolidated_16bit_state_dict``, for callers that know it under this name.

        Raises:
            ValueError: The stage is not 3; a plain ``state_dict()`` serves there.
        """
        if not self.policy.shards_parameters:
            raise ValueError(f"parameters are not sharded at zero_optimization.stage {self.policy.stage}; use module.state_dict()")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the user gave it, a plain dict."""
        return self.resolved.raw

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Compiles every block in place with torch.compile (the whole module when no block was found)."""
        options = {"backend": backend, **(compile_kwargs or {})}
        targets = [block.module for block in self.runtime.blocks] or [self.module]
        for target in targets:
            target.compile(**options)

    def to(self, *args: Any, **kwargs: Any) -> Engine:
        """Accepts what changes nothing; units cannot be moved or cast.

        Raises:
            ConfigError: Another device or floating-point type is asked for.
        """
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        here = self.collectives.topology.device
        if device is not None and device.type != here.type:
            raise ConfigError(f"engine.to({device}): the engine lives on {here}; initialize() chooses the device of the local rank")
        present = self.precision.param_dtype or torch.float32
        if dtype is not None and dtype != present:
            raise ConfigError(f"engine.to({dtype}): the engine trains in {present}; set fp16, bf16 or data_types in the configuration")
        return self

    def destroy(self) -> None:
        """Frees gradients, masters and optimizer state. The module stays usable: whole at stages 0 to 2, gathered by its hooks at 3."""
        self.destroyed = True
        for hook in hooks.on_destroy:
            hook(self)
        if self.background is not None:
            self.background.close()
        for sink in self.sinks:
            sink.close()
        self.sinks = []
        if self.stepper is not None:
            self.runtime.stop_training()
            self.optimizer.dismiss()  # first: it waits for updates under way, failed ones too
            for unit in self.units:
                unit.own.drop_master()
            if self._give_back is not None:
                self._give_back()
        self.stepper = None
        self.optimizer = None
        self.lr_scheduler = None
        self.aside_pool = None

    def _require_optimizer(self, what: str) -> None:
        if self.stepper is None:
            raise StateError(
                f"{what}() on an engine without optimizer; pass optimizer= to initialize(), or an optimizer section with model_parameters="
            )
        require_states(self, f"{what}()")
        if not self.runtime.attached:
            raise StateError(f"{what}() on an engine whose module was given to another initialize(); use the newer engine")

    def __getattr__(self, name: str) -> Any:
        if name in getters.METHODS:
            return _bind(getters.METHODS[name], self)
        if name in requests.METHODS:
            return partial(requests.METHODS[name], self)
        if name in getters.VALUES:
            return getters.VALUES[name](self)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):
                raise
            return getattr(super().__getattr__("module"), name)


def _bind(getter: Callable[[Engine], Any], engine: Engine) -> Callable[[], Any]:
    def method() -> Any:
        return getter(engine)

    return method


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return type(value)({key: _cast_floating(item, dtype) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cast_floating(item, dtype) for item in value)
    return value
