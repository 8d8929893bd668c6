"""Experts divided over ranks train like plain PyTorch on the joined batch."""

from __future__ import annotations

import pytest

from tests.support import ranks
from tests.support.experts import check_experts, lopsided
from tests.support.parity import Run, check_bitwise

MODELS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")


@pytest.mark.parametrize("name", [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.slow)])
def test_every_stage_on_two_ranks(name: str) -> None:
    ranks.run_ranks(check_stages, 2, name, 2)


def check_stages(name: str, size: int) -> None:
    traces = [check_experts(name, Run(stage, accumulation=2, clip=0.1), size) for stage in (0, 1, 2, 3)]
    check_bitwise(traces[3], traces[1], f"{name}: stage 3 against 1")
    check_bitwise(traces[3], traces[2], f"{name}: stage 3 against 2")


@pytest.mark.slow  # fast: `test_every_stage_on_two_ranks`
@pytest.mark.fast_rows("4")
@pytest.mark.parametrize("size", [2, 4])
def test_on_four_ranks(size: int) -> None:
    ranks.run_ranks(check_four, 4, size)


def check_four(size: int) -> None:
    """Also where the tokens of a rank are all for the same experts, and some ranks get none."""
    check_experts(MODELS[0], Run(0, clip=0.1), size)
    check_experts(MODELS[1], Run(3), size, lopsided(MODELS[1]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_stage_on_four_ranks(size: int) -> None:
    for name in MODELS:
        ranks.run_ranks(check_stages, 4, name, size)
