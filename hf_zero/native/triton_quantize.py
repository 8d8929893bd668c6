"""Compute the codes of ZeRO++ with Triton kernels, for tensors on a GPU: one pass over memory, the bits of ``quantize_reference``."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.native import quantize_reference
from hf_zero.native.block_codes import LARGEST, QUANTIZE_BLOCK, KeptError, block_count, codes_of, message_bytes, scales_of
from hf_zero.native.library import triton_serves

# Every product and sum is rounded separately, as in torch's operations.
_EXACT = {"enable_fp_fusion": False}


def serves(device: torch.device) -> bool:
    """Return whether these functions can be used for tensors on ``device``; see [Note: trying a kernel first]."""
    return triton_serves(device, "quantized collectives", agrees)


def agrees(device: torch.device) -> bool:
    """Return whether vectors encoded and decoded on ``device`` equal those of plain torch, bit for bit.

    Raises:
        Exception: Any error of Triton on a device where it does not work.
    """
    numel = 2 * QUANTIZE_BLOCK + 16
    values = torch.linspace(-1, 1, 2 * numel, device=device).pow_(3)
    found: list[list[torch.Tensor]] = []
    for quantizes, dequantizes in ((quantize, dequantize), (quantize_reference.quantize, quantize_reference.dequantize)):
        for bits in LARGEST:
            messages = torch.zeros(2, 2, message_bytes(numel, bits), dtype=torch.uint8, device=device)
            error = KeptError(torch.zeros(2, message_bytes(numel, 8), dtype=torch.uint8, device=device), 0.8)
            for rows in messages:
                quantizes(values, rows, bits, error)
            found.append([messages, error.messages])
            for dtype in (torch.float32, torch.float16, *((torch.bfloat16,) if device.type != "cpu" else ())):  # the interpreter truncates
                found[-1].append(torch.empty(2 * numel, dtype=dtype, device=device))
                dequantizes(messages, found[-1][-1], bits)
    half = len(found) // 2
    return all(torch.equal(one, other) for a, b in zip(found[:half], found[half:], strict=True) for one, other in zip(a, b, strict=True))


def _kernels() -> Any:
    from hf_zero.native import triton_kernels  # only here: without Triton it cannot be imported

    return triton_kernels


def quantize(values: torch.Tensor, messages: torch.Tensor, bits: int, error: KeptError | None = None) -> None:
    """Compute ``quantize.quantize``."""
    parts, numel = len(messages), values.numel() // len(messages)
    kept = _places(error.messages, numel, 8) if error is not None else _places(messages, numel, bits)
    _kernels().quantize[(parts * block_count(numel),)](
        values, *_places(messages, numel, bits), *kept, numel, error.keep if error else 0.0, error.take if error else 0.0,
        BITS=bits, LARGEST=LARGEST[bits], HAS_ERROR=error is not None, BLOCK=QUANTIZE_BLOCK, **_EXACT,
    )  # fmt: skip


def dequantize(messages: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Compute ``quantize.dequantize``."""
    parts, workers = messages.shape[:2]
    numel = out.numel() // parts
    _kernels().dequantize[(parts * block_count(numel),)](
        *_places(messages.view(parts * workers, -1), numel, bits), out, numel, WORKERS=workers, BITS=bits, BLOCK=QUANTIZE_BLOCK, **_EXACT
    )


def _places(messages: torch.Tensor, numel: int, bits: int) -> tuple[Any, ...]:
    scales, codes = scales_of(messages, numel), codes_of(messages, numel, bits)
    return scales, scales.stride(0), codes, codes.stride(0)
