"""Restore values that an optimizer's step changes in place, after trial steps and between the sub-groups of one step.

Values are those of attributes (``self.counts["k"] += 1``, ``self.k.add_(1)``), of objects in attributes (``self.helper.k += 1``), and of
options in param groups (``group["k"].add_(1)``). Values that a step rebinds (``self.k += 1`` of a number) are handled by the clones of
``SubGroupStepper``.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_SEQUENCES = (list, deque)
_FOREIGN = frozenset({"param_groups", "state", "defaults"})
_NO_HELPERS = {*sys.stdlib_module_names, "torch"} - {"types", "argparse"}  # packages; these two have namespaces, which scripts count in


def is_foreign(name: str) -> bool:
    """Return whether the attribute ``name`` of an optimizer is none of its class's own: torch's, or a note that hf_zero left on it."""
    return name in _FOREIGN or name.startswith(("_hf_zero", "_optimizer_"))


class ChangedInPlace:
    """Contents that mutable values of an optimizer have when a step begins.

    Args:
        optimizers: The optimizer, and those that it holds.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for one in optimizers for group in one.param_groups]
        seen = {id(param) for group in groups for param in group["params"]}
        self._restore: list[Callable[[], object]] = []
        for one in optimizers:
            for name, value in vars(one).items():
                if not is_foreign(name):
                    self._take(value, seen)
        for group in groups:
            for name, value in group.items():
                if name != "params":
                    self._take(value, seen)

    def restore(self) -> None:
        """Give all values the contents again that they had when this object was made; the objects stay the same."""
        for restore in self._restore:
            restore()

    def _take(self, value: Any, seen: set[int]) -> None:
        if id(value) in seen:
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter) and _can_be_written(value):
                seen.add(id(value))
                self._restore.append(_of_tensor(value))
        elif type(value) in _SEQUENCES:
            seen.add(id(value))
            self._restore.append(_of_sequence(value))
            for item in value:
                self._take(item, seen)
        elif isinstance(value, (dict, set)) and type(value).__module__ in ("builtins", "collections"):
            seen.add(id(value))
            self._restore.append(_of_table(value))
            for item in value.values() if isinstance(value, dict) else ():
                self._take(item, seen)
        elif type(value) is tuple:
            for item in value:
                self._take(item, seen)
        elif isinstance(value, torch.Generator):
            seen.add(id(value))
            self._restore.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            seen.add(id(value))
            self._restore.append(partial(value.setstate, value.getstate()))
        elif _is_helper(value):
            self._take(vars(value), seen)


def _is_helper(value: Any) -> bool:
    """Return whether ``value`` is an object of a script's class: no module, optimizer, dataset, function or class, and nothing of torch or
    of the standard library. Through these (a logger, a thread) a look would reach the whole process in each step.
    """
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, type, ModuleType, MethodType, FunctionType)):
        return False
    return type(value).__module__.partition(".")[0] not in _NO_HELPERS and isinstance(getattr(value, "__dict__", None), dict)


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Return whether torch writes to ``tensor`` in place: not if it is expanded."""
    return tensor.layout is torch.strided and all(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _of_tensor(tensor: torch.Tensor) -> Callable[[], None]:
    content = tensor.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            tensor.copy_(content)

    return restore


def _of_sequence(items: Any) -> Callable[[], None]:
    content = list(items)

    def restore() -> None:
        items.clear()
        items.extend(content)

    return restore


def _of_table(table: Any) -> Callable[[], None]:
    content = table.copy()

    def restore() -> None:
        table.clear()
        table.update(content)

    return restore
