"""Divide the inputs of checkpointed functions over the ranks of a model axis between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_zero.comm.collectives import Collectives


@dataclass
class SavedPart:
    """One rank's part of an input: its shape, its number of elements, and the padded part or where that rests."""

    shape: torch.Size
    numel: int
    part: Any  # Tensor, or what HostActivations makes of it


def keeps(tensor: Tensor) -> bool:
    """Return whether an input stays as it is: weights live anyway, and integers and single numbers are not worth moving."""
    return isinstance(tensor, Parameter) or not tensor.is_floating_point() or tensor.numel() < 2


class DividedInputs:
    """Keeps this rank's part of each input; the ranks of the axis hold equal inputs and gather them in backward.

    Args:
        collectives: The model axis.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def save(self, tensor: Tensor) -> Any:
        """Return the tensor itself when it stays, else a ``SavedPart`` with a part of its own memory."""
        if keeps(tensor) or tensor.numel() < self.collectives.world:
            return tensor
        world, rank = self.collectives.world, self.collectives.rank
        length = -(-tensor.numel() // world)
        own = tensor.detach().reshape(-1)[rank * length : (rank + 1) * length]
        part = own.new_zeros(length)  # memory of its own: a view would keep the whole
        part[: own.numel()] = own
        return SavedPart(tensor.shape, tensor.numel(), part)

    def load(self, saved: Any) -> Tensor:
        """Return the whole input; collective over the axis."""
        if not isinstance(saved, SavedPart):
            whole: Tensor = saved
            return whole
        full = saved.part.new_empty(saved.part.numel() * self.collectives.world)
        self.collectives.all_gather(full, saved.part, "saved activation").wait()
        return full[: saved.numel].view(saved.shape)
