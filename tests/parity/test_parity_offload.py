"""Test that offload changes where state is stored, never the result: bit for bit the run that offloads nothing."""

from __future__ import annotations

import pytest

from tests.support import ranks
from tests.support.offload_runs import compare
from tests.support.parity import Run

RUNS = {
    "fp32": Run(dtype="fp32"),
    "bf16, clip": Run(dtype="bf16", clip=0.05),
    "fp16, accumulation": Run(dtype="fp16", accumulation=2),
    # The first step overflows and is skipped.
    "fp16, overflow, clip": Run(dtype="fp16", clip=0.05, scale_power=18, steps=3),
    "fp32, accumulation, clip": Run(dtype="fp32", accumulation=2, clip=0.05),
}


def _compare(stage: int, names: list[str], case: str, parts: int = 1) -> list[str]:
    """Compare each run with the offload settings of one part; with all of them if there is one part."""
    runs = {name: Run(**{**vars(RUNS[name]), "stage": stage}) for name in names}
    return [
        f"{name}: {text}"
        for turn, (name, run) in enumerate(runs.items())
        for text in compare(case, run, part=slice(turn % parts, None, parts))
    ]


# Every stage, way, element type, accumulation and clipping once; the slow test has all combinations.
QUICK = [
    (1, 1, ["fp16, accumulation"]),
    (2, 2, ["bf16, clip", "fp16, accumulation"]),
    (2, 3, ["fp16, overflow, clip", "fp32, accumulation, clip"]),
]


@pytest.mark.fast_rows("1-1-names0", "2-3-names2")
@pytest.mark.parametrize(("world", "stage", "names"), QUICK)
def test_offloading_changes_no_bit(world: int, stage: int, names: list[str]) -> None:
    wrong = [text for rank in ranks.run_ranks(_compare, world, stage, names, "odd_mlp", 2) for text in rank]
    assert not wrong, "\n".join(wrong)


@pytest.mark.fast_rows("3-both cpu")
@pytest.mark.parametrize(("stage", "ways"), [(2, "no overlap"), (3, "both cpu"), pytest.param(3, "apart", marks=pytest.mark.slow)])
def test_a_model_of_one_unit(stage: int, ways: str) -> None:
    """Train ALBERT, which is one block: two buffers in turn then hold two shards of the same unit, an old one and a new one."""
    wrong = [text for rank in ranks.run_ranks(compare, 2, "albert", Run(dtype="bf16", stage=stage), ways) for text in rank]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_changes_no_bit_in_any_combination(stage: int, world: int) -> None:
    wrong = [text for rank in ranks.run_ranks(_compare, world, stage, list(RUNS), "odd_mlp", timeout=500) for text in rank]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "albert", "mixtral"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_changes_no_bit_of_a_transformer(stage: int, case: str) -> None:
    names = ["fp32", "bf16, clip", "fp16, accumulation"]
    wrong = [text for rank in ranks.run_ranks(_compare, 3, stage, names, case, timeout=500) for text in rank]
    assert not wrong, "\n".join(wrong)
