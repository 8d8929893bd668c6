"""Layers of a ``PipelineModule`` over stages train like the same layers in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pipeline.ds_pipelines import Layers, build, check, feed, half_frozen_layers, tied_layers
from tests.support import parity, ranks
from tests.support.parity import Run


def check_two_stages(every: bool) -> None:
    for zero in (0, 1, 2) if every else (1,):
        check(Run(zero, accumulation=4, clip=0.1), 2)
    check(Run(1, accumulation=1), 2)  # fewer micro-batches than stages
    check(Run(0, accumulation=3), 2, partition_method="type:Block", activation_checkpoint_interval=2)
    check(Run(1, dtype="bf16", accumulation=3, clip=0.1), 2, partition_method="parameters")
    check(Run(0, dtype="fp16", accumulation=2), 2)
    check(Run(1, dtype="fp16", accumulation=2, scale_power=20, steps=6), 2)  # overflows at first, on every stage
    offloaded = Run(1, accumulation=2, steps=3, extra={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    for run in (Run(1, accumulation=2, clip=0.1), Run(0, dtype="fp16", accumulation=2, scale_power=20, steps=6), offloaded):
        check(run, 2, half_frozen_layers)  # a stage that trains nothing


def trained(run: Run, stages: int, layers: Layers) -> tuple[list[float], dict[str, Any] | None]:
    """Losses and weights; every data-parallel rank reads the same."""
    engine = parity.initialize(build(stages, layers), run)
    batches = feed(run, 0)
    losses = [float(engine.train_batch(batches)) for _ in range(run.steps)]
    weights = engine._consolidated_16bit_state_dict()
    engine.destroy()
    return losses, weights


def check_against_one_stage(every: bool) -> None:
    """Optimizers that need whole parameters (a stage has those of its layers, and whoever shares one updates it alike), and autocast."""
    for zero, layers, extra in (
        (0, tied_layers, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
        (1, half_frozen_layers, {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
        (2, tied_layers, {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}),
        (1, tied_layers, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    )[slice(None) if every else slice(1, 3)]:
        run = Run(zero, accumulation=2, clip=0.1, extra=extra)
        (plain, whole), (losses, weights) = trained(run, 1, layers), trained(run, 2, layers)
        torch.testing.assert_close(losses, plain, rtol=1e-6, atol=0, msg=lambda text, extra=extra: f"{extra}: {text}")
        if whole is not None and weights is not None:  # rank 0
            torch.testing.assert_close(weights, whole, rtol=1e-5, atol=1e-5, msg=lambda text, extra=extra: f"{extra}: {text}")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_stages(every: bool) -> None:
    ranks.run_ranks(check_two_stages, 2, every)
    ranks.run_ranks(check_against_one_stage, 2, every)


def check_four_ranks() -> None:
    check(Run(0, accumulation=4, clip=0.1), 4)
    check(Run(1, accumulation=2), 4)
    for zero in (0, 1, 2):
        check(Run(zero, accumulation=3, clip=0.1), 2)
    check(Run(1, accumulation=2, clip=0.1), 1)


@pytest.mark.slow  # fast: `test_two_stages`
def test_four_ranks() -> None:
    ranks.run_ranks(check_four_ranks, 4)
