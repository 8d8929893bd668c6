"""World sizes 1, 2, 3 and 4, also where the world divides nothing: parity with the reference and bitwise equal stages."""

from __future__ import annotations

from tests.support import ranks
from tests.support.matrix import check_stages
from tests.support.parity import Run, check_bitwise, check_case
from tests.support.rows import thinned


@thinned(3, world_size=[1, 2, 3, 4], name=["odd_mlp", "gpt2"], dtype=["fp32", "bf16", "fp16"])
def test_every_stage(world_size: int, name: str, dtype: str) -> None:
    ranks.run_ranks(check_stages, world_size, name, dtype, 2, 0.1)


def _one_rank_is_no_special_case() -> None:
    """On one rank every stage is the same computation."""
    traces = [check_case("gpt2", Run(stage=stage, accumulation=2, clip=0.1))[0] for stage in (0, 1, 2, 3)]
    for stage, trace in enumerate(traces[1:], start=1):
        check_bitwise(trace, traces[0], f"one rank, stage {stage} against stage 0")


def _repeatable(stage: int) -> None:
    run = Run(stage=stage, accumulation=2, clip=0.1)
    check_bitwise(check_case("gpt2", run)[0], check_case("gpt2", run)[0], f"the same run twice, stage {stage}")


def test_one_rank_is_no_special_case() -> None:
    ranks.run_ranks(_one_rank_is_no_special_case, 1)


@thinned(stage=[0, 1, 2, 3], world_size=[2, 3])
def test_a_run_repeats_bitwise(stage: int, world_size: int) -> None:
    ranks.run_ranks(_repeatable, world_size, stage)
