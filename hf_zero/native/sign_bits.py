"""One sign bit per element with error feedback: the compression of 1-bit Adam, and its torch reference.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", arXiv:2102.02888. A chunk is
compressed to the signs of ``value + error`` and one scale, the mean of its absolute values:

    size = add_error(value, error)          # error now holds value + error
    scale = size / error.numel()            # over real elements: pass no padding
    pack_signs(error, scale, bits)          # error now holds what the bits and the scale do not say

and ``unpack_mean`` averages what several workers sent. Bit ``i`` of byte ``j`` belongs to element ``8 * j + i``; 1 means 0 or above.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hf_zero.errors import HfZeroError
from hf_zero.native.library import Library, announce, library
from hf_zero.native.norm import BLOCK_NUMEL, total_of
from hf_zero.native.passes import address
from hf_zero.native.slices import for_slices


def bits_nbytes(numel: int) -> int:
    """Bytes that the signs of ``numel`` elements take."""
    return -(-numel // 8)


def add_error(value: Tensor, error: Tensor, *, threads: int = 1) -> float:
    """Makes ``error = value + error`` and returns the sum of its absolute values, in double precision.

    Args:
        value: fp32, (n,), contiguous; only read.
        error: fp32, (n,), contiguous; updated.
        threads: The most threads to use; the result does not depend on it.

    Raises:
        HfZeroError: Tensors that do not fit together.
    """
    _expect("add_error", value=(value, torch.float32, error.numel()), error=(error, torch.float32, error.numel()))
    count = error.numel()
    native = _native(error)
    if native is None:
        return add_error_reference(value, error)
    sums = torch.zeros(-(-count // BLOCK_NUMEL), dtype=torch.float64)

    def work(start: int, stop: int) -> None:
        blocks = address(sums, start // BLOCK_NUMEL)
        native.call("hfz_add_error", ctypes.c_int64(stop - start), address(value, start), address(error, start), blocks)

    for_slices(count, threads, work, step=BLOCK_NUMEL)
    return total_of(sums)


def add_error_reference(value: Tensor, error: Tensor) -> float:
    """As ``add_error`` in plain torch; any device."""
    error.add_(value)
    return float(error.double().abs().sum())


def pack_signs(error: Tensor, scale: float, bits: Tensor, *, threads: int = 1) -> None:
    """Writes the signs of ``error`` and subtracts ``scale * sign`` from it; NaN counts as negative.

    Args:
        error: fp32, (n,), contiguous, corrected by ``add_error``; updated.
        scale: Rounded to fp32 first, as the receivers will see it.
        bits: uint8, (ceil(n / 8),), contiguous; bits behind the last element become 0.
        threads: The most threads to use.

    Raises:
        HfZeroError: Tensors that do not fit together.
    """
    count = error.numel()
    _expect("pack_signs", error=(error, torch.float32, count), bits=(bits, torch.uint8, bits_nbytes(count)))
    native = _native(error)
    if native is None:
        pack_signs_reference(error, scale, bits)
        return

    def work(start: int, stop: int) -> None:
        native.call("hfz_pack_signs", ctypes.c_int64(stop - start), address(error, start), ctypes.c_float(scale), address(bits, start // 8))

    for_slices(count, threads, work)


def pack_signs_reference(error: Tensor, scale: float, bits: Tensor) -> None:
    """As ``pack_signs`` in plain torch; any device."""
    positive = error >= 0
    padded = torch.nn.functional.pad(positive, (0, -error.numel() % 8)).view(-1, 8)
    bits.copy_((padded.to(torch.int32) << torch.arange(8, dtype=torch.int32, device=error.device)).sum(1).to(torch.uint8))
    size = torch.tensor(scale, dtype=torch.float32, device=error.device)
    error.sub_(torch.where(positive, size, -size))


def unpack_mean(bits: Tensor, scales: Tensor, out: Tensor, *, threads: int = 1) -> None:
    """Averages what several workers sent: the sum over workers, in their order, of ``scale * sign``, divided by their number.

    Args:
        bits: uint8, (workers, ceil(n / 8)), contiguous.
        scales: fp32, (workers,), contiguous.
        out: fp32, (n,), contiguous; overwritten.
        threads: The most threads to use.

    Raises:
        HfZeroError: Tensors that do not fit together.
    """
    workers, count = scales.numel(), out.numel()
    _expect(
        "unpack_mean",
        out=(out, torch.float32, count),
        scales=(scales, torch.float32, max(1, workers)),
        bits=(bits, torch.uint8, workers * bits_nbytes(count)),
    )
    native = _native(out)
    if native is None:
        unpack_mean_reference(bits, scales, out)
        return
    stride = ctypes.c_int64(bits_nbytes(count))

    def work(start: int, stop: int) -> None:
        native.call(
            "hfz_unpack_mean",
            ctypes.c_int64(stop - start),
            workers,
            address(bits, start // 8),
            stride,
            address(scales),
            address(out, start),
        )

    for_slices(count, threads, work)


def unpack_mean_reference(bits: Tensor, scales: Tensor, out: Tensor) -> None:
    """As ``unpack_mean`` in plain torch; any device."""
    places = torch.arange(8, dtype=torch.uint8, device=out.device)
    positive = (bits.view(scales.numel(), -1, 1) >> places & 1).view(scales.numel(), -1)[:, : out.numel()].bool()
    parts = [torch.where(row, scale, -scale) for row, scale in zip(positive, scales, strict=True)]
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
    out.div_(scales.numel())


def _native(tensor: Tensor) -> Library | None:
    found = library() if tensor.device.type == "cpu" else None
    if found is None:
        announce()
    return found


def _expect(name: str, **tensors: tuple[Tensor, torch.dtype, int]) -> None:
    """Raises ``HfZeroError`` for a tensor that is not of the type and size that stand beside it, or not contiguous."""
    for role, (tensor, dtype, numel) in tensors.items():
        if tensor.dtype != dtype or tensor.numel() != numel or not tensor.is_contiguous():
            raise HfZeroError(
                f"{name}: {role} is {tensor.dtype} with {tensor.numel()} elements (contiguous: {tensor.is_contiguous()}); "
                f"{dtype} with {numel}, contiguous, is expected"
            )
