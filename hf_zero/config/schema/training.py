"""The `optimizer` and `scheduler` sections, and the sections for number formats: fp16, bf16, apex, autocast and the element types."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from hf_zero.config.schema.fields import (
    ANY_CASE,
    Bool,
    Bound,
    Count,
    Dtype,
    Float,
    FreeSection,
    Int,
    NonNegative,
    Section,
    Share,
    Size,
    accepted,
    refused,
    used,
)

NO_LAMB = "only read by OneBitLamb, which this version does not have: use Lamb or OneBitAdam"
NO_ZERO_ONE = "only read by ZeroOneAdam, which this version does not have: use OneBitAdam with freeze_step"
FreezeStep = Count | Annotated[Literal["auto", "stable"], ANY_CASE]


class OptimizerParams(FreeSection):
    """`optimizer.params`. Keyword arguments of the optimizer constructor."""

    rest: ClassVar[FieldInfo | None] = used(None, "Argument of the torch.optim class")

    lr: NonNegative = used(0.001, "Base learning rate")
    betas: list[Float] = used(lambda: [0.9, 0.999], "First and second moment coefficients")
    eps: NonNegative = used(1e-8, "Denominator stabiliser")
    weight_decay: NonNegative = used(0.0, "Weight decay coefficient")
    bias_correction: Bool = used(True, "Apply moment bias correction")
    amsgrad: Bool = used(False, "AMSGrad variant")
    set_grad_none: Bool = accepted(True, "zero_grad sets gradients to None", "gradients are always set to None between steps")
    torch_adam: Bool = used(False, "Use torch.optim instead of the fused implementation")
    adam_w_mode: Bool = used(True, "Decoupled weight decay; ignored (always true) for type AdamW")
    fp32_optimizer_states: Bool = accepted(
        True,
        "Keep CPU moments in fp32; forced false by bf16.bf16_optimizer_states",
        "optimizer states follow the master shards: fp32, unless bf16.bf16_optimizer_states is set",
    )
    max_grad_norm: Bound | None = used(
        None, "Gradient norm to clip to (OneBitAdam, the same as gradient_clipping); other types refuse it: use gradient_clipping"
    )
    eps_inside_sqrt: Bool = used(False, "Add eps under the square root (OneBitAdam, Lamb)")
    max_coeff: Bound = used(10.0, "Upper bound of the trust ratio (Lamb)")
    min_coeff: NonNegative = used(0.01, "Lower bound of the trust ratio (Lamb)")
    freeze_step: FreezeStep = used(
        100000,
        "Steps of plain Adam before OneBitAdam compresses; auto, or stable under accelerate: the warm-up ends when the variance is",
        auto_is_value=True,
    )
    cuda_aware: Bool = accepted(
        False, "MPI library handles device buffers", "the torch.distributed backend of the process group sends from the device of the data"
    )
    comm_backend_name: str = accepted(
        "nccl",
        "Compressed communication backend (nccl, mpi, compressed, hccl)",
        "the torch.distributed backend of the process group is always used",
    )
    coeff_beta: Float = refused(0.9, "Running average factor of the trust ratio", NO_LAMB)
    factor_max: Float = refused(4.0, "Upper bound of the frozen-ratio scaling", NO_LAMB)
    factor_min: Float = refused(0.5, "Lower bound of the frozen-ratio scaling", NO_LAMB)
    factor_threshold: Float = refused(0.1, "Largest change of the scaling between steps", NO_LAMB)
    var_freeze_step: Int = refused(100000, "Last step that updates the variance", NO_ZERO_ONE)
    var_update_scaler: Int = refused(16, "Interval policy of variance updates", NO_ZERO_ONE)
    local_step_scaler: Int = refused(32678, "Interval scaling of local steps", NO_ZERO_ONE)
    local_step_clipper: Int = refused(16, "Longest local-step interval", NO_ZERO_ONE)
    momentum: NonNegative | None = used(None, "Momentum (Muon: 0.95; SGD and RMSprop of torch.optim)")
    muon_lr: NonNegative | None = used(None, "Learning rate of the hidden matrices, or of the parameters flagged use_muon (Muon: lr)")
    adam_lr: NonNegative | None = used(None, "Learning rate of the remaining parameters (Muon: lr)")
    ns_method: str = used(
        "gram", "Newton-Schulz variant (Muon: gram, on the smaller square matrix in fp32; standard, on the matrix in bf16)"
    )


class Optimizer(Section):
    """`optimizer`. Optimizer the engine builds itself from model_parameters; absent means a client optimizer or none."""

    type: str | None = used(
        None,
        "Adam, AdamW, Adagrad, Lion, SGD, Lamb, Muon, OneBitAdam or a class of torch.optim; ZeroOneAdam, OneBitLamb and mup are refused",
    )
    legacy_fusion: Bool = accepted(
        False, "Use the older fused fp16 wrapper for a fused optimizer", "fp16 training has one implementation, over flat units"
    )
    adam_w_mode: Bool = accepted(
        True, "Written by some configurations beside params instead of in it", "DeepSpeed does not read it here; write it in params"
    )
    params: dict[str, Any] | None = used(None, "Keyword arguments of the optimizer constructor", model=OptimizerParams)


class SchedulerParams(FreeSection):
    """`scheduler.params`. Keyword arguments of the scheduler constructor."""

    warmup_min_lr: NonNegative | list[NonNegative] = used(0.0, "Rate at step 0")
    warmup_max_lr: NonNegative | list[NonNegative] | None = used(None, "Rate after warm-up")
    warmup_num_steps: Size = used(1000, "Warm-up length in optimizer steps; at least 2 are taken")
    total_num_steps: Size | None = used(None, "Total schedule length in optimizer steps")
    warmup_type: str = used("log", "Warm-up curve: log or linear")
    warmup_min_ratio: NonNegative = used(0.0, "Starting fraction of the base rate")
    cos_min_ratio: NonNegative = used(0.0001, "Final fraction of the base rate")
    lr_range_test_min_lr: NonNegative | list[NonNegative] = used(0.001, "First rate of the sweep")
    lr_range_test_step_size: Count = used(2000, "Steps per increase")
    lr_range_test_step_rate: NonNegative = used(1.0, "Increase per interval")
    lr_range_test_staircase: Bool = used(False, "Increase in jumps instead of continuously")
    cycle_min_lr: NonNegative | list[NonNegative] | None = used(None, "Lowest rate of the cycle")
    cycle_max_lr: NonNegative | list[NonNegative] | None = used(None, "Highest rate of the cycle")
    decay_lr_rate: NonNegative = used(0.0, "Rate decay after the cycle")
    cycle_first_step_size: Count = used(2000, "Steps of the rising half")
    cycle_second_step_size: Size | None = used(None, "Steps of the falling half")
    cycle_first_stair_count: Size = used(0, "Stairs in the rising half")
    cycle_second_stair_count: Size | None = used(None, "Stairs in the falling half")
    decay_step_size: Size = used(0, "Interval of post-cycle decay; 0 disables it")
    cycle_momentum: Bool = used(True, "Cycle momentum against the rate")
    cycle_min_mom: Share = used(0.8, "Lowest momentum")
    cycle_max_mom: Share = used(0.9, "Highest momentum")
    decay_mom_rate: Float = used(0.0, "Momentum decay after the cycle")
    last_batch_iteration: Annotated[Int, Field(ge=-1)] = used(-1, "Position to start from")


class Scheduler(Section):
    """`scheduler`. Scheduler the engine builds on engine.optimizer and advances inside step()."""

    type: str | None = used(None, "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR or a torch.optim.lr_scheduler class name")
    params: dict[str, Any] | None = used(None, "Keyword arguments of the scheduler constructor", model=SchedulerParams)


class Fp16(Section, switch="enabled"):
    """`fp16`. fp16 weights with loss scaling; exclusive with bf16 and amp."""

    enabled: Bool = used(False, "Turn fp16 on")
    auto_cast: Bool = used(False, "Cast forward inputs to fp16")
    loss_scale: NonNegative = used(0.0, "0 selects dynamic scaling, otherwise the fixed scale")
    initial_scale_power: Annotated[Int, Field(ge=0, le=127)] = used(16, "Dynamic scale starts at two to this power")
    loss_scale_window: Count = used(1000, "Steps without overflow before the scale grows")
    hysteresis: Count = used(2, "Overflows tolerated before the scale drops")
    consecutive_hysteresis: Bool = used(False, "Refill the tolerance after a step without overflow")
    min_loss_scale: Size = used(1, "Lower bound of the dynamic scale")
    fp16_master_weights_and_grads: Bool = used(False, "Keep master weights and gradients in fp16")


_NO_SCALE = "bf16 gradients are not scaled; older releases of DeepSpeed did not read the key"


class Bf16(Section, switch="enabled"):
    """`bf16`. bf16 weights without loss scaling; exclusive with fp16 and amp."""

    enabled: Bool = used(False, "Turn bf16 on")
    immediate_grad_update: Bool = accepted(
        False,
        "Fold gradients into the fp32 copy as soon as they are computed",
        "gradients are always added to the shard of their unit as soon as they are reduced",
    )
    check_grad_overflow: Bool = used(True, "Skip an update whose gradients are not finite")
    bf16_master_weights_and_grads: Bool = used(False, "Keep master weights and gradients in bf16")
    bf16_optimizer_states: Bool = used(
        False, "Keep moments in bf16; needs bf16_master_weights_and_grads. False beside it keeps them in fp32, and needs offload_optimizer"
    )
    # Copied from `fp16` in the configuration files of FlagEmbedding, Tevatron and others.
    loss_scale: NonNegative = accepted(0.0, "Loss scale", _NO_SCALE)
    initial_scale_power: Size = accepted(16, "Power of two of the first loss scale", _NO_SCALE)
    loss_scale_window: Size = accepted(1000, "Steps before the loss scale grows", _NO_SCALE)
    hysteresis: Size = accepted(2, "Overflows before the loss scale drops", _NO_SCALE)
    min_loss_scale: Size = accepted(1, "Lower bound of the loss scale", _NO_SCALE)


class TorchAutocast(Section, switch="enabled"):
    """`torch_autocast`. Run the engine forward under torch.autocast."""

    enabled: Bool = used(False, "Turn it on; when off an outer autocast region is disabled inside the engine forward")
    dtype: Dtype | None = used(None, "bfloat16 or float16 (short names accepted)")
    lower_precision_safe_modules: list[str] | None = used(
        None,
        "Full names of module classes whose parameters are marked (`comm_dtype`) as allowed to be communicated in the lower dtype; "
        "gradients are still reduced in fp32, or in communication_data_type",
    )


class DataTypes(Section):
    """`data_types`. Element types outside the fp16 and bf16 sections."""

    grad_accum_dtype: Dtype | None = used(None, "Type of gradient accumulation: fp32 fp16 bf16; null follows the model")
    param_dtype: Dtype | None = used(None, "Cast parameters to this type at engine creation")
    buffer_dtype: Dtype | None = used(None, "Cast floating-point buffers to this type; null leaves each in its loaded type")
    keep_in_fp32_modules: Annotated[Literal["auto"], ANY_CASE] | list[str] | None = used(
        "auto",
        "Parts of names (`*` for any characters) of parameters and buffers that stay in fp32 in 16-bit training. auto and null take the "
        "names that a transformers model lists itself (`_keep_in_fp32_modules_strict`, in fp16 also `_keep_in_fp32_modules`), and leave "
        "them in the dtype they were loaded in; [] keeps none",
        auto_is_value=True,
    )
