"""Features that cannot be combined with a pipeline."""

from __future__ import annotations

from hf_zero.config.schema.root import ZeroConfig
from hf_zero.errors import UnsupportedError


def require_served(config: ZeroConfig) -> None:
    """Refuse options that cannot be combined with the stages of a pipeline.

    Raises:
        UnsupportedError: Stage 3, quantized collectives, or parameters off the device.
    """
    refuse_sharded_parameters(config)
    zero = config.zero_optimization
    if zero.zero_quantized_gradients or zero.zero_quantized_weights:
        raise UnsupportedError(
            "pipeline.stages and ZeRO++ (zero_quantized_weights, zero_quantized_gradients) cannot be combined: leave one out"
        )


def refuse_sharded_parameters(config: ZeroConfig) -> None:
    """Refuse ZeRO stage 3 beside a pipeline.

    Raises:
        UnsupportedError: The configuration asks for stage 3.
    """
    if config.zero_optimization.stage == 3:
        raise UnsupportedError(
            "a pipeline (pipeline.stages, PipelineModule) and zero_optimization.stage 3 exclude each other: at stage 3 a "
            "stage of the pipeline would gather its layers again for each part of a batch, and so send the whole model once "
            "per part. Set zero_optimization.stage to 1 or 2, or leave the pipeline out and let stage 3 shard all layers"
        )
