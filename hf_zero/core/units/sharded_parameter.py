"""What a parameter is while it has no values here: one that refuses a gradient of its whole shape by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.errors import StateError

OWNER = "_hf_zero_owner"
_GRAD: Any = torch.Tensor.grad  # torch's own property


class ShardedParameter(nn.Parameter):
    """An empty ``nn.Parameter`` of a unit.

    [Note: the class of an empty parameter] torch compares a gradient that is assigned with the parameter, which is empty between its
    uses at stage 3, and its message names neither. Nothing else hears of the assignment, because torch sets ``grad`` itself. So a
    parameter has this class while it is empty. What the model runs with, compiles and pickles is an ``nn.Parameter`` as ever.
    """

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """As of any tensor."""
        found: torch.Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """Sets or forgets a gradient of the shape that the parameter has now.

        Raises:
            StateError: ``value`` has another shape.
        """
        if isinstance(value, torch.Tensor) and value.shape != self.shape:
            raise _refusal(self, value)
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


def point(param: nn.Parameter, value: torch.Tensor, empties: bool) -> None:
    """Makes ``value`` what ``param`` shows; ``empties``: it has no values then."""
    with torch._C.DisableTorchFunction():  # no mode shall see it: ``ConstructorAccess`` would take it for a constructor's write
        param.data = value
    set_class(param, empties)


def set_class(param: torch.Tensor, empty: bool) -> None:
    """Gives ``param`` the class of an empty or an ordinary parameter; classes of libraries stay as they are."""
    kind, wanted = type(param), ShardedParameter if empty else nn.Parameter
    if kind is not wanted and (kind is nn.Parameter or issubclass(kind, ShardedParameter)):
        param.__class__ = wanted  # type: ignore[assignment]


def _refusal(param: Any, value: torch.Tensor) -> StateError:
    owner = vars(param).get(OWNER)
    name = "a parameter" if owner is None else owner[0].layout.slots[owner[1]].name
    return StateError(
        f"{name}.grad was given a gradient of shape {tuple(value.shape)}, and the parameter is empty now: divided over the ranks (ZeRO "
        "stage 3), or offloaded. Call hf_zero.utils.safe_set_full_grad(param, gradient) on all ranks between backward and step(), or use "
        "stage 0, 1 or 2"
    )
