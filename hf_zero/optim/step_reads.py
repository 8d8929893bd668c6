"""Refuse optimizers whose step reads what the engine's tensors do not have: an entry of an option for each parameter of a group, or
parameters of the model that no group and no attribute of the optimizer shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hf_zero.core.optimizer.clones import CollectiveError, of_group, options_of, random_kept, trial_data, try_steps
from hf_zero.errors import UnsupportedError
from hf_zero.optim.known_classes import ELEMENTWISE

_MOST_ENTRIES = 8
_RATES = ("lr", "initial_lr")
_HARMLESS = {"", "__hash__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "requires_grad_"}


def require_common_options(optimizer: torch.optim.Optimizer) -> None:
    """Raise if ``step`` pairs the parameters of a group with the entries of an option.

    The engine's groups hold flat parts of several parameters, or the parameters of one rank, so the entries would belong to others. A list
    that has as many entries as the group has parameters may also be a label or a pair such as ``betas``: the class is tried with one
    parameter more than entries, which such a class leaves as it is, or which it cannot step.

    Raises:
        UnsupportedError: It does, or it cannot be tried and the option is none that its constructor knows.
    """
    if type(optimizer).__module__.startswith(("torch.optim", "hf_zero.")):
        return
    for group in optimizer.param_groups:
        number = len(group["params"])
        lists = {key: value for key, value in group.items() if key != "params" and type(value) in (list, tuple) and len(value) == number}
        if number < 2 or not lists:
            continue
        own = [key for key in lists if key not in optimizer.defaults]
        if not _pairs_entries(optimizer, group, lists, set(own) - {"param_names"}):
            continue
        names = (" and " if own else " or ").join(map(repr, own or lists))
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} reads one entry of {names} for each of the {number} parameters of a param group, but "
            "the engine's groups have flat parts of parameters, or only one rank's parameters: make one param group for each value, with a "
            "number instead of the list, or use an optimizer whose options apply to whole groups, such as AdamW"
        )


def _pairs_entries(optimizer: torch.optim.Optimizer, group: dict[str, Any], lists: dict[str, Sequence[Any]], own: set[str]) -> bool:
    """Return whether ``lists``, options of ``group``, have entries for single parameters; ``own`` decides if the class cannot be tried."""
    number = min(len(group["params"]), _MOST_ENTRIES)
    one = of_group(optimizer, group)
    options = _moving({key: value for key, value in group.items() if key != "params"} | {key: lists[key][:number] for key in lists})
    start, grads = trial_data(optimizer)
    start, grads = start[:, :4].float(), [grad[:, :4].float() for grad in grads]  # square: pairs of them can be multiplied
    with random_kept(optimizer):
        try:
            try_steps(one, options, [start] * number, [grads] * number)
        except (Exception, CollectiveError):  # a foreign step may raise any error
            return bool(own)
        try:
            _, params, _ = try_steps(one, options, [start] * (number + 1), [grads] * (number + 1))
        except (Exception, CollectiveError):
            return True
    moved = [not torch.equal(param.detach(), start) for param in params]
    return any(moved) and not moved[-1]


def require_own_reads(optimizer: torch.optim.Optimizer, shows_gradients: bool, sharded: bool) -> None:
    """Raise if ``step`` reads parameters of the model besides those of its groups: from a closure, a global, or an object that it holds.

    In a trial the groups and attributes of a clone have other tensors, so any use of the model's own is such a read.

    Args:
        optimizer: The user's optimizer or the one from the configuration, with any parameters.
        shows_gradients: ``param.grad`` of the model is the gradient that the optimizer steps with, in one call.
        sharded: Parameters of the model have no values between forward and backward.

    Raises:
        UnsupportedError: It reads gradients that are not there, changes a parameter, or reads values of sharded parameters.
    """
    if type(optimizer) in ELEMENTWISE or shows_gradients:
        return
    watch = _Watch(param for group in optimizer.param_groups for param in group["params"])
    start, grads = trial_data(optimizer)
    groups = {repr(sorted(options_of(group).items(), key=lambda item: item[0])): group for group in optimizer.param_groups}
    with random_kept(optimizer):
        for group in groups.values():
            options = _moving(options_of(group))
            try:
                try_steps(of_group(optimizer, group), options, [start.float()], [[grad.float() for grad in grads]], watch=watch)
            except (Exception, CollectiveError):  # a foreign step may raise any error, here for want of a gradient
                continue
    does = _use_of(watch.found, sharded)
    if does:
        raise UnsupportedError(
            f"step() of optimizer {type(optimizer).__name__} {does} the model's parameters without self.param_groups (through a closure, a "
            "global or an attribute). The engine puts other tensors in self.param_groups, and the model's parameters have no gradients or "
            "no values then. Use only self.param_groups in step(), or ZeRO stage 0 without offload, where both are the same tensors"
        )


def _use_of(found: set[str], sharded: bool) -> str:
    """Return a verb for what ``step`` does with parameters that it may not use so; "" if it may."""
    if "grad" in found:
        return "reads the gradients of"
    if any(name.endswith("_") and not name.endswith("__") for name in found):
        return "changes"
    return "reads values of" if sharded and found else ""


def _moving(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a learning rate other than 0, which is that at the start of a warm-up."""
    still = [key for key in _RATES if isinstance(options.get(key), (int, float, Tensor)) and float(options[key]) == 0.0]
    return options | dict.fromkeys(still, 1e-2)


class _Watch(TorchFunctionMode):
    """Mode that records which properties and functions are used on some tensors.

    Attributes:
        found: "grad", "data", and names of functions; other properties (shape, dtype) are left out.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._tensors = {id(tensor) for tensor in tensors}
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(id(leaf) in self._tensors for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            name = getattr(func, "__name__", "")
            if name in ("__get__", "__set__"):
                name = getattr(func.__self__, "__name__", "")
                name = name if name in ("grad", "data") else ""
            self.found |= {name} - _HARMLESS
        return func(*args, **kwargs)
