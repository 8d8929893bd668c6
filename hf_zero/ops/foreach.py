"""Sort a group's parameters into lists that torch's ``_foreach_*`` functions update in one call each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedError


class Bucket(NamedTuple):
    """Parameters of one device and dtype, with their gradients and one list per state name; all lists have the same order."""

    params: list[Tensor]  # any shape
    grads: list[Tensor]  # shapes and dtype of params
    states: list[list[Tensor]]  # [state name][parameter], shapes and dtype of params


def buckets(optimizer: torch.optim.Optimizer, group: dict[str, Any], names: tuple[str, ...]) -> Iterator[Bucket]:
    """Yield the parameters of ``group`` that have a gradient, in buckets; missing states are created as zeros.

    Args:
        optimizer: Owner of the state dict.
        group: One of its parameter groups; ``group["foreach"]`` False gives every parameter a bucket of its own.
        names: The states to create and to collect, such as ``("exp_avg",)``.

    Raises:
        UnsupportedError: A gradient is sparse.
    """
    found: dict[Any, Bucket] = {}
    for index, param in enumerate(group["params"]):
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            raise UnsupportedError(
                f"{type(optimizer).__name__} got a sparse gradient for a parameter of shape {tuple(param.shape)}; "
                "build the embedding with sparse=False."
            )
        state = optimizer.state[param]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        key = index if group.get("foreach") is False else (param.device, param.dtype)
        bucket = found.setdefault(key, Bucket([], [], [[] for _ in names]))
        bucket.params.append(param)
        bucket.grads.append(param.grad)
        for column, name in zip(bucket.states, names, strict=True):
            column.append(state[name])
    yield from found.values()


def signed(grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Return the gradients, or their negatives when the group maximises."""
    return list(torch._foreach_neg(grads)) if group.get("maximize") else grads


def require_hyperparameters(lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Refuse hyper-parameters with which no Adam-like optimizer can work.

    Raises:
        ValueError: The message names the parameter and its value.
    """
    if lr < 0:
        raise ValueError(f"lr is {lr!r}; it must be at least 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas!r}; two numbers from 0 to below 1 are expected")
    if weight_decay < 0:
        raise ValueError(f"weight_decay is {weight_decay!r}; it must be at least 0")
