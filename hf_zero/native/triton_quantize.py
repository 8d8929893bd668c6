"""The codes of ZeRO++ as Triton kernels, for tensors on a GPU: one pass over memory, and the bits of ``quantize_reference``.

They are tried first, as those of 1-bit Adam are ([Note: trying a kernel first]).
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from hf_zero.native import quantize_reference
from hf_zero.native.block_codes import LIMITS, QUANTIZE_BLOCK, KeptError, block_count, codes_of, message_bytes, scales_of
from hf_zero.native.library import TRITON_VARIABLE
from hf_zero.observe import log_rank0

# Every product and sum rounds by itself, as in torch's operations.
_EXACT = {"enable_fp_fusion": False}


def serves(device: torch.device) -> bool:
    """Whether these functions serve tensors on ``device``: a GPU where Triton works, unless ``HF_ZERO_TRITON`` is 0."""
    return device.type == "cuda" and os.environ.get(TRITON_VARIABLE) != "0" and _works(device)


@functools.cache
def _works(device: torch.device) -> bool:
    """See [Note: trying a kernel first]."""
    try:
        same = agrees(device)
    except Exception as error:  # whatever it is, there is another way
        log_rank0("quantized collectives: Triton does not work on %s (%s: %s), torch's operations serve", device, type(error).__name__, error)
        return False
    if not same:
        log_rank0("quantized collectives: Triton's kernels and torch's operations do not agree on %s, the latter serve", device)
    return same


def agrees(device: torch.device) -> bool:
    """Whether coded and decoded vectors come out as in plain torch, bit for bit.

    Raises:
        Exception: Whatever Triton raises where it does not work.
    """
    numel = 5 * QUANTIZE_BLOCK + 16
    values = torch.linspace(-1, 1, numel, device=device).pow_(3)
    found = []
    for quantizes, dequantizes in ((quantize, dequantize), (quantize_reference.quantize, quantize_reference.dequantize)):
        for bits in LIMITS:
            message = torch.zeros(2, message_bytes(numel, bits), dtype=torch.uint8, device=device)
            error = KeptError(torch.zeros(message_bytes(numel, 8), dtype=torch.uint8, device=device), 0.8)
            for row in message:
                quantizes(values, row, bits, error)
            out = torch.empty(numel, device=device)
            dequantizes(message, out, bits)
            found.append((message, error.message, out))
    half = len(found) // 2
    return all(torch.equal(one, other) for a, b in zip(found[:half], found[half:], strict=True) for one, other in zip(a, b, strict=True))


def _kernels() -> Any:
    from hf_zero.native import triton_quantize_kernel  # only here: without Triton it cannot be imported

    return triton_quantize_kernel


def quantize(values: torch.Tensor, message: torch.Tensor, bits: int, error: KeptError | None = None) -> None:
    """As ``quantize`` of ``quantize.py``."""
    numel = values.numel()
    kept = error.message if error is not None else message
    _kernels().quantize[(block_count(numel),)](
        values, scales_of(message, numel), codes_of(message, numel, bits), scales_of(kept, numel),
        codes_of(kept, numel, 8 if error is not None else bits), numel, error.keep if error else 0.0, error.take if error else 0.0,
        BITS=bits, LIMIT=LIMITS[bits], HAS_ERROR=error is not None, BLOCK=QUANTIZE_BLOCK, **_EXACT,
    )  # fmt: skip


def dequantize(messages: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """As ``dequantize`` of ``quantize.py``."""
    numel = out.numel()
    scales, codes = scales_of(messages, numel), codes_of(messages, numel, bits)
    _kernels().dequantize[(block_count(numel),)](
        scales, scales.stride(0), codes, codes.stride(0), out, numel,
        WORKERS=len(messages), BITS=bits, BLOCK=QUANTIZE_BLOCK, **_EXACT,
    )  # fmt: skip
