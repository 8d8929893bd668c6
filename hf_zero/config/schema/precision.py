"""Sections for number formats: fp16, bf16, apex, autocast and the element types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hf_zero.config.schema.fields import ANY_CASE, Bool, Count, Dtype, Int, NonNegative, Section, Size, accepted, used


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
