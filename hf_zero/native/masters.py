"""Find values that a script has changed, and copy them into fp32 masters: on a GPU one pass with Triton, elsewhere torch's operations.

An engine does this before each step for all its parameters, so the bytes count: 6 per element with Triton (a master is read, and written
only where it changes), more than 20 with torch's operations, which write three temporary tensors.
"""

from __future__ import annotations

import ctypes

import torch

from hf_zero.native.library import triton_serves

_BLOCK = 2048

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors of one dtype, shape and device have the same bits; on a device the host waits for the result.

    On a host this takes as long as reading both tensors: a fifth of the time of ``torch.equal`` on their bytes.
    """
    if one.device.type != "cpu":
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return not one.numel() or _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0


def take_changed(master: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy to ``master`` the elements of ``shard`` that differ from the master's value after a cast to the shard's dtype.

    Equal elements keep their fp32 bits. Zeros of both signs are equal; NaN differs from NaN.

    Args:
        master: float32 values (numel,), contiguous.
        shard: Values (numel,) of a narrower dtype, contiguous, on the same device.
    """
    fits = master.dtype == torch.float32 and shard.dtype in (torch.bfloat16, torch.float16)
    if fits and master.is_contiguous() and shard.is_contiguous() and serves(master.device):
        _with_triton(master, shard)
    else:
        _with_torch(master, shard)


def serves(device: torch.device) -> bool:
    """Return whether Triton's kernel can be used for tensors on ``device``; see [Note: trying a kernel first]."""
    return triton_serves(device, "values written by the script", agrees)


def agrees(device: torch.device) -> bool:
    """Return whether the kernel gives the bits of torch's operations on ``device``.

    Raises:
        Exception: Any error of Triton on a device where it does not work.
    """
    for dtype in (torch.float16, *((torch.bfloat16,) if device.type != "cpu" else ())):  # the interpreter truncates
        master = torch.linspace(-3, 3, _BLOCK + 16, device=device).pow_(3)
        master[3], master[5] = 0.0, torch.nan
        shard = master.to(dtype)
        shard[::7] = 0.25
        shard[3] = -0.0
        expected = master.clone()
        _with_triton(master, shard)
        _with_torch(expected, shard)
        if not torch.equal(master.view(torch.int32), expected.view(torch.int32)):
            return False
    return True


def _with_triton(master: torch.Tensor, shard: torch.Tensor) -> None:
    from hf_zero.native.triton_kernels import take_changed as kernel  # only here: without Triton it cannot be imported

    count = master.numel()
    if count:
        with torch.cuda.device_of(master):  # Triton launches on the present device
            kernel[(-(-count // _BLOCK),)](master, shard, count, BLOCK=_BLOCK)


def _with_torch(master: torch.Tensor, shard: torch.Tensor) -> None:
    torch.where(master.to(shard.dtype) == shard, master, shard, out=master)
