"""Activation checkpointing whose saved inputs may rest on the host or be divided over the ranks of a model axis."""

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
