"""The native kernels give the same bits on every processor: digests of their results, kept from one run.

Other tests compare with torch, whose own loops round differently from processor to processor. Written anew, after a change that is
meant to change bits, by ``python -m tests.native.test_native_portable``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_zero import native
from hf_zero.native import quantize
from hf_zero.native.host_updates import AdamRule, adagrad_update, adam_update, lion_update, sgd_update
from tests.native import block_codes
from tests.native.libraries import HARD, NOT_FINITE, isa

__all__ = ["isa"]

GOLDEN = Path(__file__).parents[1] / "golden" / "native_bits.json"
COUNT = 5003
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TYPES = list(itertools.product([F32, BF16, F16], [F32, BF16], [None, BF16, F16]))  # gradient, state, low


def _values(seed: int, dtype: torch.dtype = F32) -> Tensor:
    """(COUNT,) from integers alone, since random normal numbers differ between processors: signs, 43 powers of two, hard values."""
    draw = np.random.Generator(np.random.PCG64(seed))
    bits = draw.integers(0, 2, COUNT) << 31 | draw.integers(127 - 30, 127 + 13, COUNT) << 23 | draw.integers(0, 1 << 23, COUNT)
    found = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())
    hard = torch.tensor(HARD + NOT_FINITE)
    found[torch.from_numpy(draw.permutation(COUNT)[: len(hard)])] = hard
    return found.to(dtype)


def _digest(*tensors: Tensor | None) -> str:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:  # the sign and payload of a NaN are the processor's
            plain = torch.where(tensor.isnan(), torch.full_like(tensor, 7.0), tensor)
            found.update(plain.view(whole[plain.element_size()]).numpy().tobytes())
    return found.hexdigest()[:16]


def _updated(update: Callable[..., None], states: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], seed: int) -> str:
    grad, state, low = dtypes
    master, held = _values(seed), [_values(seed + 2 + number, state).abs() for number in range(states)]
    copy = None if low is None else torch.zeros(COUNT, dtype=low)
    update(master, _values(seed + 1, grad), *held, copy)
    return _digest(master, *held, copy)


def _optimizers() -> Iterator[tuple[str, str]]:
    for number, dtypes in enumerate(TYPES):
        label = " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        for decoupled, corrected, step in itertools.product([True, False], [True, False], [1, 1000]):
            numbers = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "grad_factor": 1 / 3}
            rule = AdamRule(**numbers, decoupled=decoupled, bias_correction=corrected, step=step)  # type: ignore[arg-type]
            name = f"adam {label} {'decoupled' if decoupled else 'L2'} {'corrected' if corrected else 'plain'} {step}"
            yield name, _updated(lambda *tensors, rule=rule: adam_update(*tensors, rule), 2, dtypes, 10 * number)
        yield f"lion {label}", _updated(_lion, 1, dtypes, 10 * number)
        yield f"adagrad {label}", _updated(_adagrad, 1, dtypes, 10 * number)
        for nesterov in (True, False):
            yield f"sgd {label} {nesterov}", _updated(lambda *tensors, on=nesterov: _sgd(*tensors, nesterov=on), 1, dtypes, 10 * number)


def _lion(*tensors: Tensor | None) -> None:
    lion_update(*tensors, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, grad_factor=1 / 3)  # type: ignore[arg-type]


def _adagrad(*tensors: Tensor | None) -> None:
    adagrad_update(*tensors, lr=1e-2, eps=1e-10, weight_decay=0.1, grad_factor=1 / 3)  # type: ignore[arg-type]


def _sgd(*tensors: Tensor | None, nesterov: bool) -> None:
    sgd_update(*tensors, lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.1, nesterov=nesterov, first=False, grad_factor=1 / 3)  # type: ignore[arg-type]


def _others() -> Iterator[tuple[str, str]]:
    for source, target in [(F32, BF16), (F32, F16), (BF16, F32), (F16, F32)]:
        result = torch.zeros(COUNT, dtype=target)
        native.convert(_values(5, source), result)
        yield f"convert {source} {target}", _digest(result)
    for dtype in (F32, BF16, F16):
        finite = torch.nan_to_num(_values(6, dtype), 0.0, 1.0, -1.0)
        yield f"squared norm {dtype}", _digest(torch.tensor(native.squared_norm(finite), dtype=torch.float64))


def _codes() -> Iterator[tuple[str, str]]:
    """Blocks of ZeRO++, with errors that are kept: two vectors in two parts, whose last blocks are short."""
    for bits, dtype in itertools.product((8, 4), (F32, BF16, F16)):
        vectors = [_values(seed, dtype)[: COUNT // 2 * 2].contiguous() for seed in (7, 8)]
        for name, tensor in block_codes.step(quantize, vectors, bits, parts=2).items():
            yield f"code of {bits} bits of {dtype}, {name}", _digest(tensor)


def _found() -> dict[str, str]:
    return dict(itertools.chain(_optimizers(), _others(), _codes()))


def test_results_are_those_of_every_other_processor(isa: str) -> None:
    kept = json.loads(GOLDEN.read_text())
    found = _found()
    assert found.keys() == kept.keys()
    assert not {name for name in kept if kept[name] != found[name]}


def test_digests_tell_a_bit_apart() -> None:
    values = _values(1)
    other = values.clone()
    other.view(torch.int32)[100] ^= 1
    assert _digest(values) != _digest(other)
    with pytest.raises(KeyError):
        _digest(values.to(torch.complex128))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(_found(), indent=1) + "\n")
