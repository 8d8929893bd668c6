"""Encode vectors as integers of 8 or 4 bits and one fp32 scale per block of 256 elements, which ZeRO++ sends instead of 16-bit numbers.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv:2306.10209. The native library
computes the codes on a host, Triton on a GPU, and ``quantize_reference`` if both are missing; all give the same bits.

[Note: the code of a block] The scale is the largest magnitude of the block divided by 127 (8 bits) or 28 (4 bits). With 8 bits an element
is encoded as the integer nearest to its quotient by the scale, and decoded as this integer times the scale. With 4 bits it is encoded as
the integer k from -7 to 7 whose triangular number k (|k| + 1) / 2 is nearest, and decoded as this triangular number times the scale: most
elements of a block of gradients are small compared with the largest, and equal steps would encode them as zero. Of two equally near
integers the even one is taken. All operations are in fp32, and each is rounded separately. Zero stays zero, and -0 becomes 0. A block
without an element of 2**-100 or more in magnitude becomes zeros, so that no operation has a subnormal scale. A block with an infinity or
NaN is decoded as NaN in all its elements, so that an overflow stays visible. The last block of a vector may be shorter.

A message (``block_codes.py``) is the scales of a vector followed by its integers, in two's complement: one byte per element, or half a
byte, with the even element in the low half. Its length is a multiple of four bytes; bytes after the integers have no meaning.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType

import torch

from hf_zero.errors import HfZeroError
from hf_zero.native import quantize_reference, triton_quantize
from hf_zero.native.block_codes import LARGEST, QUANTIZE_BLOCK, KeptError, block_count, codes_of, message_bytes, scales_of
from hf_zero.native.library import ELEMENT_TYPES, library_for
from hf_zero.native.passes import address
from hf_zero.native.ranges import for_thread_ranges

_STEP = 16 * QUANTIZE_BLOCK


def can_quantize(dtype: torch.dtype) -> bool:
    """Return whether vectors of ``dtype`` can be encoded: fp32, bf16 and fp16 can."""
    return dtype in ELEMENT_TYPES


def quantize(values: torch.Tensor, messages: torch.Tensor, bits: int, error: KeptError | None = None, threads: int = 1) -> None:
    """Write the code of each part of ``values``; see [Note: the code of a block].

    Args:
        values: (parts * n,) fp32, bf16 or fp16, contiguous.
        messages: (parts, message_bytes(n, bits)) uint8, contiguous; overwritten.
        bits: 8 or 4.
        error: Error of earlier codes: it is added to the values first, and this code's error is mixed into it. The error of a block that
            is not finite stays unchanged.
        threads: Maximum number of threads; the result does not depend on it.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    parts, numel = len(messages), values.numel() // max(1, len(messages))
    _require(values, messages, parts, numel, bits)
    if error is not None:
        _require(values, error.messages, parts, numel, 8)
    native = library_for(values)
    if native is None:
        _without_library(values).quantize(values, messages, bits, error)
        return
    target = _places(messages, numel, bits)
    kept = _places(error.messages, numel, 8) if error is not None else _NOWHERE
    weights = (ctypes.c_float(error.keep), ctypes.c_float(error.take)) if error is not None else (ctypes.c_float(0.0),) * 2
    source = (ctypes.c_int64(numel), address(values), ELEMENT_TYPES[values.dtype])

    def work(first: int, last: int) -> None:
        native.call("hfz_quantize", ctypes.c_int64(first), ctypes.c_int64(last), *source, bits, *target, *kept, *weights)

    _for_blocks(parts * block_count(numel), threads, work)


def dequantize(messages: torch.Tensor, out: torch.Tensor, bits: int, threads: int = 1) -> None:
    """Decode ``messages``: for each part the sum over workers, in their order, in fp32, rounded once to the dtype of ``out``.

    Args:
        messages: (parts, workers, message_bytes(n, bits)) uint8, contiguous.
        out: (parts * n,) fp32, bf16 or fp16, contiguous; overwritten.
        bits: 8 or 4.
        threads: Maximum number of threads; the result does not depend on it.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    parts, workers = messages.shape[:2]
    numel = out.numel() // max(1, parts)
    _require(out, messages, parts, numel, bits, workers)
    native = library_for(out)
    if native is None:
        _without_library(out).dequantize(messages, out, bits)
        return
    source = (ctypes.c_int64(numel), workers, bits, *_places(messages.view(parts * workers, -1), numel, bits))
    target = (address(out), ELEMENT_TYPES[out.dtype])

    def work(first: int, last: int) -> None:
        native.call("hfz_dequantize", ctypes.c_int64(first), ctypes.c_int64(last), *source, *target)

    _for_blocks(parts * block_count(numel), threads, work)


_NOWHERE = (address(None), ctypes.c_int64(0)) * 2


def _places(messages: torch.Tensor, numel: int, bits: int) -> tuple[object, ...]:
    """Return the addresses and strides of the scales and the codes of messages (rows, message bytes)."""
    scales, codes = scales_of(messages, numel), codes_of(messages, numel, bits)
    return address(scales), ctypes.c_int64(scales.stride(0)), address(codes), ctypes.c_int64(codes.stride(0))


def _for_blocks(blocks: int, threads: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(first, last)`` for ranges of blocks that cover all blocks."""

    def part(start: int, stop: int) -> None:  # in elements, as if all blocks were full
        work(start // QUANTIZE_BLOCK, -(-stop // QUANTIZE_BLOCK))

    for_thread_ranges(blocks * QUANTIZE_BLOCK, threads, part, step=_STEP)


def _require(values: torch.Tensor, messages: torch.Tensor, parts: int, numel: int, bits: int, workers: int = 1) -> None:
    nbytes = parts * workers * message_bytes(numel, bits) if bits in LARGEST else 0
    fits = values.dim() == 1 and can_quantize(values.dtype) and values.numel() == parts * numel
    fits = fits and messages.dtype == torch.uint8 and messages.numel() == nbytes > 0 and values.device == messages.device
    if not fits or not (values.is_contiguous() and messages.is_contiguous()):
        raise HfZeroError(
            f"a code of {bits} bits: {tuple(values.shape)} {values.dtype} on {values.device} and {tuple(messages.shape)} "
            f"{messages.dtype} on {messages.device}; 8 or 4 bits, 1D fp32, bf16 or fp16 values that make {parts} equal parts, and {nbytes} "
            "bytes of uint8 in the same memory are expected, contiguous"
        )


def _without_library(tensor: torch.Tensor) -> ModuleType:
    """Return the module whose functions of the same names replace the native library for ``tensor``: Triton's or torch's."""
    return triton_quantize if triton_quantize.serves(tensor.device) else quantize_reference
