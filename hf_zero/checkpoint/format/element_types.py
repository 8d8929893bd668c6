"""Element types under their names in safetensors."""

from __future__ import annotations

from typing import Final

import torch

from hf_zero.errors import CheckpointError

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}
ITEM_BYTES: Final[dict[str, int]] = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The name of ``dtype`` in a file.

    Raises:
        CheckpointError: safetensors has no such type; names ``what``.
    """
    if dtype not in NAMES:
        raise CheckpointError(f"{what} has element type {dtype}, which safetensors cannot hold; allowed are {sorted(DTYPES)}")
    return NAMES[dtype]
