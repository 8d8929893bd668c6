"""Compare the hyper-parameters of the param groups, which must be the same on all ranks, at ``initialize`` and at each boundary."""

from __future__ import annotations

from array import array
from typing import Any, NoReturn

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.step.agreement import differing, fact, ranks_by_facts
from hf_zero.core.step.same_pace import Alike
from hf_zero.errors import StateError

_NOTHING = 1e30  # takes the place of values that are not numbers
_NUMBERS = frozenset((float, bool, int))


def facts_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the class of ``optimizer``, and each hyper-parameter of each of its groups, one line each.

    Numbers are rounded to single precision, so that a rate is the same as a number and as a tensor.
    """
    kind = type(optimizer)
    lines = [fact("optimizer", f"{kind.__module__}.{kind.__qualname__}"), fact("number of param groups", len(optimizer.param_groups))]
    for index, group in enumerate(optimizer.param_groups):
        lines += [fact(f"{key} of param group {index}", _shown(group[key])) for key in sorted(optimizer.defaults) if key in group]
    return lines


def same_groups(optimizer: torch.optim.Optimizer) -> Alike:
    """Return the hyper-parameters that are numbers, for the vote of a boundary.

    A scheduler that differs on a rank, or a callback that edits one rank's rate, would have each rank update its part of the parameters
    by its own rule. Rates on a device are not read: that would wait for it. The error is a StateError that names group, key, values and
    ranks.
    """

    def refuse(collectives: Collectives) -> NoReturn:
        kinds = ranks_by_facts(facts_of(optimizer), collectives, "param groups")
        raise StateError(
            f"hyper-parameters are not the same on all ranks: {'; '.join(differing(kinds))}. A scheduler, a callback or the script has "
            "changed them on some ranks only, and each rank updates its part of the parameters by its own: change them on every rank alike"
        )

    numbers = array("f")
    keys = list(optimizer.defaults)
    for group in optimizer.param_groups:
        for key in keys:
            value: Any = group.get(key)
            if type(value) in _NUMBERS:
                numbers.append(value)
            else:
                numbers.extend(_numbers(value))
    return Alike(numbers, refuse)


def same_clipping(max_norm: float) -> Alike:
    """Return the norm that gradients are clipped to, for the vote of a boundary. The error is a StateError that names all values."""

    def refuse(collectives: Collectives) -> NoReturn:
        kinds = ranks_by_facts([fact("the norm that gradients are clipped to", max_norm)], collectives, "clipping")
        raise StateError(f"{'; '.join(differing(kinds))} (0 is off): call clip_grad_norm_ with the same number on every rank")

    return Alike([max_norm], refuse)


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a hyper-parameter: one, those of a list, or a placeholder for other values."""
    if isinstance(value, (tuple, list)):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"):
        return [float(value)]
    return [_NOTHING]


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = float(value)
    if isinstance(value, float):
        single = array("f", [value])
        return next(
            (text for text in (f"{value:.{digits}g}" for digits in range(6, 9)) if array("f", [float(text)]) == single), f"{value:.9g}"
        )
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return str(value) if value is None or isinstance(value, (bool, int, str)) else type(value).__name__
