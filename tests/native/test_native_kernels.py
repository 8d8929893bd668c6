"""Lion, Adagrad, SGD, norm, conversion and sign bits: each against its torch reference, on every instruction set."""

from __future__ import annotations

import math
import platform
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hf_zero import native
from hf_zero.errors import HfZeroError
from hf_zero.native import library as loader
from hf_zero.native.library import Library
from hf_zero.native.ranges import crc32_chunks, crc32_chunks_reference
from tests.native.libraries import isa, needs_library, same_bits, sizes, values
from tests.support.drawn import drawn

__all__ = ["isa"]

FIXED = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
HALF = [torch.bfloat16, torch.float16]
common = st.fixed_dictionaries(
    {
        "grad_dtype": st.sampled_from([torch.float32, *HALF]),
        "state_dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "low_dtype": st.sampled_from([None, *HALF]),
        "offset": st.integers(0, 17),
        "seed": st.integers(0, 1000),
        "grad_factor": st.sampled_from([1.0, 0.25, 1 / 65536]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
    }
)


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads what Linux says of an x86-64")
@needs_library
def test_the_library_finds_the_instruction_sets_that_the_system_finds() -> None:
    """A library that finds too few is as exact and many times slower, in silence."""
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    avx2 = {"avx2", "fma", "f16c", "pclmulqdq"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    wanted = {"baseline": set(), "avx2": avx2, "avx512": avx512, "avx512bf16": avx512 | {"avx512_bf16"}}
    assert set(loader.library().supported) == {name for name, needed in wanted.items() if needed <= flags}


def tensors(count: int, case: dict[str, Any], *, positive_state: bool = False, finite: bool = False) -> list[torch.Tensor | None]:
    """Master, gradient, state and the low copy."""
    seed, offset = case["seed"], case["offset"]
    state = values(count, seed + 2, dtype=case["state_dtype"], offset=offset)
    return [
        values(count, seed, offset=offset),
        values(count, seed + 1, dtype=case["grad_dtype"], offset=offset, finite=finite),
        state.abs() if positive_state else state,
        None if case["low_dtype"] is None else torch.zeros(offset + count, dtype=case["low_dtype"])[offset:],
    ]


def copy(given_tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.clone() for tensor in given_tensors]


@given(count=sizes(), case=common, betas=st.sampled_from([(0.9, 0.99), (0.95, 0.3)]))
@drawn(12, 25, **FIXED)
def test_lion_equals_its_reference_bit_for_bit(isa: str, count: int, case: dict[str, Any], betas: tuple[float, float]) -> None:
    ours = tensors(count, case)
    theirs = copy(ours)
    options = {"lr": 1e-3, "betas": betas, "weight_decay": case["weight_decay"], "grad_factor": case["grad_factor"]}
    native.lion_update(*ours, **options, threads=2)
    native.lion_reference(*theirs, **options)
    for one, other in zip(ours, theirs, strict=True):
        assert one is None or same_bits(one, other)


def close(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
    """Equal but for one rounding of a product: the reference has no fused multiply-add. 16-bit results may round to the neighbour."""
    if one is not None and other is not None:
        rtol = 4e-6 if one.dtype == torch.float32 else 2.0**-7 if one.dtype == torch.bfloat16 else 2.0**-10
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6, equal_nan=True)


@given(count=sizes(), case=common)
@drawn(12, 25, **FIXED)
def test_adagrad_equals_its_reference(isa: str, count: int, case: dict[str, Any]) -> None:
    case = case | {"grad_factor": 1 / 4096}
    ours = tensors(count, case, positive_state=True, finite=True)
    ours[0] = torch.randn(count, generator=torch.Generator().manual_seed(case["seed"]))
    theirs = copy(ours)
    options = {"lr": 1e-2, "eps": 1e-10, "weight_decay": case["weight_decay"], "grad_factor": case["grad_factor"]}
    native.adagrad_update(*ours, **options, threads=2)
    native.adagrad_reference(*theirs, **options)
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)


@given(count=sizes(), case=common, first=st.booleans(), nesterov=st.booleans(), dampening=st.sampled_from([0.0, 0.3]))
@drawn(12, 25, **FIXED)
def test_sgd_equals_its_reference(isa: str, count: int, case: dict[str, Any], first: bool, nesterov: bool, dampening: float) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    ours = tensors(count, case, finite=True)
    ours[:3] = [torch.randn(count, generator=generator).to(tensor.dtype) for tensor in ours[:3]]
    theirs = copy(ours)
    options = {"lr": 1e-2, "momentum": 0.9, "dampening": dampening, "weight_decay": case["weight_decay"], "nesterov": nesterov}
    native.sgd_update(*ours, **options, first=first, grad_factor=case["grad_factor"], threads=2)
    native.sgd_reference(*theirs, **options, first=first, grad_factor=case["grad_factor"])
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)


def test_adagrad_and_sgd_have_torch_fused_bits(isa: str) -> None:
    start, count = values(4096, 3), 4096
    adagrad, sgd = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    peers = [
        torch.optim.Adagrad([adagrad], lr=1e-2, weight_decay=0.1, fused=True),
        torch.optim.SGD([sgd], lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, fused=True),
    ]
    masters, states = [start.clone(), start.clone()], [torch.zeros(count), torch.zeros(count)]
    for step in range(4):
        grad = torch.randn(count, generator=torch.Generator().manual_seed(step))
        adagrad.grad, sgd.grad = grad.clone(), grad.clone()
        for peer in peers:
            peer.step()
        native.adagrad_update(masters[0], grad, states[0], lr=1e-2, eps=1e-10, weight_decay=0.1)
        options = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False, "first": step == 0}
        native.sgd_update(masters[1], grad, states[1], **options)
    assert same_bits(masters[0], adagrad.detach()) and same_bits(masters[1], sgd.detach())


@given(count=sizes(), dtype=st.sampled_from([torch.float32, *HALF]), seed=st.integers(0, 1000), offset=st.integers(0, 17))
@drawn(12, 25, **FIXED)
def test_squared_norm_equals_its_reference(isa: str, count: int, dtype: torch.dtype, seed: int, offset: int) -> None:
    data = values(count, seed, dtype=dtype, offset=offset)
    one, other = native.squared_norm(data), native.squared_norm(data, threads=3)
    assert one == other, "threads must not change it"
    assert math.isclose(one, native.squared_norm_reference(data), rel_tol=1e-12)


@given(count=st.integers(1, 200_000), bad=st.sampled_from([math.inf, -math.inf, math.nan]), place=st.floats(0, 1, exclude_max=True))
@drawn(12, 25, **FIXED)
def test_squared_norm_is_finite_if_and_only_if_every_element_is(isa: str, count: int, bad: float, place: float) -> None:
    data = torch.full((count,), 3.0e38)
    assert math.isfinite(native.squared_norm(data))
    data[int(place * count)] = bad
    assert not math.isfinite(native.squared_norm(data))


def test_squared_norm_is_the_same_on_every_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.native.libraries import ISAS, use_isa

    data = values(123_457, 1)
    found = set()
    for name in ISAS:
        use_isa(name, monkeypatch)
        found.add(native.squared_norm(data))
    assert len(found) <= 1


@pytest.mark.parametrize("dtype", HALF)
def test_every_16_bit_value_converts_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide, back = torch.zeros(2**16), torch.zeros(2**16, dtype=dtype)
    native.convert(every, wide)
    assert same_bits(wide, every.float())
    native.convert(wide, back)
    assert same_bits(back, every)
    assert bool((torch.signbit(back) == torch.signbit(every)).all()), "NaN keeps its sign"


@pytest.mark.parametrize("dtype", HALF)
def test_neighbours_of_every_tie_round_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = every[torch.isfinite(every)]
    ties = (finite[1:] + finite[:-1]) / 2  # neighbours in the order of their bits, between them a tie
    near = torch.cat([ties, torch.nextafter(ties, torch.tensor(math.inf)), torch.nextafter(ties, torch.tensor(-math.inf))])
    result = torch.zeros(near.numel(), dtype=dtype)
    native.convert(near, result)
    assert same_bits(result, near.to(dtype))


@given(count=sizes(), dtype=st.sampled_from(HALF), seed=st.integers(0, 1000), offset=st.integers(0, 17))
@drawn(12, 25, **FIXED)
def test_conversion_equals_torch(isa: str, count: int, dtype: torch.dtype, seed: int, offset: int) -> None:
    bits = torch.randint(-(2**31), 2**31, (offset + count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
    source = bits.to(torch.int32).view(torch.float32)[offset:]
    target = torch.zeros(offset + count, dtype=dtype)[offset:]
    native.convert(source, target, threads=2)
    assert same_bits(target, source.to(dtype))


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(HfZeroError, match=r"lion_update: the first state is torch.float16; allowed"):
        native.lion_update(torch.zeros(2), torch.zeros(2), torch.zeros(2).half(), lr=1.0, betas=(0.9, 0.9), weight_decay=0.0)
    with pytest.raises(HfZeroError, match=r"convert: 2 elements of torch.float32 to 3 of torch.bfloat16"):
        native.convert(torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16))


@needs_library
def test_variable_chooses_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_NATIVE", "0")
    assert str(native.status()) == "torch reference: HF_ZERO_NATIVE=0"
    monkeypatch.setenv("HF_ZERO_NATIVE", "baseline")
    assert native.status().isa == "baseline"
    monkeypatch.setenv("HF_ZERO_NATIVE", "avx1024")
    with pytest.raises(HfZeroError, match=r"HF_ZERO_NATIVE is 'avx1024'.*Allowed: 0, avx512"):
        native.status()
    monkeypatch.setenv("HF_ZERO_NATIVE", "/nowhere/lib.so")
    with pytest.raises(HfZeroError, match=r"HF_ZERO_NATIVE is '/nowhere/lib.so': no lib.so in /nowhere"):
        native.status()


@given(count=sizes(200_000), offset=st.integers(0, 17), chunk=st.sampled_from([1, 100, 127, 128, 4096, 65536]), seed=st.integers(0, 100))
@drawn(12, 25, **FIXED)
def test_crc32_equals_zlib(isa: str, count: int, offset: int, chunk: int, seed: int) -> None:
    count = count if chunk > 1 else count % 300
    data = memoryview(random.Random(seed).randbytes(offset + count))[offset:]
    assert crc32_chunks(data, chunk).tolist() == crc32_chunks_reference(data, chunk).tolist()


def test_crc32_is_zlib_where_a_library_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "has", lambda self, name: False)
    assert crc32_chunks(memoryview(b"123456789"), 9).tolist() == [0xCBF43926]  # the check value of this CRC
