"""The `optimizer` and `scheduler` sections and the constructor arguments inside them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic.fields import FieldInfo

from hf_zero.config.schema.fields import Bool, Float, FreeSection, Int, Section, SectionClass, accepted, later, refused, used

NO_LAMB = "only read by Lamb and the 1-bit optimizers, which this version does not have: use AdamW"
NO_MUON = "only read by Muon, which needs whole matrices: use AdamW"


class OptimizerParams(FreeSection):
    """`optimizer.params`. Keyword arguments of the optimizer constructor."""

    rest: ClassVar[FieldInfo | None] = used(None, "Argument of the torch.optim class")

    lr: Float = used(0.001, "Base learning rate")
    betas: list[Float] = used(lambda: [0.9, 0.999], "First and second moment coefficients")
    eps: Float = used(1e-8, "Denominator stabiliser")
    weight_decay: Float = used(0.0, "Weight decay coefficient")
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
    max_grad_norm: Float | None = refused(None, "Clipping inside the optimizer", "use gradient_clipping at the top level")
    eps_inside_sqrt: Bool = refused(False, "Add eps under the square root", NO_LAMB)
    max_coeff: Float = refused(10.0, "Upper bound of the trust ratio", NO_LAMB)
    min_coeff: Float = refused(0.01, "Lower bound of the trust ratio", NO_LAMB)
    freeze_step: Int = later(100000, "Uncompressed warm-up steps", "onebit")
    cuda_aware: Bool = later(False, "MPI library handles device buffers", "onebit")
    comm_backend_name: str = later("nccl", "Compressed communication backend (nccl, mpi, compressed, hccl)", "onebit")
    coeff_beta: Float = later(0.9, "Running average factor of the trust ratio", "onebit")
    factor_max: Float = later(4.0, "Upper bound of the frozen-ratio scaling", "onebit")
    factor_min: Float = later(0.5, "Lower bound of the frozen-ratio scaling", "onebit")
    factor_threshold: Float = later(0.1, "Largest change of the scaling between steps", "onebit")
    var_freeze_step: Int = later(100000, "Last step that updates the variance", "onebit")
    var_update_scaler: Int = later(16, "Interval policy of variance updates", "onebit")
    local_step_scaler: Int = later(32678, "Interval scaling of local steps", "onebit")
    local_step_clipper: Int = later(16, "Longest local-step interval", "onebit")
    momentum: Float | None = used(None, "SGD and RMSprop momentum (torch.optim); Muon reads it too, which this version does not have")
    muon_lr: Float | None = refused(None, "Learning rate of the parameters flagged use_muon", NO_MUON)
    adam_lr: Float | None = refused(None, "Learning rate of the remaining parameters", NO_MUON)
    ns_method: str = refused("gram", "Newton-Schulz variant: gram or standard", NO_MUON)


class Optimizer(Section):
    """`optimizer`. Optimizer the engine builds itself from model_parameters; absent means a client optimizer or none."""

    key_models: ClassVar[dict[str, SectionClass]] = {"params": OptimizerParams}

    type: str | None = used(
        None,
        "Adam, AdamW, Adagrad, Lion, SGD or another class of torch.optim; 1-bit types, Lamb, Muon and mup types are refused",
    )
    legacy_fusion: Bool = accepted(
        False, "Use the older fused fp16 wrapper for a fused optimizer", "there is one fp16 path, over flat units"
    )
    params: dict[str, Any] | None = used(None, "Keyword arguments of the optimizer constructor")


class SchedulerParams(FreeSection):
    """`scheduler.params`. Keyword arguments of the scheduler constructor."""

    warmup_min_lr: Float | list[Float] = used(0.0, "Rate at step 0")
    warmup_max_lr: Float | list[Float] | None = used(None, "Rate after warm-up")
    warmup_num_steps: Int = used(1000, "Warm-up length in optimizer steps; at least 2 are taken")
    total_num_steps: Int | None = used(None, "Total schedule length in optimizer steps")
    warmup_type: str = used("log", "Warm-up curve: log or linear")
    warmup_min_ratio: Float = used(0.0, "Starting fraction of the base rate")
    cos_min_ratio: Float = used(0.0001, "Final fraction of the base rate")
    lr_range_test_min_lr: Float | list[Float] = used(0.001, "First rate of the sweep")
    lr_range_test_step_size: Int = used(2000, "Steps per increase")
    lr_range_test_step_rate: Float = used(1.0, "Increase per interval")
    lr_range_test_staircase: Bool = used(False, "Increase in jumps instead of continuously")
    cycle_min_lr: Float | list[Float] | None = used(None, "Lowest rate of the cycle")
    cycle_max_lr: Float | list[Float] | None = used(None, "Highest rate of the cycle")
    decay_lr_rate: Float = used(0.0, "Rate decay after the cycle")
    cycle_first_step_size: Int = used(2000, "Steps of the rising half")
    cycle_second_step_size: Int | None = used(None, "Steps of the falling half")
    cycle_first_stair_count: Int = used(0, "Stairs in the rising half")
    cycle_second_stair_count: Int | None = used(None, "Stairs in the falling half")
    decay_step_size: Int = used(0, "Interval of post-cycle decay; 0 disables it")
    cycle_momentum: Bool = used(True, "Cycle momentum against the rate")
    cycle_min_mom: Float = used(0.8, "Lowest momentum")
    cycle_max_mom: Float = used(0.9, "Highest momentum")
    decay_mom_rate: Float = used(0.0, "Momentum decay after the cycle")
    last_batch_iteration: Int = used(-1, "Position to start from")


class Scheduler(Section):
    """`scheduler`. Scheduler the engine builds on engine.optimizer and advances inside step()."""

    key_models: ClassVar[dict[str, SectionClass]] = {"params": SchedulerParams}

    type: str | None = used(None, "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR or a torch.optim.lr_scheduler class name")
    params: dict[str, Any] | None = used(None, "Keyword arguments of the scheduler constructor")
