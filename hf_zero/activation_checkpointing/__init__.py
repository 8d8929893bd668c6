"""Activation checkpointing whose saved inputs may be divided over the ranks of a model axis, and activations that wait on the host."""

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
