"""Codes of blocks: exact by definition, and the native kernels give the bits of the torch reference, on every instruction set."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero.errors import HfZeroError
from hf_zero.native import quantize as codes
from hf_zero.native import quantize_reference
from hf_zero.native.block_codes import QUANTIZE_BLOCK, codes_of, message_bytes, scales_of
from tests.native.block_codes import coded, decoded, differences, no_error, step
from tests.native.libraries import isa, needs_library, values  # noqa: F401

EVERY = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@needs_library
@EVERY
@given(
    count=st.one_of(st.integers(1, 70), st.integers(200, 1100)),
    seed=st.integers(0, 99),
    bits=st.sampled_from([8, 4]),
    dtype=st.sampled_from(DTYPES),
    finite=st.booleans(),
    parts=st.integers(1, 3),
)
def test_what_is_coded_and_decoded(isa: str, count: int, seed: int, bits: int, dtype: torch.dtype, finite: bool, parts: int) -> None:  # noqa: F811
    """Two codings with an error in between, and the sum of both messages, in every type."""
    vectors = [values(count * parts, seed + number, dtype=dtype, finite=finite) for number in range(2)]
    assert not differences(step(codes, vectors, bits, parts), step(quantize_reference, vectors, bits, parts))


@needs_library
def test_threads_and_long_vectors(isa: str) -> None:  # noqa: F811
    vectors = [values(3 * (50_000 + 7), number) for number in range(2)]
    for bits in (8, 4):
        alone, together = step(codes, vectors, bits, 3, threads=1), step(codes, vectors, bits, 3, threads=4)
        assert not differences(alone, together)
        assert not differences(alone, step(quantize_reference, vectors, bits, 3))


@pytest.mark.parametrize("functions", [codes, quantize_reference])
@pytest.mark.parametrize(
    ("bits", "values", "wanted", "first"),
    [
        (8, [127, 0.5, 1.5, -0.5, -2.5, -0.0, 0.49, -127], [127, 0, 2, 0, -2, 0, 0, -127], [127, 0]),
        (4, [28, 0.5, 2.0, -4.5, -8.0, -0.0, 0.51, -28], [28, 0, 3, -3, -10, 0, 1, -28], [0 << 4 | 7, 14 << 4 | 2]),
        (4, [28, 24.5, 24.51, -18.0, -17.99, 12.5, 12.51, 1.99], [28, 21, 28, -21, -15, 10, 15, 1], [6 << 4 | 7, 10 << 4 | 7]),
    ],
)
def test_the_definition(functions: Any, bits: int, values: list[float], wanted: list[float], first: list[int]) -> None:
    """Scale, ties to even, zeros, -0, tails and the place of each half, as the documentation says."""
    block, largest = torch.zeros(QUANTIZE_BLOCK + 3), values[0]
    block[:8] = torch.tensor(values)
    block[QUANTIZE_BLOCK:] = torch.tensor([0.0, -1.0, 0.25])  # a tail with a scale of its own
    message = coded(functions, block, bits)
    assert scales_of(message, block.numel()).tolist() == [[1.0, torch.tensor(1.0).div(largest).item()]]
    out = decoded(functions, message.unsqueeze(0), block.numel(), bits)
    assert out[:8].tolist() == wanted
    assert not torch.signbit(out[block == 0]).any(), "no negative zeros"
    assert out[QUANTIZE_BLOCK:].tolist()[:2] == [0.0, -1.0]
    assert codes_of(message, block.numel(), bits)[0, :2].tolist() == first


@pytest.mark.parametrize("functions", [codes, quantize_reference])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_finite_arrives_so_and_tiny_blocks_are_zeros(functions: Any, bits: int) -> None:
    vector = torch.ones(5 * QUANTIZE_BLOCK)
    vector[3], vector[QUANTIZE_BLOCK + 7] = math.inf, math.nan
    vector[2 * QUANTIZE_BLOCK : 3 * QUANTIZE_BLOCK] = 1e-31  # below 2**-100
    vector[3 * QUANTIZE_BLOCK : 4 * QUANTIZE_BLOCK] = 1e-44  # subnormal
    blocks = decoded(functions, coded(functions, vector, bits).unsqueeze(0), vector.numel(), bits).view(5, -1)
    assert blocks[:2].isnan().all()
    assert not blocks[2:4].any()
    assert (blocks[4] == 1.0).all()


@pytest.mark.parametrize("functions", [codes, quantize_reference])
def test_an_error_is_carried_and_a_block_that_is_not_finite_keeps_its_own(functions: Any) -> None:
    """With ``keep`` 0 the error is what the last code lost: the sum of many messages comes as close as one code."""
    vector = torch.linspace(-1, 1, 2 * QUANTIZE_BLOCK)
    error = no_error(vector.numel(), keep=0.0)
    messages = torch.stack([coded(functions, vector, 4, error) for _ in range(50)], 1)
    total, plain = (decoded(functions, rows.contiguous(), vector.numel(), 4) for rows in (messages, messages[:, :1]))
    assert (total / 50 - vector).abs().max() < 0.1 * (plain - vector).abs().max()
    before = error.messages.clone()
    coded(functions, torch.full_like(vector, math.inf), 4, error)
    assert torch.equal(before, error.messages)


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes(bits: int) -> None:
    assert message_bytes(1 << 20, bits) == (1 << 20) * bits // 8 + 4 * ((1 << 20) // 256)
    assert message_bytes(1, bits) == 8
    for count in (1, 255, 256, 257):
        assert message_bytes(count, bits) % 4 == 0


def test_what_does_not_fit_is_refused() -> None:
    message = torch.zeros(1, message_bytes(32, 8), dtype=torch.uint8)
    for vector, target, bits in [
        (torch.zeros(33), message, 8),
        (torch.zeros(32, dtype=torch.float64), message, 8),
        (torch.zeros(64)[::2], message, 8),
        (torch.zeros(32), message, 2),
        (torch.zeros(32), message.view(torch.int8), 8),
    ]:
        with pytest.raises(HfZeroError, match="a code of . bits"):
            codes.quantize(vector, target, bits)
