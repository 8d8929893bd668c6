"""Layers of a ``PipelineModule`` over stages train like the same layers in plain PyTorch."""

from __future__ import annotations

from tests.support import ranks
from tests.support.ds_pipelines import check, half_frozen_layers
from tests.support.parity import Run


def check_two_stages() -> None:
    for zero in (0, 1, 2):
        check(Run(zero, accumulation=4, clip=0.1), 2)
    check(Run(1, accumulation=1), 2)  # fewer micro-batches than stages
    check(Run(0, accumulation=3), 2, partition_method="type:Block", activation_checkpoint_interval=2)
    check(Run(1, dtype="bf16", accumulation=3, clip=0.1), 2, partition_method="parameters")
    check(Run(0, dtype="fp16", accumulation=2), 2)
    check(Run(1, dtype="fp16", accumulation=2, scale_power=20, steps=6), 2)  # overflows at first, on every stage
    offloaded = Run(1, accumulation=2, steps=3, extra={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    for run in (Run(1, accumulation=2, clip=0.1), Run(0, dtype="fp16", accumulation=2, scale_power=20, steps=6), offloaded):
        check(run, 2, half_frozen_layers)  # a stage that trains nothing


def test_two_stages() -> None:
    ranks.run_ranks(check_two_stages, 2)


def check_four_ranks() -> None:
    check(Run(0, accumulation=4, clip=0.1), 4)
    check(Run(1, accumulation=2), 4)
    for zero in (0, 1, 2):
        check(Run(zero, accumulation=3, clip=0.1), 2)
    check(Run(1, accumulation=2, clip=0.1), 1)


def test_four_ranks() -> None:
    ranks.run_ranks(check_four_ranks, 4)
