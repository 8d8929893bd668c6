"""World sizes 1, 2, 3 and 4, also where the world divides nothing: parity with the reference and bitwise equal stages."""

from __future__ import annotations

import itertools

import pytest

from tests.support import ranks
from tests.support.matrix import STAGES, check_stages
from tests.support.models import CASES
from tests.support.parity import Run, Trace, check_bitwise, initialize, train
from tests.support.rows import slow_but

FAST = {(3, "odd_mlp", "fp32"), (3, "gpt2", "bf16"), (3, "odd_mlp", "fp16"), (4, "gpt2", "fp32"), (1, "odd_mlp", "bf16")}
CELLS = itertools.product((1, 2, 3, 4), ("odd_mlp", "gpt2"), ("fp32", "bf16", "fp16"))


@pytest.mark.fast_rows("3-odd_mlp-fp32", "4-gpt2-fp32")
@pytest.mark.parametrize(
    ("world_size", "name", "dtype"), [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in CELLS]
)
def test_every_stage(world_size: int, name: str, dtype: str) -> None:
    ranks.run_ranks(check_stages, world_size, name, dtype, 2, 0.1)


def _trained(stage: int) -> Trace:
    run, case = Run(stage=stage, accumulation=2, clip=0.1), CASES["gpt2"]
    engine = initialize(case.build(), run)
    trace = train(engine, case.rows, case.forward, run)
    engine.destroy()
    return trace


def _one_rank_is_no_special_case() -> None:
    """On one rank every stage is the same computation."""
    traces = [_trained(stage) for stage in STAGES]
    for stage, trace in enumerate(traces[1:], start=1):
        check_bitwise(trace, traces[0], f"one rank, stage {stage} against stage 0")


def _repeatable() -> None:
    for stage in STAGES:
        check_bitwise(_trained(stage), _trained(stage), f"the same run twice, stage {stage}")


def test_one_rank_is_no_special_case() -> None:
    ranks.run_ranks(_one_rank_is_no_special_case, 1)


@pytest.mark.parametrize("world_size", slow_but([2, 3], 3))
def test_a_run_repeats_bitwise(world_size: int) -> None:
    ranks.run_ranks(_repeatable, world_size)
