"""Kernels over host memory: a native library with a plain C ABI, and a torch reference that serves where it is not there."""

from hf_zero.native.adagrad import adagrad_reference, adagrad_update
from hf_zero.native.adam import AdamRule, adam_reference, adam_update
from hf_zero.native.convert import convert
from hf_zero.native.library import Status, status
from hf_zero.native.lion import lion_reference, lion_update
from hf_zero.native.norm import squared_norm, squared_norm_reference
from hf_zero.native.sgd import sgd_reference, sgd_update

__all__ = [
    "AdamRule",
    "Status",
    "adagrad_reference",
    "adagrad_update",
    "adam_reference",
    "adam_update",
    "convert",
    "lion_reference",
    "lion_update",
    "sgd_reference",
    "sgd_update",
    "squared_norm",
    "squared_norm_reference",
    "status",
]
