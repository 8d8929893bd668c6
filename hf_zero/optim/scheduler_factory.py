"""Build the scheduler that the ``scheduler`` section names: one of hf_zero's schedules, or one of torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.optim.keywords import nearest, plain_values, unknown_key
from hf_zero.optim.schedules import (
    SECTION,
    VALID_LR_SCHEDULES,
    IterationSchedule,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

_OWN: dict[str, type[IterationSchedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
_NOT_FROM_JSON = {
    "LRScheduler": "it is a base class",
    "_LRScheduler": "it is a base class",
    "LambdaLR": "its lambda cannot be written in JSON",
    "MultiplicativeLR": "its lambda cannot be written in JSON",
    "SequentialLR": "its schedulers cannot be written in JSON",
    "ChainedScheduler": "its schedulers cannot be written in JSON",
    "ReduceLROnPlateau": "the engine steps schedulers without a metric",
}


def build_scheduler(type: str, params: Mapping[str, Any] | None, optimizer: Any) -> LRScheduler:
    """Build the scheduler that the ``scheduler`` section asks for.

    Args:
        type: One of ``VALID_LR_SCHEDULES`` or a class of ``torch.optim.lr_scheduler``; letter case is ignored.
        params: ``scheduler.params``; numbers may be text.
        optimizer: For hf_zero's schedules any object with live ``param_groups``; torch's need a ``torch.optim.Optimizer``.

    Raises:
        ConfigError: The type is unknown, a parameter is unknown or missing, or a value is out of its range.
        UnsupportedError: The type is a torch class that JSON cannot describe.
    """
    kind = _find_class(type)
    values = dict(params or {})
    signature = inspect.signature(kind)
    allowed = {name: arg for name, arg in signature.parameters.items() if name != "optimizer"}
    for key in values:
        if key not in allowed:
            raise unknown_key(SECTION, key, allowed, kind.__name__)
    required = [name for name, arg in allowed.items() if arg.default is inspect.Parameter.empty]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{kind.__name__} needs {', '.join(f'{SECTION}.{name}' for name in missing)}; give a value.")
    try:
        return kind(optimizer, **plain_values(SECTION, values))
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{SECTION} {values!r} does not fit {kind.__name__}: {error}") from error


def _find_class(name: str) -> Callable[..., LRScheduler]:
    """Return the scheduler class with this name among hf_zero's, then torch's, letter case ignored.

    Raises:
        ConfigError: There is no such class.
        UnsupportedError: JSON cannot describe the class's arguments, or the engine cannot step it.
    """
    torch_names = [key for key in torch_schedules.__all__ if key not in _NOT_FROM_JSON]
    for refused, reason in _NOT_FROM_JSON.items():
        if str(name).lower() == refused.lower():
            raise UnsupportedError(
                f"scheduler.type {name!r} cannot be built from the config: {reason}. Build it in code and pass it as "
                f"lr_scheduler, or use one of: {', '.join(VALID_LR_SCHEDULES)}."
            )
    for known in [*_OWN, *torch_names]:
        if str(name).lower() == known.lower():
            return _OWN.get(known) or getattr(torch_schedules, known)
    near = nearest(str(name), [*_OWN, *torch_names])
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"scheduler.type is {name!r}, which is no known scheduler.{hint} Allowed: {', '.join(VALID_LR_SCHEDULES)}, or a "
        f"class of torch.optim.lr_scheduler: {', '.join(sorted(torch_names))}."
    )
