"""Define the engine that ``initialize`` returns: the core engine with DeepSpeed's methods."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.checkpoint.model.export import consolidated_state_dict, write_model_files
from hf_zero.checkpoint.model.model_files import MAX_SHARD_SIZE
from hf_zero.core.engine_parts import EngineParts
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.deepspeed import adapter_files, getters, held_weights, replaced, requests
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.deepspeed.offload_handle import OffloadHandle
from hf_zero.deepspeed.optimizer import give_names
from hf_zero.deepspeed.safe_values import Training, register_joining, register_training
from hf_zero.deepspeed.served.autocast import mark_lower_precision
from hf_zero.errors import ConfigError, StateError
from hf_zero.observe import warn_once

if TYPE_CHECKING:
    from hf_zero.config.resolve import ResolvedConfig
    from hf_zero.sequence_parallel.state import SequenceParallel


class Engine(ConfiguredEngine):
    """Train ``module`` with ZeRO; ``hf_zero.initialize`` returns this engine as its first result.

    DeepSpeed's read-only methods and counters (``global_steps``, ``train_batch_size()``, ``get_lr()``, ...) come from the tables in
    ``getters.py``, methods with side effects from ``requests.py``. Any unknown name is looked up on the wrapped module.

    Args:
        module: The user's module.
        resolved: The configuration.
        parts: Parts of the engine.
        sequence_parallel: Groups of ranks that share their samples; None if sequences are not divided.

    Attributes:
        optimizer: ``ShardedOptimizer``, or at stage 3 without optimizer a handle for libraries that expect one, or None.
        training_route: ``route`` of ``deepspeed_io`` for the data that ``initialize`` is given.
        mpu: The argument of ``initialize``, for scripts that read it; the engine does not.
    """

    training_route = "train"
    mpu: Any = None
    _after_destroy = (
        " (accelerator.free_memory() does that): prepare or initialize the module again. With Trainer, write "
        "trainer.model_wrapped = trainer.model before the next trainer.train()"
    )

    def __init__(
        self,
        module: nn.Module,
        resolved: ResolvedConfig,
        parts: EngineParts,
        sequence_parallel: SequenceParallel | None = None,
    ) -> None:
        super().__init__(module, resolved, parts, sequence_parallel)
        if self.precision.autocast_dtype is not None:
            mark_lower_precision(module, self.precision.autocast_dtype, self.settings.torch_autocast.lower_precision_safe_modules)
        self._training: list[Training] = []
        if parts.optimizer is not None and parts.stepper is not None:
            give_names(parts.optimizer, self)
            self._register(parts.stepper.reducer.gradients)
            register_joining(parts.stepper.trained, self.scaler)
        elif self.stage_policy.parameters_sharded:
            self.optimizer = OffloadHandle(module)

    def _register(self, entries: Sequence[UnitGradients]) -> None:
        """Register the trained units, so that ``safe_get_*`` and similar functions find their parameters."""
        if self.stepper is None:
            return
        shown, defers = self.stepper.reducer.shown, self.stage_policy.allows_deferral
        for gradients in entries:
            self._training.append(Training(gradients, shown, self.optimizer, self.scaler, defers))
            register_training(gradients.unit, self._training[-1])

    def joined(self, entries: Sequence[UnitGradients]) -> None:
        """Add units of parameters that join later, like ``hf_zero.core.engine.Engine.joined``, and register them."""
        super().joined(entries)
        self._register(entries)

    # -- steps ----------------------------------------------------------------------------------------------------------

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward completes an optimizer step; from then on the engine does not count micro-steps itself."""
        self.accumulation.say(is_boundary)

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Return the norm of all gradients at the last boundary (0-dim), before clipping and without loss scale; None before the first.

        The norm is inf if a step was skipped because of non-finite gradients, also for NaN, as in DeepSpeed. If such steps are not skipped
        (fp32, and bf16 without ``check_grad_overflow``), the norm may be nan.
        """
        return None if self.progress.last_norm is None else self.progress.last_norm.detach().clone()

    train_batch = requests.train_batch
    allreduce_gradients = requests.allreduce_gradients
    _backward_epilogue = requests.backward_epilogue
    _broadcast_model = requests.broadcast_model
    no_sync = requests.no_sync  # type: ignore[assignment]  # core's takes an argument
    coalesce_grad_reduction = requests.coalesce_grad_reduction
    set_train_batch_size = requests.set_train_batch_size
    set_train_micro_batch_size = requests.set_train_micro_batch_size
    deepspeed_io = requests.deepspeed_io

    # -- whole weights ----------------------------------------------------------------------------------------------------

    module_state_dict = requests.module_state_dict
    _get_optimizer_ckpt_name = requests.optimizer_file
    load_module_state_dict = requests.load_module_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str = MAX_SHARD_SIZE,
    ) -> bool:
        """Write unsharded weights in the training dtype as safetensors (``pytorch_model.bin`` becomes ``model.safetensors``); collective.

        No rank holds more than its shards and one unsharded unit: each unit is gathered, written to the file and freed. ``max_shard_size``
        (bytes, or text like "5GB") divides a larger model into numbered files with the index that ``from_pretrained`` reads.

        Returns:
            True, even if ``stage3_gather_16bit_weights_on_model_save`` is false; a warning is logged once then.

        Raises:
            CheckpointError: A file cannot be written; on every rank.
            ConfigError: ``max_shard_size`` is not a size.
        """
        self.offloaded_states.require_none("save_16bit_model()")
        self.averages.require_loaded("save_16bit_model()")
        held_weights.gathers(self)
        write_model_files(self.module, self.collectives, Path(save_dir), save_filename, exclude_frozen_parameters, max_shard_size)
        return True

    def save_fp16_model(self, *args: Any, **kwargs: Any) -> bool:
        """Save 16-bit weights like ``save_16bit_model``, under DeepSpeed's older name."""
        return self.save_16bit_model(*args, **kwargs)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return unsharded weights in the training dtype: a dict on rank 0, None on other ranks; collective.

        Ranks that write files on a disk of their node get the dict too (``held_weights.wanted_here``).
        Without frozen parameters it still has those that PEFT writes (``adapter_files``).
        """
        self.offloaded_states.require_none("gathering the weights")
        self.averages.require_loaded("gathering the weights")
        kept = adapter_files.frozen_names(self.module, self.collectives) if exclude_frozen_parameters else frozenset()
        here = any(wanted() for wanted in held_weights.wanted_here)
        state = consolidated_state_dict(self.module, self.collectives, exclude_frozen_parameters, kept, here)
        held_weights.note(self, state)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return ``_consolidated_16bit_state_dict()``; DeepSpeed has it under this name at stage 3.

        Raises:
            ValueError: The stage is not 3; use ``state_dict()``.
        """
        if not self.stage_policy.parameters_sharded:
            raise ValueError(f"parameters are not sharded at zero_optimization.stage {self.stage_policy.stage}; use module.state_dict()")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete; collective.

        Raises:
            CheckpointError: The checkpoint could not be written; on every rank, with the same message.
        """
        self.checkpoints.wait()

    snapshot = requests.snapshot
    load_snapshot = requests.load_snapshot
    rewind_also = requests.rewind_also

    # -- life -------------------------------------------------------------------------------------------------------------

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Compile each block with torch.compile, as ``hf_zero.core.engine.Engine.compile`` does.

        Args:
            backend: As for ``torch.compile``.
            compile_kwargs: Further arguments of ``torch.compile``.
            *args: ``schedule`` and ``compiled_autograd_enabled`` of DeepSpeed.
            **kwargs: The same by name, and further arguments of ``torch.compile``.

        Raises:
            ConfigError: ``schedule`` names passes, which change nothing here.
        """
        kwargs |= dict(zip(("schedule", "compiled_autograd_enabled"), args, strict=False))
        if kwargs.pop("schedule", None):
            raise ConfigError(
                "engine.compile(schedule=...) names passes of DeepCompile, and no such pass is run: the engine gathers, prefetches and "
                "reduces around the graph of each block. Leave schedule out"
            )
        if kwargs.pop("compiled_autograd_enabled", False):
            warn_once(
                "engine.compile(compiled_autograd_enabled=True) is not used: the backward of each block is compiled together with its "
                "forward, and the engine reduces between the graphs"
            )
        super().compile(backend, compile_kwargs, **kwargs)

    empty_partition_cache = requests.empty_partition_cache
    offload_states = requests.offload_states
    reload_states = requests.reload_states

    def destroy(self) -> None:
        """Free gradients, masters and optimizer state. The module stays usable: unsharded, or at stage 3 gathered by its hooks."""
        super().destroy()
        self._training = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse to copy the engine.

        Raises:
            StateError: Always; its process groups, hooks and optimizer belong to one module.
        """
        raise StateError(
            "copy.deepcopy of an engine: its hooks, process groups and optimizer belong to one module. Copy the module, "
            "copy.deepcopy(engine.module), and give the copy to deepspeed.initialize or accelerator.prepare; to have whole weights, copy "
            "it inside `with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):`"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle the engine.

        Raises:
            StateError: Always; its process groups, hooks and optimizer belong to this process.
        """
        raise StateError(
            "an engine was pickled (torch.save, pickle): its process groups, hooks and optimizer belong to this process. Save the module, "
            "torch.save(engine.module, file), at stage 3 inside `with "
            "deepspeed.zero.GatheredParameters(list(engine.module.parameters())):` on all ranks; or save what training needs with "
            "engine.save_checkpoint(folder)"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if not getters.assign(self, name, value):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):
                raise
            module = super().__getattr__("module")
            if (error := replaced.missing_step(name)) is not None and not hasattr(module, name):
                raise error from None
            return getattr(module, name)


getters.bind(Engine)
