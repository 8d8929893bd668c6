"""Vectors as integers of 8 or 4 bits and one fp32 scale per block of 256 elements: what ZeRO++ sends in place of 16-bit numbers.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv:2306.10209. Served by the native
library on a host, by Triton on a GPU, and by ``quantize_reference`` where there is neither; all give the same bits.

[Note: the code of a block] The scale is the largest magnitude of the block divided by 127 (8 bits) or 7 (4 bits); an element becomes the
whole number nearest to its quotient by the scale, the even one of two as near, and stands for that number times the scale. Everything is
computed in fp32, every operation rounds by itself. Zero stays zero, and -0 becomes 0. A block without an element of 2**-100 or more in
magnitude becomes zeros, so that no operation meets a subnormal scale. A block with an infinity or NaN arrives as NaN, whole: an overflow
cannot vanish. The last block of a vector may be shorter.

A message (``block_codes.py``) is the scales of a vector and behind them its integers, in two's complement: one byte per element, or half
of one, the even element in the low half. Its length is a multiple of four bytes; what is behind the integers says nothing.
"""

from __future__ import annotations

import ctypes
from types import ModuleType

import torch

from hf_zero.errors import HfZeroError
from hf_zero.native import quantize_reference, triton_quantize
from hf_zero.native.block_codes import LIMITS, QUANTIZE_BLOCK, KeptError, code_bytes, codes_of, message_bytes, scales_of
from hf_zero.native.library import ELEMENT_TYPES, Library, announce, library
from hf_zero.native.passes import address
from hf_zero.native.thread_ranges import for_thread_ranges

_STEP = 16 * QUANTIZE_BLOCK


def can_quantize(dtype: torch.dtype) -> bool:
    """Whether vectors of ``dtype`` can be coded: fp32, bf16 and fp16 can."""
    return dtype in ELEMENT_TYPES


def quantize(values: torch.Tensor, message: torch.Tensor, bits: int, error: KeptError | None = None, threads: int = 1) -> None:
    """Writes the code of ``values``; see [Note: the code of a block].

    Args:
        values: (n,) fp32, bf16 or fp16, contiguous.
        message: (message_bytes(n, bits),) uint8, contiguous; overwritten.
        bits: 8 or 4.
        error: What earlier codes have lost: it is added to the values first, and what this one loses is mixed into it. A block that is
            not finite leaves its error alone.
        threads: The most threads to use; the result does not depend on it.

    Raises:
        HfZeroError: Tensors that do not fit together.
    """
    numel = values.numel()
    _require(values, message, message_bytes(numel, bits) if bits in LIMITS else -1, bits)
    if error is not None:
        _require(values, error.message, message_bytes(numel, 8), 8)
    native = _native(values)
    if native is None:
        _without_library(values).quantize(values, message, bits, error)
        return
    scales, codes = scales_of(message, numel), codes_of(message, numel, bits)
    kept = (scales_of(error.message, numel), codes_of(error.message, numel, 8)) if error is not None else (None, None)
    weights = (ctypes.c_float(error.keep), ctypes.c_float(error.take)) if error is not None else (ctypes.c_float(0.0),) * 2

    def work(start: int, stop: int) -> None:
        block = start // QUANTIZE_BLOCK
        places = (address(scales, block), address(codes, code_bytes(start, bits)), address(kept[0], block), address(kept[1], start))
        source = (address(values, start), ELEMENT_TYPES[values.dtype])
        native.call("hfz_quantize", ctypes.c_int64(stop - start), *source, bits, *places, *weights)

    for_thread_ranges(numel, threads, work, step=_STEP)


def dequantize(messages: torch.Tensor, out: torch.Tensor, bits: int, threads: int = 1) -> None:
    """Writes what ``messages`` stand for: their sum, added up in fp32 row by row, rounded once to the type of ``out``.

    Args:
        messages: (workers, message_bytes(n, bits)) uint8, contiguous, at least one row.
        out: (n,) fp32, bf16 or fp16, contiguous; overwritten.
        bits: 8 or 4.
        threads: The most threads to use; the result does not depend on it.

    Raises:
        HfZeroError: Tensors that do not fit together.
    """
    numel = out.numel()
    _require(out, messages, len(messages) * message_bytes(numel, bits) if bits in LIMITS else -1, bits)
    native = _native(out)
    if native is None:
        _without_library(out).dequantize(messages, out, bits)
        return
    scales, codes = scales_of(messages, numel), codes_of(messages, numel, bits)
    strides = (ctypes.c_int64(scales.stride(0)), ctypes.c_int64(codes.stride(0)))

    def work(start: int, stop: int) -> None:
        from_scales = (address(scales, start // QUANTIZE_BLOCK), strides[0])
        from_codes = (address(codes, code_bytes(start, bits)), strides[1])
        target = (address(out, start), ELEMENT_TYPES[out.dtype])
        native.call("hfz_dequantize", ctypes.c_int64(stop - start), len(messages), bits, *from_scales, *from_codes, *target)

    for_thread_ranges(numel, threads, work, step=_STEP)


def _require(values: torch.Tensor, message: torch.Tensor, nbytes: int, bits: int) -> None:
    fits = values.dim() == 1 and can_quantize(values.dtype) and message.dtype == torch.uint8 and message.numel() == nbytes
    if not fits or not nbytes or not (values.is_contiguous() and message.is_contiguous()) or values.device != message.device:
        raise HfZeroError(
            f"a code of {bits} bits: {tuple(values.shape)} {values.dtype} on {values.device} and {message.numel()} bytes of "
            f"{message.dtype} on {message.device}; 8 or 4 bits, fp32, bf16 or fp16 values, 1D, and {nbytes} uint8 in the same memory are "
            "expected, contiguous"
        )


def _native(tensor: torch.Tensor) -> Library | None:
    if tensor.device.type != "cpu":
        return None
    found = library()
    if found is None:
        announce()
    return found


def _without_library(tensor: torch.Tensor) -> ModuleType:
    """The functions of the same names that serve where the native library does not."""
    return triton_quantize if triton_quantize.serves(tensor.device) else quantize_reference
