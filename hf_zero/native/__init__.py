"""Kernels over CPU tensors: a native library with a plain C ABI, and a torch reference that serves where it is not there."""

from hf_zero.native.adam import adam_reference, adam_update
from hf_zero.native.library import Status, status

__all__ = ["Status", "adam_reference", "adam_update", "status"]
