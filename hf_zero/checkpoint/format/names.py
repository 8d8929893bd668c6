"""Name the parts of a checkpoint folder: format version, file names, and element types as safetensors spells them.

``docs/checkpoint-format.md`` describes the format byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch

from hf_zero.errors import CheckpointError

FORMAT = "hf_zero-checkpoint"
VERSION = 1

INDEX_FILE = "index.json"
MARKER_FILE = "complete"  # sha256 of the index in hex; written last inside the folder
LATEST_FILE = "latest"
LATEST_UNIVERSAL_FILE = "latest_universal"  # beside what `ds_to_universal` wrote
VALUES_FILE = "values.safetensors"  # tensors of rank 0's client state, of the scheduler and of the param groups
CONVERTED = "convert"  # stands in the index instead of a version of hf_zero if `hf-zero convert` wrote the checkpoint
MODULE = "module"  # kind of the files with parameters and buffers outside of units
PARAM_STATES = "optimizer_params"  # kind of the files with optimizer states of whole parameters

# Bytes per checksum. To verify a range, a rank reads at most one chunk more at each end.
CHUNK_BYTES = 1 << 16

MASTER = "master"
WEIGHTS = "weights"
STATE_PREFIX = "optimizer."
AVERAGE = re.compile(r"average\.[A-Za-z0-9_]{1,64}")  # kinds of files with averages of units
AVERAGE_TENSORS = re.compile(r"average_tensors\.[A-Za-z0-9_]{1,64}")  # kinds of files with averages outside of units
_STATE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


def state_kind(state: str) -> str:
    """Return the kind of file that holds the optimizer state ``state``.

    Raises:
        CheckpointError: The name contains characters other than letters, digits and underscores.
    """
    if not _STATE_NAME.fullmatch(state):
        raise CheckpointError(f"the optimizer state {state!r} cannot be saved: its name must be letters, digits and underscores")
    return STATE_PREFIX + state


def average_kind(name: str) -> str:
    """Return the kind of file that holds the averages called ``name`` of units."""
    return f"average.{name}"


def average_tensors_kind(name: str) -> str:
    """Return the kind of file that holds the averages called ``name`` of buffers and of parameters outside of units, and their counts."""
    return f"average_tensors.{name}"


def shard_file(kind: str, rank: int, world: int, tensor_rank: int = 0, tensor_world: int = 1) -> str:
    """Return the name of the file with the shards of ``rank`` among ``world`` ranks, for tensor-parallel rank ``tensor_rank``."""
    part = f".tensor-{tensor_rank:05d}-of-{tensor_world:05d}" if tensor_world > 1 else ""
    return f"{kind}-{rank:05d}-of-{world:05d}{part}.safetensors"


def values_file(rank: int) -> str:
    """Return the name of the file with the tensors of ``rank``'s client state."""
    return VALUES_FILE if rank == 0 else f"values-{rank:05d}.safetensors"


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


def refuse_sparse(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for sparse tensors, which safetensors files cannot hold.

    Raises:
        CheckpointError: There are some; the message names them.
    """
    if sparse := [name for name, tensor in tensors.items() if tensor.layout != torch.strided]:
        raise CheckpointError(
            f"{', '.join(sparse[:3])}: safetensors files cannot hold sparse tensors. Register such buffers with persistent=False and build "
            "them in the constructor, or keep indices and values in dense buffers"
        )


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Return the name of ``dtype`` in safetensors files.

    Raises:
        CheckpointError: safetensors does not support the dtype; the message names ``what``.
    """
    if dtype not in NAMES:
        raise CheckpointError(f"{what} has dtype {dtype}, which safetensors cannot hold; allowed are {sorted(DTYPES)}")
    return NAMES[dtype]
