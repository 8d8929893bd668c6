"""Give parameters memory of their own when a script has exchanged or shared their ``data``."""

from __future__ import annotations

import torch

from hf_zero.core.units.sharded_parameter import point
from hf_zero.core.units.unit import Unit


@torch.no_grad()
def separate(unit: Unit) -> None:
    """Copy the values of parameters that were pointed at the memory of other parameters; local.

    Values that a script has assigned are copied into the units one after the other. If two parameters have exchanged their ``data``, the
    first copy would overwrite the values of the second. If two parameters share memory now, plain PyTorch would train both as one; units
    cannot, so ``whole.shared`` gets the error.

    Args:
        unit: A unit with a parameter that was pointed at other memory.
    """
    training = unit.belongs_to() if unit.belongs_to is not None else None
    units = training.units() if training is not None else [unit]
    by_memory = {memory: one for one in units if (memory := one.whole.flat.untyped_storage().data_ptr())}
    for one in units:
        for index, param in enumerate(one.params):
            holder = by_memory.get(param.untyped_storage().data_ptr()) if param is not None and param.numel() else None
            if param is None or holder is None or param.data_ptr() == one.whole.view(index).data_ptr():
                continue
            other = _at(holder, param)
            if other:
                one.whole.shared = (
                    f"parameter {one.layout.slots[index].name} was given the memory of {other} (param.data = other.data), so plain PyTorch "
                    "would train both as one tensor, which an engine cannot. To copy values, write param.data.copy_(other.data) or "
                    "param.data = other.data.clone(); to tie two parameters, use one nn.Parameter in both modules before initialize()"
                )
            point(param, param.data.clone(), empties=False)


def _at(holder: Unit, param: torch.Tensor) -> str:
    """Return the name of a parameter in its own place in ``holder`` whose memory ``param`` uses too; "" if there is none."""
    start = (param.data_ptr() - holder.whole.flat.data_ptr()) // holder.whole.flat.element_size()
    for index, slot in enumerate(holder.layout.slots):
        other = holder.params[index]
        overlaps = slot.offset < start + param.numel() and start < slot.offset + slot.numel
        if overlaps and other is not None and other is not param and other.data_ptr() == holder.whole.view(index).data_ptr():
            return slot.name
    return ""
