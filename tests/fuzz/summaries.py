"""What a run gets from a checkpoint, as one value to compare: everything that would change its numbers."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.checkpoint.convert.source import Source
from hf_zero.checkpoint.files.rows import Elsewhere


def summary(source: Source) -> dict[str, Any]:
    """Reads all of ``source``: values, states, numbers, groups, schedule, loss scale, counters."""
    found: dict[str, Any] = {"groups": plain(source.groups), "counters": dict(source.counters), "aliases": dict(source.aliases)}
    for param in source.params:
        states = {name: _elements(row) for name, row in param.states.items()}
        numbers = {name: plain(value) for name, value in param.numbers.items()}
        found[f"param {param.name}"] = (param.value.shape, param.group, _elements(param.value.row), states, numbers)
    for buffer in source.buffers:
        found[f"buffer {buffer.name}"] = (buffer.shape, _elements(buffer.row))
    for name in ("scheduler", "scaler"):
        found[name] = plain(source.values.get(name))
    return found


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The entries in which two summaries differ."""
    return sorted(name for name in first.keys() | second.keys() if name not in first or name not in second or first[name] != second[name])


def _elements(row: Elsewhere) -> tuple[str, bytes]:
    values = torch.empty(row.numel(), dtype=row.dtype)
    if row.numel():
        row.read(row.start, values)
    return str(row.dtype), values.view(torch.uint8).numpy().tobytes()


def plain(value: Any) -> Any:
    """``value`` with tensors as text, so that it can be compared."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(plain(item) for item in value)]
    return value if isinstance(value, (bool, int, float, complex, str, bytes, set, slice, type(None))) else repr(value)
