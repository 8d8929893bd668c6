"""Coding and decoding of made-up vectors, with whichever functions; shared by the tests of the kernels."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.native.block_codes import KeptError, codes_of, message_bytes, scales_of


def coded(functions: Any, vector: torch.Tensor, bits: int, error: KeptError | None = None, parts: int = 1, **options: Any) -> torch.Tensor:
    """The messages of ``vector`` in so many parts."""
    messages = torch.zeros(parts, message_bytes(vector.numel() // parts, bits), dtype=torch.uint8)
    functions.quantize(vector, messages, bits, error, **options)
    return messages


def decoded(
    functions: Any, messages: torch.Tensor, numel: int, bits: int, dtype: torch.dtype = torch.float32, **options: Any
) -> torch.Tensor:
    """What (parts, workers, message bytes) stand for, (numel,)."""
    out = torch.zeros(numel, dtype=dtype)
    functions.dequantize(messages, out, bits, **options)
    return out


def no_error(numel: int, parts: int = 1, keep: float = 0.8) -> KeptError:
    """An error of zeros for vectors of ``numel`` elements in so many parts."""
    return KeptError(torch.zeros(parts, message_bytes(numel // parts, 8), dtype=torch.uint8), keep)


def step(functions: Any, vectors: list[torch.Tensor], bits: int, parts: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """Codes vectors one after another with an error, then without; decodes their sum in every type. What all of that wrote.

    Args:
        functions: Has ``quantize`` and ``dequantize``.
        vectors: Of one length, a multiple of ``parts``.
        bits: 8 or 4.
        parts: Messages per vector.
        **options: For each call.
    """
    numel = vectors[0].numel()
    each = numel // parts
    error = no_error(numel, parts)
    messages = torch.stack([coded(functions, vector, bits, error, parts, **options) for vector in vectors], 1)
    plain = coded(functions, vectors[0], bits, parts=parts, **options)
    found = {}
    for name, message, width in (("message", messages, bits), ("error", error.messages, 8), ("plain", plain, bits)):
        found[f"{name}: scales"], found[f"{name}: codes"] = scales_of(message, each).contiguous(), codes_of(message, each, width)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found[f"sum in {dtype}"] = decoded(functions, messages, numel, bits, dtype, **options)
    return found


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs in any bit, any NaN counting as any other."""
    return [name for name in one if not torch.equal(_bits(one[name]), _bits(other[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, 7.0), tensor)
    return tensor.contiguous().view(torch.uint8)
