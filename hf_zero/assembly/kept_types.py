"""Find the parameters and buffers that keep their dtypes in 16-bit training, and explain errors of torch about dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import is_narrow
from hf_zero.core.step.precision import KeptTypes, PrecisionPolicy, cast_parameters

_HALF = (torch.float16, torch.bfloat16)
_NAMED = "_keep_in_fp32_modules"  # attribute: kept in fp32 if the model is in fp16
_ALWAYS_NAMED = "_keep_in_fp32_modules_strict"  # attribute: kept in fp32 in bf16 too


def kept_types(module: nn.Module, precision: PrecisionPolicy, patterns: Sequence[str] | None) -> KeptTypes:
    """Return the dtypes of the tensors of ``module`` that its cast to 16 bit skips, by ``id``; empty if nothing is cast to 16 bit.

    A model of transformers or diffusers has its own list of names to keep in fp32, which is read as the library reads it while it loads a
    model; a tensor of this list keeps the dtype that it was loaded in. A 16-bit tensor that matches ``patterns`` of the configuration
    becomes fp32.

    [Note: norms with statistics] torch computes a batch norm with 16-bit inputs only if weight, bias and statistics have one dtype. So
    weight and bias keep the dtype of the statistics, which are buffers, if it differs from the dtype that parameters are cast to.

    Args:
        module: The model.
        precision: Types that parameters and buffers are cast to.
        patterns: Parts of names, ``*`` for any characters; None uses the model's own list.
    """
    dtype = precision.param_dtype
    if dtype not in _HALF:
        return {}
    if patterns is not None:
        search = glob_search(patterns)
        kept = {id(tensor): torch.promote_types(tensor.dtype, torch.float32) for tensor in _matching(module, search)} if search else {}
    else:
        own = [tensor for model, search in _lists(module, dtype) for tensor in _matching(model, search)]
        kept = {id(tensor): _type_loaded(tensor, dtype) for tensor in own}
    for norm in module.modules():
        statistics = norm.running_mean if isinstance(norm, nn.modules.batchnorm._BatchNorm) else None
        if statistics is not None:
            wide = precision.buffer_type(statistics, kept)
            kept.update((id(param), wide) for param in norm._parameters.values() if param is not None and wide != dtype)
    return kept


def _type_loaded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor that the model keeps in fp32 in training in ``dtype``: its own, except for a parameter of the other
    16-bit dtype, which was loaded for other training.
    """
    other = isinstance(tensor, nn.Parameter) and tensor.dtype in _HALF and tensor.dtype != dtype
    return torch.float32 if other else tensor.dtype


def named_for_fp32(model: nn.Module, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the floating-point parameters and buffers that the library of ``model`` loads in fp32 if the rest is loaded in ``dtype``."""
    search = _own_list(model, dtype) if dtype in _HALF else None
    if search is not None:
        yield from _matching(model, search)


def cast_unnamed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters of ``model`` to ``dtype``, except those that it names for fp32, and return it. Buffers do not change."""
    return cast_parameters(model, dtype, kept_types(model, PrecisionPolicy(param_dtype=dtype), None))


def glob_search(patterns: Sequence[str]) -> re.Pattern[str] | None:
    """Return an expression that finds any of ``patterns`` anywhere in a name, ``*`` for any characters; None for no patterns.

    Raises:
        re.error: A pattern is not a regular expression.
    """
    return re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns)) if patterns else None


def _lists(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, re.Pattern[str]]]:
    """Yield each model inside ``module`` that names tensors for fp32, with the expression that matches their names inside that model."""
    for inner in module.modules():
        search = _own_list(inner, dtype)
        if search is not None:
            yield inner, search


def _own_list(model: nn.Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    plan_of: Any = getattr(type(model), "_get_dtype_plan", None)
    if plan_of is not None:  # transformers 5 computes itself which names are valid, and matches them anywhere
        return glob_search(sorted(name for name, kept in plan_of(model, dtype).items() if kept == torch.float32))
    names = set(_names(model, _ALWAYS_NAMED))
    if dtype == torch.float16:
        names |= set(_names(model, _NAMED))
    # transformers 4 and diffusers: a name is one or several complete parts between dots.
    return re.compile("|".join(rf"(?:(?:^|\.){name}(?:$|\.))" for name in sorted(names))) if names else None


def _names(model: nn.Module, attribute: str) -> list[str]:
    """Return a list attribute of the model itself: a wrapper (PEFT's) forwards unknown attributes to the inner model."""
    value = vars(model).get(attribute, getattr(type(model), attribute, None))
    return [name for name in value if isinstance(name, str)] if isinstance(value, (list, tuple, set, frozenset)) else []


def _matching(module: nn.Module, search: re.Pattern[str]) -> Iterator[torch.Tensor]:
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            if tensor.is_floating_point() and not is_narrow(tensor) and search.search(name):
                yield tensor


_ABOUT_TYPES = re.compile(r"\bd?types?\b", re.IGNORECASE)
_UNEQUAL = re.compile(r"same dtype|should be the same|expected scalar type")  # two tensors of an operation have different dtypes
_FIRST_WORDS = "hf_zero: parameters train in"
_SHOWN = 3


def explain_types(engine: Any, error: BaseException, phase: str) -> None:
    """Add to the message of ``error`` which tensors have another type, and how to change that; never raises another error.

    A buffer keeps the dtype that it was loaded in. A forward that combines it with 16-bit activations computes wider activations, and the
    next layer of torch raises without naming the buffer.
    """
    dtype = engine.precision.param_dtype
    text = str(error)
    if phase != "forward" or not isinstance(error, RuntimeError) or dtype is None or not _ABOUT_TYPES.search(text) or _FIRST_WORDS in text:
        return
    buffers = _others(engine.module.named_buffers(), dtype)
    params = _others(engine.module.named_parameters(), dtype)
    if not (buffers or params or _UNEQUAL.search(text)):
        return
    name = str(dtype).removeprefix("torch.")
    lines = [f"{_FIRST_WORDS} {name}."]
    if not (buffers or params):
        other = ", or set fp16.auto_cast to true" if dtype == torch.float16 else ""
        lines.append(
            f"Buffers are {name} too, so an input of the forward, or a tensor that it makes, has another type. Cast it to {name}{other}. "
            "torch.autocast around the engine has no effect inside it, as in DeepSpeed"
        )
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
