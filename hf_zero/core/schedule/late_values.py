"""Look up sharded parameters outside of a forward: code gets the shape at once, and the values when it computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_zero.core.units.sharded_parameter import ShardedParameter
from hf_zero.core.units.unit import Unit, find_unit, is_sharded

# Functions that need no values, by name.
_LOOKS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "get_device", "__len__", "__hash__", "__dir__"),
        *(
            "is_floating_point",
            "is_complex",
            "is_contiguous",
            "is_signed",
            "is_conj",
            "is_neg",
            "is_inference",
            "is_same_size",
            "has_names",
        ),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    )
)
_VALUES = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))  # attributes that are values


class LateParameter(ShardedParameter):
    """A parameter that shows a placeholder until some code computes with it.

    [Note: late values] ``model.head.weight`` in a loss behind the forward wants values, and ``model.head.weight.dtype`` in a log wants
    none; a gather for a log on one rank would collide with the next gather of the other ranks. The lookup is the same, so the parameter
    is given its shape and this class there, both without communication, and torch tells of the first operation on it. Whatever points
    the parameter elsewhere, a gather or a reshard, takes the class away.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Unshard first, unless ``func`` needs no values."""
        if not _only_looks(func):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, LateParameter):
                    _bring(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def lend(param: nn.Parameter, bring: Callable[[nn.Parameter], None]) -> None:
    """Show ``param``, which is sharded, and all parameters of its unit as placeholders; local.

    Args:
        param: The parameter.
        bring: Called with a parameter of the unit when code computes with it; unshards the parameter.
    """
    owner = find_unit(param)
    if owner is None:
        return
    unit, _ = owner
    _bringers[unit] = bring
    unit.show_placeholders()
    for other in unit.params:
        if other is not None and is_sharded(other) and type(other) is nn.Parameter:
            other.__class__ = LateParameter


_bringers: WeakKeyDictionary[Unit, Callable[[nn.Parameter], None]] = WeakKeyDictionary()


def _bring(param: LateParameter) -> None:
    owner = find_unit(param)
    bring = _bringers.get(owner[0]) if owner is not None else None
    if bring is not None and is_sharded(param):
        bring(param)


def _only_looks(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES or name != "__get__"
    return name in _LOOKS
