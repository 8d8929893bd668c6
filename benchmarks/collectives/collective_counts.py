"""Count the collectives that any library issues on a rank, and time the same collectives alone."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Mode that records the calls of process groups, from any library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def table(self) -> dict[str, list[int]]:
        """Return the number of calls and the bytes of whole buffers, by kind and size of the group."""
        found: dict[str, list[int]] = {}
        for func, args, _ in self.calls:
            name = func.overloadpacket.__name__.strip("_")
            size = next(ProcessGroup.unbox(value).size() for value in args if isinstance(value, torch.ScriptObject) and _is_group(value))
            tensors = [value for value in pytree.tree_leaves(args) if isinstance(value, torch.Tensor)]
            row = found.setdefault(f"{name} {size}", [0, 0])
            row[0] += 1
            row[1] += max(tensor.nbytes for tensor in tensors)
        return found

    def bare_seconds(self, repeats: int) -> float:
        """Return the processor time of the same calls, issued alone."""
        made = [(func, *pytree.tree_map_only(torch.Tensor, _like, (args, kwargs))) for func, args, kwargs in self.calls]
        taken = []
        for _ in range(repeats):
            start = time.process_time()
            for func, args, kwargs in made:
                func(*args, **kwargs)
            taken.append(time.process_time() - start)
        return min(taken)


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


_buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return _buffers.setdefault((tensor.shape, tensor.dtype), torch.zeros(tensor.shape, dtype=tensor.dtype))
