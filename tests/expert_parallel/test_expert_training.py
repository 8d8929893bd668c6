"""Experts divided over ranks train like plain PyTorch on the joined batch."""

from __future__ import annotations

import pytest

from tests.support import ranks
from tests.support.experts import check_experts, lopsided
from tests.support.parity import Run, check_bitwise

MODELS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")


def test_every_stage_on_two_ranks() -> None:
    ranks.run_ranks(check_stages, 2, MODELS, 2)


def check_stages(names: list[str], size: int) -> None:
    for name in names:
        traces = [check_experts(name, Run(stage, accumulation=2, clip=0.1), size) for stage in (0, 1, 2, 3)]
        check_bitwise(traces[3], traces[1], f"{name}: stage 3 against 1")
        check_bitwise(traces[3], traces[2], f"{name}: stage 3 against 2")


@pytest.mark.parametrize("size", [2, 4])
def test_on_four_ranks(size: int) -> None:
    ranks.run_ranks(check_four, 4, size)


def check_four(size: int) -> None:
    for name, stage in zip(MODELS, (0, 3), strict=True):
        check_experts(name, Run(stage, clip=0.1), size)
        check_experts(name, Run(stage), size, lopsided(name))
