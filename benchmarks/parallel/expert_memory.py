"""Lower bound of a rank's memory in a step with divided experts: computed bytes of states and gradients, and the tensors autograd saves."""

from __future__ import annotations

import torch
from torch import nn


def least_bytes(model: nn.Module, batch: dict[str, torch.Tensor], world: int, stage: int) -> int:
    """Return the bytes of fp32 weights, AdamW's two moments and gradients on each of ``world`` ranks, plus those one sequence saves for
    backward.

    Experts are divided over all ranks; all other parameters by the ZeRO stage. A backward frees saved tensors while gradients arrive, so a
    step may need less; buffers of messages and gathered blocks are not included.

    Args:
        model: Whole model in fp32; its experts are in modules named ``experts``.
        batch: One sequence.
        world: Number of ranks.
        stage: ZeRO stage.
    """
    numels = {False: 0, True: 0}
    for name, param in model.named_parameters():
        numels[".experts." in name] += param.numel()
    share = numels[False] / world
    dense = 2 * share + (numels[False] if stage < 3 else share) + (numels[False] if stage < 2 else share)
    return int(4 * (dense + 4 * numels[True] / world)) + _saved_bytes(model, batch)


def _saved_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Return the bytes of the storages that autograd saves in a forward of one sequence, without parameters."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage  # kept alive, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    return sum(storage.nbytes() for storage in saved.values())
