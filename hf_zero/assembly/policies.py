"""Translate the configuration into policies and settings for the parts of an engine."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.checkpoint.engine_checkpoints import CheckpointSettings
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.engine_parts import PreemptionSettings
from hf_zero.core.schedule.block import UnshardLimits
from hf_zero.core.schedule.gradient_sums import ErrorFeedback, GradientPolicy
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.precision import LossScaler, PrecisionPolicy
from hf_zero.core.step.spikes import Spikes
from hf_zero.core.step.step import StepSettings

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def precision_policy(config: ZeroConfig, sequence_parallel: bool = False) -> PrecisionPolicy:
    """Return the dtypes that the sections fp16, bf16, data_types, torch_autocast and communication_data_type request.

    Args:
        config: The configuration.
        sequence_parallel: Whether sequences are divided over ranks; ``seq_parallel_communication_data_type`` applies then.
    """
    message = config.seq_parallel_communication_data_type if sequence_parallel else config.communication_data_type
    low = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
    types = config.data_types
    param_dtype = low or (_DTYPES[types.param_dtype] if types.param_dtype else None)
    low_masters = config.fp16.fp16_master_weights_and_grads if config.fp16.enabled else config.bf16.bf16_master_weights_and_grads
    autocast = config.torch_autocast
    autocast_dtype = _DTYPES[autocast.dtype or "bf16"] if autocast.enabled else None
    reduced = param_dtype in (torch.float16, torch.bfloat16)
    accumulation = param_dtype if low_masters and param_dtype else torch.float32
    if types.grad_accum_dtype:
        accumulation = _DTYPES[types.grad_accum_dtype]
    return PrecisionPolicy(
        param_dtype=param_dtype,
        master_dtype=(param_dtype if low_masters else torch.float32) if reduced else None,
        accumulation_dtype=accumulation,
        message_dtype=_DTYPES[message] if message else None,
        buffer_dtype=_DTYPES[types.buffer_dtype] if types.buffer_dtype else None,
        autocast_dtype=autocast_dtype,
        casts_inputs=config.fp16.enabled and config.fp16.auto_cast,
        skips_overflow=config.fp16.enabled or (config.bf16.enabled and config.bf16.check_grad_overflow) or autocast_dtype == torch.float16,
    )


def moment_type(config: ZeroConfig) -> torch.dtype | None:
    """Return the dtype that `bf16.bf16_optimizer_states` requests beside masters in bf16; None if moments have the masters' dtype."""
    if not (config.bf16.enabled and config.bf16.bf16_master_weights_and_grads):
        return None
    return torch.bfloat16 if config.bf16.bf16_optimizer_states else torch.float32


def kept_patterns(config: ZeroConfig) -> list[str] | None:
    """Return the names that ``data_types.keep_in_fp32_modules`` lists; None if the model decides which tensors stay in fp32."""
    named = config.data_types.keep_in_fp32_modules
    return named if isinstance(named, list) else None


def gradient_policy(config: ZeroConfig, precision: PrecisionPolicy, stage: StagePolicy, world: int, sharers: int = 1) -> GradientPolicy:
    """Return the scaling and the element types of the reduction.

    [Note: divisors of a gradient] ``Engine.backward`` divides the loss by ``gradient_accumulation_steps`` and multiplies it by the loss
    scale. The mean over N ranks is ``pre_scale * post_scale = 1 / N``: ``Collector`` multiplies by ``pre_scale`` as it copies a
    gradient into the flat buffer and by ``post_scale`` when the sum has arrived. ``Stepper.take`` divides by the loss scale, together
    with the factor of clipping. Experts divide by all data-parallel ranks although fewer of them share the expert
    (``assembly/gradients.py``).

    In fp32 the mean is taken before the sum, where it costs nothing. In bf16 it is taken after the sum, because a division by a number of
    ranks that is not a power of two would round every element of the message. A sum in fp16 soon exceeds 65504, so about the square root of
    N is divided by before the sum and the rest after it. ``prescale_gradients`` divides before in any case, ``gradient_predivide_factor``
    splits the division. ``sharers`` ranks share the sequences of their samples: a "sum" over samples is their mean.
    """
    total = 1.0 / sharers if config.gradient_allreduce_op == "sum" else 1.0 / world
    message = precision.message_dtype or precision.param_dtype or torch.float32
    if total == 1.0:
        pre = 1.0
    elif config.gradient_predivide_factor != 1.0 and not config.prescale_gradients:
        pre = 1.0 / config.gradient_predivide_factor
    elif message.itemsize >= 4 or config.prescale_gradients:
        pre = total
    else:
        pre = 1.0 / _headroom(world) if message is torch.float16 else 1.0
    return GradientPolicy(
        message_dtype=precision.message_dtype,
        accumulation_dtype=precision.accumulation_dtype,
        pre_scale=pre,
        post_scale=total / pre,
        sharded=stage.optimizer_sharded,
    )


@dataclass(frozen=True)
class QuantizedUnits:
    """The kinds of units with quantized messages: all-gathers (at stage 3) of trained or frozen units, and gradients of trained units."""

    trained: bool = False
    frozen: bool = False
    gradients: bool = False

    def any(self, frozen: bool) -> bool:
        """Return whether any message of a frozen (or trained) unit is quantized."""
        return self.frozen if frozen else self.trained or self.gradients


def quantized_units(config: ZeroConfig) -> QuantizedUnits:
    """Return the kinds of units that ``zero_quantized_weights`` (all), ``zero_quantized_nontrainable_weights`` (frozen) and
    ``zero_quantized_gradients`` (trained) select.
    """
    zero = config.zero_optimization
    frozen = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    return QuantizedUnits(zero.zero_quantized_weights, frozen, zero.zero_quantized_gradients)


def error_feedback(config: ZeroConfig) -> ErrorFeedback | None:
    """Return the error feedback of quantized gradients that ``zeropp_loco_param`` configures; None if it is not set."""
    section = config.zero_optimization.zeropp_loco_param
    return None if section is None else ErrorFeedback(section.err_beta, section.reset_T)


def _headroom(world: int) -> int:
    """Return the smallest power of two that is at least the square root of ``world``; dividing by it rounds only subnormal elements."""
    return 1 << math.ceil(math.log2(world) / 2)


def loss_scaler(config: ZeroConfig, kind: type[LossScaler]) -> LossScaler:
    """Return the loss scale of fp16 (weights or autocast), of class ``kind``; 1 otherwise.

    At stage 0 an overflow at the lowest scale is skipped like any other, from stage 1 on it is an error, as in DeepSpeed.
    """
    autocast_fp16 = config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16"
    if not (config.fp16.enabled or autocast_fp16):
        return kind(loss_scale=1.0)
    fp16 = config.fp16
    return kind(
        loss_scale=fp16.loss_scale,
        initial_scale_power=fp16.initial_scale_power,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_loss_scale=fp16.min_loss_scale,
        raises_at_minimum=config.zero_optimization.stage > 0,
    )


def step_settings(config: ZeroConfig, precision: PrecisionPolicy, stage: StagePolicy, max_norm: float) -> StepSettings:
    """Return the settings of a step: its clipping norm, and the cases that it refuses or skips."""
    wants_all = not config.zero_optimization.ignore_unused_parameters
    return StepSettings(max_norm, stage, precision.skips_overflow, wants_all, config.hf_zero.show_gradients)


def spikes_of(config: ZeroConfig) -> Spikes:
    """Return the detector of spikes in gradient norm and loss."""
    own = config.hf_zero
    return Spikes(own.spike_action, own.spike_factor, own.loss_spike_factor)


def unshard_limits(config: ZeroConfig, updates_overlap: bool) -> UnshardLimits:
    """Return the limits of stage 3: how far ahead it unshards, and how much it keeps unsharded."""
    zero = config.zero_optimization
    return UnshardLimits(
        zero.stage3_prefetch_bucket_size,
        zero.stage3_max_live_parameters,
        zero.stage3_max_reuse_distance,
        updates_overlap=updates_overlap,
    )


def checkpoint_settings(config: ZeroConfig, trains: bool = True) -> CheckpointSettings:
    """Return the settings for writing and reading checkpoints; an engine that does not train takes no snapshots."""
    writer, cache = config.checkpoint.writer, config.datastates_ckpt
    gigabytes = cache.host_cache_size if cache is not None else None
    return CheckpointSettings(
        direct=writer is None or writer.type != "python",
        node_local=config.checkpoint.use_node_local_storage,
        in_background=(writer is not None and writer.decoupled) or cache is not None,
        copy_bytes=None if gigabytes is None else int(gigabytes * 2**30),
        masters_from_fp32=config.zero_optimization.load_from_fp32_weights,
        tag_validation=config.checkpoint.tag_validation,
        pickle_client_state=config.hf_zero.pickle_client_state,
        url=config.hf_zero.checkpoint_url or "",
        snapshot_steps=config.hf_zero.snapshot_steps if trains else 0,
        snapshot_folder=config.hf_zero.snapshot_folder or "",
        rewinds=trains and config.hf_zero.spike_action == "rewind",
    )


def preemption_settings(config: ZeroConfig) -> PreemptionSettings:
    """Return the settings of `hf_zero.preemption_signal` and `hf_zero.preemption_save_dir`."""
    own = config.hf_zero
    number = 0 if own.preemption_signal == "none" else int(signal.Signals[own.preemption_signal])
    return PreemptionSettings(number, "preemption_signal" in own.model_fields_set, own.preemption_save_dir or "")


def compile_options(config: ZeroConfig) -> dict[str, Any] | None:
    """Return the arguments of ``Engine.compile``, or None if blocks are not to be compiled."""
    section = config.compile
    if section is None or not section.enabled or section.disable:
        return None
    return {"backend": section.backend, "compile_kwargs": section.kwargs}
