"""Test the matrix: 9 architectures x 4 stages x 3 precisions x accumulation x clipping, against plain PyTorch on the joined batch."""

from __future__ import annotations

import itertools

import pytest

from tests.support import ranks
from tests.support.matrix import ACCUMULATIONS, CLIPS, check_block, check_stages
from tests.support.models import MATRIX

FAST_16_BIT = ("gpt2", "t5", "albert", "mixtral")
EVERY_MODEL = [*MATRIX, "conv", "tied_coder"]


@pytest.mark.fast_rows("gpt2", "albert", "mixtral", "conv", "tied_coder", "llama")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.quick) if name == "gpt2" else name for name in EVERY_MODEL])
def test_fp32(name: str) -> None:
    """Check that stages 1, 2 and 3 agree bitwise, stage 0 and the reference within rounding. Accumulation and clipping vary over the
    models.
    """
    cells, turn = list(itertools.product(ACCUMULATIONS, CLIPS)), EVERY_MODEL.index(name)
    if name == "gpt2":
        for cell in cells:
            ranks.run_ranks(check_stages, 2, name, "fp32", *cell)
    else:
        ranks.run_ranks(check_stages, 2, name, "fp32", *cells[turn % len(cells)], (turn % 3, 3))


@pytest.mark.fast_rows("bf16-0.1-t5-1", "bf16-0.1-albert-3", "fp16-0.0-gpt2-3")
@pytest.mark.parametrize(("name", "accumulation"), list(zip(FAST_16_BIT, (3, 1, 3, 1), strict=True)))
@pytest.mark.parametrize(("dtype", "clip"), [("bf16", 0.1), ("fp16", 0.0)])
def test_16_bit(name: str, accumulation: int, dtype: str, clip: float) -> None:
    turn = FAST_16_BIT.index(name) + (dtype == "fp16")
    ranks.run_ranks(check_stages, 2, name, dtype, accumulation, clip, (turn % 3, 3))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_every_cell(name: str, dtype: str, world_size: int) -> None:
    ranks.run_ranks(check_block, world_size, name, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_one_rank_on_a_gpu(name: str, dtype: str) -> None:
    env = {"HF_ZERO_TEST_DEVICE": "cuda:0", "HF_ZERO_TEST_BACKEND": "nccl"}
    ranks.run_ranks(check_block, 1, name, dtype, env=env, timeout=280)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_two_ranks_share_a_gpu(name: str, dtype: str) -> None:
    """Run two ranks on one device, which nccl refuses and gloo does not."""
    ranks.run_ranks(check_block, 2, name, dtype, env={"HF_ZERO_TEST_DEVICE": "cuda:0"}, timeout=280)
