"""Tiny mixtures of experts, trained with expert parallelism and compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.support import ranks, zoo
from tests.support.models import Batch
from tests.support.parity import Feed, Run, Trace, check_training


def build(name: str, changes: dict[str, Any] | None = None) -> nn.Module:
    """The zoo's model, with weights as large as a router needs to tell tokens apart."""
    model = zoo.build(name, changes=changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def mixed(name: str) -> Feed:
    """Other tokens on every rank and in every step."""
    return lambda step, micro, rank: zoo.batch(name, torch.Generator().manual_seed(1 + step + 10 * micro + 100 * rank))


def lopsided(name: str) -> Feed:
    """Rows that repeat one token, another one on every rank: all tokens of a rank go to the same few experts, and some ranks get none."""

    def feed(step: int, micro: int, rank: int) -> Batch:
        batch = zoo.batch(name, torch.Generator().manual_seed(step))
        return {key: torch.full_like(value, zoo.FIRST_TOKEN + 7 * rank + micro + step) for key, value in batch.items()}

    return feed


def with_experts(run: Run, size: int) -> Run:
    """``run`` with experts divided over ``size`` ranks."""
    return replace(run, extra={**run.extra, "expert_parallel": {"enabled": True, "autoep_size": size}})


def check_experts(
    name: str, run: Run, size: int, feed: Feed | None = None, changes: dict[str, Any] | None = None, prepare: Callable[[nn.Module], Any] | None = None
) -> Trace:
    """Trains the zoo's model ``name`` with experts over ``size`` ranks; rank 0 compares with plain PyTorch."""

    def make() -> nn.Module:
        model = build(name, changes)
        if prepare is not None:
            prepare(model)
        return model

    label = f"{name}, experts over {size} of {ranks.world()} ranks"
    return check_training(make, feed or mixed(name), zoo.loss, with_experts(run, size), label=label)
