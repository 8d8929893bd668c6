"""Shared by the tests of native kernels: every instruction set that runs here, and tensors that are hard to get right."""

from __future__ import annotations

import os
import platform

import pytest
import torch
from hypothesis import strategies as st

from hf_zero.native import library as loader

# HF_ZERO_NATIVE itself chooses the library to test (a sanitizer build); without it, the one built at installation.
_found = loader.library()
ISAS = _found.supported if _found else ()
needs_library = pytest.mark.skipif(not ISAS, reason=str(loader.status()))
# torch's fused Adam fuses products and sums elsewhere on other processors (1 ulp of the second moment on aarch64).
TORCH_ADAM_ROUNDS_ALIKE = platform.machine().lower() in ("x86_64", "amd64")
needs_torch_adam_alike = pytest.mark.skipif(
    not TORCH_ADAM_ROUNDS_ALIKE, reason="torch's fused Adam rounds otherwise on this processor; test_native_portable.py compares bits"
)

# What conversions and updates get wrong: signed zeros, denormals of each type, limits, ties, infinities, NaN.
HARD = [0.0, -0.0, 1e-45, -1e-40, 5.9e-8, -3e-8, 6.1e-5, 65504.0, 65519.996, 65520.0, 3.39e38, -3.4e38]
HARD += [1.00390625, 1.01171875, 1.00048828125]
NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


@pytest.fixture(params=list(loader.ISAS))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set in turn, by the variable that users have for it."""
    if request.param not in ISAS:
        pytest.skip(f"{request.param}: {loader.status()}")
    use_isa(request.param, monkeypatch)
    return request.param


def use_isa(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls one instruction set of the library under test from here on."""
    path = os.environ.get(loader.VARIABLE, "")
    if os.sep in path:
        found = loader._load(loader.Path(path), name)
        monkeypatch.setattr(loader, "_choose", lambda wish: (found, loader.Status(found.path, found.isa, "test")))
    else:
        monkeypatch.setenv(loader.VARIABLE, name)


def sizes(most: int = 1_000_000) -> st.SearchStrategy[int]:
    """Numbers of elements: around whole groups of lanes, and anything up to ``most``."""
    return st.one_of(st.integers(0, 70), st.integers(0, most))


def values(count: int, seed: int, *, dtype: torch.dtype = torch.float32, offset: int = 0, finite: bool = True) -> torch.Tensor:
    """(count,) of every magnitude, with hard values among them, starting ``offset`` elements into its storage."""
    generator = torch.Generator().manual_seed(seed)
    storage = torch.randn(offset + count, generator=generator) * torch.exp2(torch.randint(-30, 12, (offset + count,), generator=generator))
    hard = torch.tensor(HARD if finite else HARD + NOT_FINITE)
    places = torch.randperm(offset + count, generator=generator)[: len(hard) * 3]
    storage[places] = hard.repeat(3)[: len(places)]
    result = storage.to(dtype)[offset:]
    return torch.where(torch.isfinite(result), result, torch.ones((), dtype=dtype)) if finite and dtype == torch.float16 else result


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, any NaN counting as any other."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    equal = left.view(whole) == right.view(whole)
    return left.dtype == right.dtype and bool((equal | (left.isnan() & right.isnan())).all())
