"""What expert parallelism is not combined with."""

from __future__ import annotations

from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.stages import StagePolicy
from hf_zero.errors import UnsupportedError


def require_provided(config: ZeroConfig, stage: StagePolicy) -> None:
    """Refuses, by their keys, what divides or sends parameters and gradients in ways that experts do not follow.

    Raises:
        UnsupportedError: One of them is asked for.
    """
    zero = config.zero_optimization
    asked = {
        "zero_optimization.zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_optimization.zero_quantized_weights": zero.zero_quantized_weights,
        "zero_optimization.zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "checkpoint.use_node_local_storage": config.checkpoint.use_node_local_storage,
    }
    found = next((key for key, on in asked.items() if on), None)
    if found is not None:
        raise UnsupportedError(
            f"{found} and expert parallelism are not provided together: leave the key out, or set expert_parallel.enabled to false"
        )
