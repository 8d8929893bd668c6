"""What is said when a forward ends in an error of torch about element types: which tensors are not of the type that parameters train in."""

from __future__ import annotations

import re
from typing import Any

import torch

from hf_zero.comm.collectives import is_narrow

_ABOUT_TYPES = re.compile(r"\bd?types?\b", re.IGNORECASE)
_SAID = "hf_zero: parameters train in"
_SHOWN = 3


def explain_types(engine: Any, error: BaseException, phase: str) -> None:
    """Add to the message of ``error`` which buffers and parameters keep another type, and how to change that; never raises another error.

    A buffer stays in the type it was loaded in. A forward that brings it together with 16-bit activations gets wider ones, and torch's
    next layer refuses them without saying where they come from.
    """
    dtype = engine.precision.param_dtype
    text = str(error)
    if phase != "forward" or not isinstance(error, RuntimeError) or dtype is None or not _ABOUT_TYPES.search(text) or _SAID in text:
        return
    buffers = _others(engine.module.named_buffers(), dtype)
    params = _others(engine.module.named_parameters(), dtype)
    if not (buffers or params):
        return
    name = str(dtype).removeprefix("torch.")
    lines = [f"{_SAID} {name}."]
    if buffers:
        lines.append(
            f"Buffers stay as they were loaded: {_list(buffers)}. Cast them where the forward uses them, load the model in {name} "
            f"(from_pretrained(dtype=torch.{name})), or set data_types.buffer_dtype"
        )
    if params:
        lines.append(
            f"Parameters that stay as they were loaded: {_list(params)}. data_types.keep_in_fp32_modules: [] trains them in {name}"
        )
    first, *more = error.args or ("",)
    error.args = ("\n".join([str(first), *lines]), *more)


def _others(named: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in named if tensor.is_floating_point() and not is_narrow(tensor) and tensor.dtype != dtype}


def _list(tensors: dict[str, torch.dtype]) -> str:
    shown = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in list(tensors.items())[:_SHOWN])
    return shown + (f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else "")
