"""Copies of flat ranges of host memory by several threads."""

from __future__ import annotations

import ctypes

from torch import Tensor

from hf_zero.errors import HfZeroError
from hf_zero.native.library import library
from hf_zero.native.passes import address


def copy(target: Tensor, source: Tensor, *, threads: int = 1) -> None:
    """Writes ``source`` to ``target``, bit for bit; versions of ``target`` are not counted up.

    Args:
        target: In host memory, contiguous, of the size and type of ``source``.
        source: In host memory, contiguous. Other Python threads run meanwhile.
        threads: The most threads to use.

    Raises:
        HfZeroError: The two do not fit.
    """
    fits = source.dtype == target.dtype and source.numel() == target.numel() and source.is_contiguous() and target.is_contiguous()
    if not fits or {source.device.type, target.device.type} != {"cpu"}:
        raise HfZeroError(
            f"copy: target is {target.dtype}, {target.numel()} elements on {target.device}, source {source.dtype}, {source.numel()} on "
            f"{source.device}; both must be alike, contiguous and in host memory"
        )
    native = library()
    if native is None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        native.handle.hfz_threaded_copy(ctypes.c_int32(threads), ctypes.c_int64(source.nbytes), address(target), address(source))
