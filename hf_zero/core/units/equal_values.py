"""Whether ranks start with the same values, without sending them: sums are compared, and what differs is taken from rank 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_zero.comm.collectives import Collectives, as_sent
from hf_zero.memory.host_memory import mapped_files
from hf_zero.observe import warn_once
from hf_zero.system.planning import planning

_WINDOWS, _WINDOW = 4, 256  # what is looked at of a weight that is still in its file


def equal_values(tensors: Mapping[str, torch.Tensor], collectives: Collectives, group: str) -> None:
    """Takes rank 0's values of what the ranks of a group, called ``group``, do not start with alike; collective.

    Args:
        tensors: The same names, shapes and types on every rank; those without values are passed over.
        collectives: The group.
        group: For the warning.
    """
    if not tensors or collectives.world == 1 or planning():  # the ranks of a plan are alike
        return
    files, device = mapped_files(), collectives.topology.device
    marks = [_mark(tensor, any(start <= tensor.data_ptr() < stop for start, stop in files)) for tensor in tensors.values()]
    own = torch.tensor(marks, dtype=torch.float64, device=device)
    first = own.clone()
    collectives.broadcast(first, 0, "sums of rank 0's values")
    differing = (own != first).to(torch.float32)
    collectives.all_reduce(differing, "equal values").wait()
    unequal = [named for named, ranks in zip(tensors.items(), differing.tolist(), strict=True) if ranks]
    if not unequal:
        return
    warn_once(f"the ranks of {group} start with different weights: rank 0's are used")
    with torch.no_grad():
        for name, tensor in unequal:
            if has_no_values(tensor):
                continue
            values = tensor.detach().to(device).contiguous()
            collectives.broadcast(values, 0, name)
            tensor.data.copy_(values)


def _mark(tensor: torch.Tensor, in_file: bool) -> float:
    """A sum that differs where values do.

    ``from_pretrained`` returns weights that are mapped from their files, and a page is read when something touches it: of those only a
    few windows are looked at, so that a rank reads its own shards and little more.
    """
    if tensor.numel() == 0 or tensor.is_meta or has_no_values(tensor):
        return 0.0
    values = as_sent(tensor.detach()).reshape(-1)
    if in_file and values.numel() > _WINDOWS * _WINDOW:
        step = (values.numel() - _WINDOW) // (_WINDOWS - 1)
        values = values.as_strided((_WINDOWS, _WINDOW), (step, 1))
    return float(values.sum(dtype=torch.float64))


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for values that other stages of a pipeline have ([Note: held stages])."""
    return tensor.dim() > 0 and not any(tensor.stride())
