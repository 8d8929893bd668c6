"""Checkpoint activations: divide saved inputs over the ranks of a model axis, or keep saved activations in host memory."""

from hf_zero.activation_checkpointing.random_states import RandomStates, random_states, seed_model_parallel
from hf_zero.activation_checkpointing.recompute import checkpoint, configure, is_configured, reset

__all__ = [
    "RandomStates",
    "checkpoint",
    "configure",
    "is_configured",
    "random_states",
    "reset",
    "seed_model_parallel",
]
