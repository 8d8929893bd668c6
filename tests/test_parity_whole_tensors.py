"""Optimizers that look at whole tensors (Adafactor, Muon, LAMB, ...) train as in plain PyTorch, at every stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import ranks
from tests.models import CASES
from tests.parity import Run, Trace, check, check_bitwise
from tests.whole_tensors import OPTIMIZERS, plain, through_engine

STAGES = (0, 1, 2, 3)


def _bitwise(name: str, case: str, stages: tuple[int, ...], accumulation: int) -> None:
    """Losses and weights are plain PyTorch's bit for bit; norms are added up in another order."""
    run = Run(accumulation=accumulation)
    expected = plain(name, CASES[case], run, ranks.world())
    for stage in stages:
        trace = through_engine(name, case, replace(run, stage=stage))
        check(trace, expected, run, f"{name}, {case}, stage {stage}")
        check_bitwise(trace, _with_norms_of(expected, trace), f"{name}, {case}, stage {stage}")


def _with_norms_of(expected: Trace, trace: Trace) -> Trace:
    return replace(expected, norms=trace.norms)


def _close(name: str, case: str, run: Run) -> None:
    expected = plain(name, CASES[case], run, ranks.world())
    check(through_engine(name, case, run), expected, run, f"{name}, {case}")


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_bitwise_on_two_ranks(name: str) -> None:
    ranks.run_ranks(_bitwise, 2, name, "odd_mlp", STAGES, 1)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_bitwise_on_other_numbers_of_ranks(world: int) -> None:
    for name in ("Adafactor groups", "RowScaled"):
        ranks.run_ranks(_bitwise, world, name, "odd_mlp", (1, 3), 2)


@pytest.mark.parametrize("case", ["tied_coder", "gpt2", "conv"])
def test_tied_weights_transformers_and_convolutions(case: str) -> None:
    ranks.run_ranks(_close, 2, "Adafactor", case, Run(stage=3, clip=0.1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["transformers relative step", "LAMB"])
def test_16_bit(dtype: str, name: str) -> None:
    for stage in (2, 3):
        ranks.run_ranks(_close, 2, name, "mlp", Run(stage=stage, dtype=dtype, clip=0.1, accumulation=2))
