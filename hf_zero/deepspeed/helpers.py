"""Small functions of `deepspeed.runtime.utils` and `deepspeed.utils.torch` that scripts import."""

from __future__ import annotations

import os
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from packaging import version

from hf_zero.deepspeed.accelerator import get_accelerator
from hf_zero.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")


def set_random_seed(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """``item`` with its tensors on ``device``; lists, tuples and dicts are walked.

    Args:
        item: Anything.
        device: Where to.
        criterion_func: Tensors that it says no to stay where they are.
    """
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, Mapping):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(move_to_device(value, device, criterion_func) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item


def copy_to_device(item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool]) -> Any:
    """As ``move_to_device``."""
    return move_to_device(item, device, criterion_func)


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Makes the folder that the file will be in."""
    os.makedirs(os.path.dirname(os.fspath(filename)) or ".", exist_ok=True)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call: ``call_to_str("f", 1, b=2)`` is ``"f(1, b=2)"``."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def get_only_unique_item(items: Iterable[Item]) -> Item:
    """The item that all of them are equal to.

    Raises:
        ConfigError: They differ, or there is none.
    """
    found = set(items)
    if len(found) != 1:
        raise ConfigError(f"expected one unique element in {sorted(map(str, found))}")
    return found.pop()


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Sums of the first 1, 2, ... weights."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Borders (num_parts + 1) that divide ``num_items`` items evenly; the last parts are one longer where it does not come out even."""
    size, rest = divmod(num_items, num_parts)
    if size == 0:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return [part * size + max(0, part - (num_parts - rest)) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Borders (num_parts + 1) that divide items into runs whose heaviest is as light as can be."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0, *accumulate(weights)]
    # Bisection over what a part may weigh: the answer is the sum of some run of items.
    candidates = sorted({sums[stop] - sums[start] for start in range(len(sums)) for stop in range(start + 1, len(sums))})
    limit = candidates[bisect_left(candidates, True, key=lambda most: _borders(sums, most, num_parts) is not None)]
    return _borders(sums, limit, num_parts) or []


def _borders(sums: Sequence[float], most: float, num_parts: int) -> list[int] | None:
    """Borders of ``num_parts`` parts of at least one item and at most ``most``, filled from the front; None where they do not hold all."""
    borders, items = [0], len(sums) - 1
    for part in range(num_parts):
        end = borders[-1]
        while end < items - (num_parts - part - 1) and sums[end + 1] - sums[borders[-1]] <= most:
            end += 1
        if end == borders[-1]:
            return None
        borders.append(end)
    return borders if borders[-1] == items else None


def noop_decorator(func: Function) -> Function:
    """The function itself."""
    return func


def empty_cache() -> None:
    """Returns the allocator's unused memory to the device."""
    get_accelerator().empty_cache()


def get_ma_status() -> int:
    """Bytes allocated on the device; of the process, on a CPU."""
    return int(get_accelerator().memory_allocated())


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch's version (of which the first two numbers count) lies between the two, both included."""
    present = version.parse(".".join(torch.__version__.split(".")[:2]))
    return (min_version is None or present >= version.parse(str(min_version))) and (
        max_version is None or present <= version.parse(str(max_version))
    )


def is_model_parallel_parameter(param: torch.Tensor) -> bool:
    """Whether a script's own model parallelism marked the parameter as divided."""
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter is one that stage 3 shards."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")
