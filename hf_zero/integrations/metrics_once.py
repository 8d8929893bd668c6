"""Metrics under tensor parallelism: accelerate gathers from every rank, and the ranks of a group have computed the same samples."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_zero.core.engine import Engine

_PREPARES = "_prepare_deepspeed"
_GATHER = ("gather_for_metrics", "evaluation_loop")  # Accelerator's method; Trainer's, whose seq2seq kind gathers by itself


def count_samples_once(engine: Engine) -> None:
    """[Note: metrics]

    accelerate divides samples over groups of ranks where the configuration has ``autotp_size``, but ``gather_for_metrics`` (which
    Trainer evaluates and predicts with) joins what all ranks have: each sample would come once per rank of its group, and the rows that
    pad the last batch would be cut off at the wrong place. So the Accelerator that is preparing an engine gets a ``gather`` that keeps,
    for those who evaluate, what the first rank of each group has. All else gathers from every rank as before; Trainer reckons with it.

    Looks at the callers' frames, because nothing else leads from an engine to its Accelerator.
    """
    model_axis = engine.collectives.topology.model
    if model_axis is None:
        return
    group, caller = model_axis.world, sys._getframe(3)
    accelerator = caller.f_locals.get("self") if caller.f_code.co_name == _PREPARES else None
    if accelerator is None or "gather" in vars(accelerator):
        return
    ranks, every_rank, joined = accelerator.num_processes, accelerator.gather, accelerator.gather_for_metrics

    def gather(tensor: Any) -> Any:
        found = every_rank(tensor)
        if sys._getframe(1).f_code.co_name not in _GATHER:
            return found
        return pytree.tree_map(lambda leaf: _of_first_ranks(leaf, ranks, group), found)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        objects = use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(input_data))
        if objects and isinstance(input_data, (list, tuple)) and accelerator.process_index % group:
            input_data = input_data[:0]  # lists are joined as long as they are
        return joined(input_data, use_gather_object=objects)

    accelerator.gather, accelerator.gather_for_metrics = gather, gather_for_metrics


def _of_first_ranks(gathered: torch.Tensor, ranks: int, group: int) -> torch.Tensor:
    """Of ``gathered`` (ranks x n, ...) what the first rank of each group has: (ranks / group x n, ...)."""
    return gathered.unflatten(0, (ranks // group, group, len(gathered) // ranks))[:, 0].flatten(0, 1)
