"""Test that a rank that skips a batch is noticed at the next boundary, on every rank, with the numbers of all ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from tests.support import ranks


class _Picky(nn.Module):
    """A module that refuses batches that are not finite, as user code does with an assertion."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return self.linear(x).square().mean()


def _engine(stage: int, **config: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = _Picky()
    return hf_zero.initialize(model=model, model_parameters=model.parameters(), config={**settings, **config})[0]


def _swallow(stage: int, everywhere: bool) -> str:
    """Train on three batches, the second of which is bad on rank 1 or on all ranks; return the message of the error, if there was one."""
    engine = _engine(stage)
    try:
        for index in range(3):
            bad = index == 1 and (everywhere or ranks.rank() == 1)
            with suppress(ValueError):
                engine.backward(engine(torch.full((1, 4), float("nan") if bad else 1.0)))
                engine.step()
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_exception_that_is_caught_on_one_rank(stage: int) -> None:
    for text in ranks.run_ranks(_swallow, 2, stage, False):
        assert "1 on rank(s)" not in text and "2 on rank(s) 0; 3 on rank(s) 1" in text and "exception" in text


@pytest.mark.parametrize("stage", [0, 2])
def test_an_exception_on_all_ranks_is_their_affair(stage: int) -> None:
    assert ranks.run_ranks(_swallow, 2, stage, True) == ["", ""]


def _shorter_window(stage: int) -> str:
    """End rank 1's loader after one of two micro-steps, and step then (as accelerate does at a loader's end)."""
    engine = _engine(stage, gradient_accumulation_steps=2)
    count = 2 - ranks.rank()
    try:
        for index in range(count):
            engine.set_gradient_accumulation_boundary(index == count - 1)
            if index < count - 1:
                with engine.no_sync():
                    engine.backward(engine(torch.ones(1, 4)))
            else:
                engine.backward(engine(torch.ones(1, 4)))
        engine.step()
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1])
def test_a_loader_that_is_shorter(stage: int) -> None:
    for text in ranks.run_ranks(_shorter_window, 2, stage):
        assert "1 on rank(s) 1; 2 on rank(s) 0" in text and "even_batches=False" in text
