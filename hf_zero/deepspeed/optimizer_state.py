"""Add the fp32 masters to the state dict of an engine's optimizer, and restore them, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import all_gather_updated, publish
from hf_zero.deepspeed.served.checkpoint_names import FP32_FLAT_GROUPS, SINGLE_PARTITION_OF_FP32_GROUPS
from hf_zero.errors import StateError


def add_masters(state: dict[str, Any], optimizer: ShardedOptimizer, stage: int) -> dict[str, Any]:
    """Return ``state`` with this rank's masters, not copied: one tensor (shard_numel,) per trained unit.

    Without the masters a 16-bit run would resume from rounded weights. At stage 0 in fp32 they are the model's own weights.
    """
    units = _trained(optimizer)
    if stage == 0 and all(unit.master is unit.shard for unit in units):
        return state
    return {**state, FP32_FLAT_GROUPS if stage == 3 else SINGLE_PARTITION_OF_FP32_GROUPS: [unit.master for unit in units]}


def take_masters(state: dict[str, Any], optimizer: ShardedOptimizer) -> list[torch.Tensor] | None:
    """Remove from ``state`` the masters that ``add_masters`` added and return them; None if there are none.

    Raises:
        StateError: The masters belong to another number of ranks or to another model.
    """
    found = [state.pop(key) for key in (FP32_FLAT_GROUPS, SINGLE_PARTITION_OF_FP32_GROUPS) if key in state]
    if not found:
        return None
    saved, own = [tuple(master.shape) for master in found[0]], [(unit.layout.shard_numel,) for unit in _trained(optimizer)]
    if saved != own:
        raise StateError(
            f"this optimizer state holds fp32 masters of {sum(shape[0] for shape in saved):,} elements in {len(saved)} parts, "
            f"but this optimizer has {sum(shape[0] for shape in own):,} in {len(own)}: the state is from another model or "
            "another number of ranks. To change the number of ranks, use save_checkpoint and load_checkpoint"
        )
    return list(found[0])


@torch.no_grad()
def set_masters(optimizer: ShardedOptimizer, masters: Sequence[torch.Tensor]) -> None:
    """Write this rank's masters, and update the weights of all ranks from them; collective."""
    optimizer.state_store.settle()
    units = _trained(optimizer)
    for unit, master in zip(units, masters, strict=True):
        own: Any = unit.master
        own.copy_(master)
    publish(units)
    for pending in [all_gather_updated(unit) for unit in units]:
        if pending is not None:
            pending.wait()


def _trained(optimizer: ShardedOptimizer) -> list[Unit]:
    return [unit for unit in optimizer.units if unit.master is not None]
