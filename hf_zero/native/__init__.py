"""Kernels over host memory: a native library with a plain C ABI, and a torch reference that serves where it is not there."""

from hf_zero.native.adagrad import adagrad_reference, adagrad_update
from hf_zero.native.adam import adam_reference, adam_update
from hf_zero.native.adam_rule import AdamRule
from hf_zero.native.convert import convert
from hf_zero.native.library import Status, status
from hf_zero.native.lion import lion_reference, lion_update
from hf_zero.native.norm import squared_norm, squared_norm_reference
from hf_zero.native.sgd import sgd_reference, sgd_update
from hf_zero.native.sign_bits import (
    add_error,
    add_error_reference,
    bits_nbytes,
    pack_signs,
    pack_signs_reference,
    unpack_mean,
    unpack_mean_reference,
)

__all__ = [
    "AdamRule",
    "Status",
    "adagrad_reference",
    "adagrad_update",
    "adam_reference",
    "adam_update",
    "add_error",
    "add_error_reference",
    "bits_nbytes",
    "convert",
    "lion_reference",
    "lion_update",
    "pack_signs",
    "pack_signs_reference",
    "sgd_reference",
    "sgd_update",
    "squared_norm",
    "squared_norm_reference",
    "status",
    "unpack_mean",
    "unpack_mean_reference",
]
