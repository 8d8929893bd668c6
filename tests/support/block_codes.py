"""Coding and decoding of made-up vectors, with whichever functions; shared by the tests of the kernels."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.native.block_codes import KeptError, codes_of, message_bytes, scales_of


def coded(functions: Any, vector: torch.Tensor, bits: int, error: KeptError | None = None, **options: Any) -> torch.Tensor:
    """The message of ``vector``."""
    message = torch.zeros(message_bytes(vector.numel(), bits), dtype=torch.uint8)
    functions.quantize(vector, message, bits, error, **options)
    return message


def step(functions: Any, vectors: list[torch.Tensor], bits: int, **options: Any) -> dict[str, torch.Tensor]:
    """Codes vectors one after another with an error, then without; decodes their sum in every type. What all of that wrote.

    Args:
        functions: Has ``quantize`` and ``dequantize``.
        vectors: Of one length.
        bits: 8 or 4.
        **options: For each call.
    """
    numel = vectors[0].numel()
    error = KeptError(torch.zeros(message_bytes(numel, 8), dtype=torch.uint8), 0.8)
    messages = torch.stack([coded(functions, vector, bits, error, **options) for vector in vectors])
    plain = coded(functions, vectors[0], bits, **options)
    found = {
        "scales": scales_of(messages, numel).contiguous(), "codes": codes_of(messages, numel, bits), "error scales": scales_of(error.message, numel),
        "error codes": codes_of(error.message, numel, 8), "plain scales": scales_of(plain, numel), "plain codes": codes_of(plain, numel, bits),
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.zeros(numel, dtype=dtype)
        functions.dequantize(messages, out, bits, **options)
        found[f"sum in {dtype}"] = out
    return found


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs in any bit, any NaN counting as any other."""
    return [name for name in one if not torch.equal(_bits(one[name]), _bits(other[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, 7.0), tensor)
    return tensor.contiguous().view(torch.uint8)
