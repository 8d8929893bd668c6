"""What a rank has to hold in a step when experts are divided: states and gradients, by arithmetic, and what autograd saves."""

from __future__ import annotations

import torch
from torch import nn


def least_bytes(model: nn.Module, batch: dict[str, torch.Tensor], world: int, stage: int) -> int:
    """Bytes of fp32 weights, AdamW's two moments and gradients on each of ``world`` ranks, and of what one sequence saves for backward.

    Experts are divided over all ranks; everything else as the stage says. A backward frees what was saved while gradients arrive, so that a
    step may hold less; buffers of messages and blocks that are whole for a while come on top.

    Args:
        model: Whole, in fp32; its experts are in modules named so.
        batch: One sequence.
        world: Ranks.
        stage: Of ZeRO.
    """
    numels = {False: 0, True: 0}
    for name, param in model.named_parameters():
        numels[".experts." in name] += param.numel()
    share = numels[False] / world
    dense = 2 * share + (numels[False] if stage < 3 else share) + (numels[False] if stage < 2 else share)
    return int(4 * (dense + 4 * numels[True] / world)) + _saved_bytes(model, batch)


def _saved_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Of the storages that autograd saves in a forward of one sequence, without parameters."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage  # kept: nobody else may get its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    return sum(storage.nbytes() for storage in saved.values())
