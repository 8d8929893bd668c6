"""Implement DeepSpeed's functions for ``torch_autocast``: which parameters may be communicated in the lower precision, and its dtype.

The engine marks these parameters (``mark_lower_precision``) as the section configures. The mark is only a permission: gradients are still
reduced in fp32, or in ``communication_data_type``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hf_zero.errors import ConfigError

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"
"""Name of the attribute of a parameter with the dtype in which the parameter may be communicated."""

LOWER_PRECISION_SAFE_MODULES: list[type[nn.Module]] = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
"""Classes whose parameters are marked if the section names none."""

_KEY = "torch_autocast.lower_precision_safe_modules"

_marked_with: list[torch.dtype] = []  # dtype of the newest engine with autocast


def mark_lower_precision(model: nn.Module, dtype: torch.dtype, names: Sequence[str] | None) -> None:
    """Mark the parameters that modules of the classes ``names`` own with the dtype that they may be communicated in.

    Args:
        model: The module that is trained.
        dtype: Dtype of autocast.
        names: Exact dotted names of classes; None is Linear and the convolutions.

    Raises:
        ConfigError: A name is not the name of a class.
    """
    classes = LOWER_PRECISION_SAFE_MODULES if names is None else [_class_of(name) for name in names]
    for module in model.modules():
        if type(module) in classes:
            for param in module.parameters(recurse=False):
                setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)
    _marked_with[:] = [dtype]


def _class_of(name: str) -> type[nn.Module]:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ConfigError(
            f"{_KEY} has {name!r}, which cannot be imported ({problem}); write the full name, as in torch.nn.Linear"
        ) from None
    if not isinstance(found, type):
        raise ConfigError(f"{_KEY} has {name!r}, which is not a class; write the full name of a class, as in torch.nn.Linear")
    return found


def is_autocast_initialized() -> bool:
    """Return whether an engine of this process was made with ``torch_autocast``."""
    return bool(_marked_with)


def get_autocast_dtype() -> torch.dtype | None:
    """Return the autocast dtype of the newest engine with ``torch_autocast``; None without one."""
    return _marked_with[0] if _marked_with else None


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the dotted names of the classes in ``LOWER_PRECISION_SAFE_MODULES``."""
    return [f"{found.__module__}.{found.__name__}" for found in LOWER_PRECISION_SAFE_MODULES]


def has_comm_dtype(param: torch.Tensor) -> bool:
    """Return whether ``param`` is marked for communication in a lower precision."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype that ``param`` may be communicated in: its own dtype if it is not marked."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """Return the set of dtypes that ``get_comm_dtype`` returns for ``params``."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Return ``dtypes`` sorted by name."""
    return sorted(dtypes, key=str)
