"""The format of a checkpoint folder: its version and the names of its files. ``docs/checkpoint-format.md`` describes it byte for byte."""

from __future__ import annotations

import re

from hf_zero.errors import CheckpointError

FORMAT = "hf_zero-checkpoint"
VERSION = 1

INDEX_FILE = "index.json"
MARKER_FILE = "complete"  # sha256 of the index in hex; written last inside the folder
LATEST_FILE = "latest"
VALUES_FILE = "values.safetensors"  # tensors of rank 0's client state, of the scheduler and of the param groups
CONVERTED = "convert"  # in place of a version of hf_zero: `hf-zero convert` wrote it
MODULE = "module"  # kind of the files with what no unit holds
PARAM_STATES = "optimizer_params"  # kind of the files with optimizer states of whole parameters

# One checksum covers this many bytes: a rank that reads a range verifies it by reading at most one chunk too much at each end.
CHUNK_BYTES = 1 << 16

MASTER = "master"
WEIGHTS = "weights"
STATE_PREFIX = "optimizer."
AVERAGE = re.compile(r"average\.[A-Za-z0-9_]{1,64}")  # kinds of files with averages of units
AVERAGE_TENSORS = re.compile(r"average_tensors\.[A-Za-z0-9_]{1,64}")  # kinds of files with the rest of averages
_STATE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


def state_kind(state: str) -> str:
    """The kind of file that holds the optimizer state ``state``.

    Raises:
        CheckpointError: The name cannot be part of a file name.
    """
    if not _STATE_NAME.fullmatch(state):
        raise CheckpointError(f"the optimizer state {state!r} cannot be saved: its name must be letters, digits and underscores")
    return STATE_PREFIX + state


def average_kind(name: str) -> str:
    """The kind of file that holds the averages ``name`` of units."""
    return f"average.{name}"


def average_tensors_kind(name: str) -> str:
    """The kind of file that holds the rest of the averages ``name``: buffers, parameters without unit, counts."""
    return f"average_tensors.{name}"


def shard_file(kind: str, rank: int, world: int, tensor_rank: int = 0, tensor_world: int = 1) -> str:
    """Name of the file with shard ``rank`` of ``world`` of every unit, of one of ``tensor_world`` tensor-parallel ranks."""
    part = f".tensor-{tensor_rank:05d}-of-{tensor_world:05d}" if tensor_world > 1 else ""
    return f"{kind}-{rank:05d}-of-{world:05d}{part}.safetensors"


def values_file(rank: int) -> str:
    """Name of the file with the tensors of ``rank``'s client state."""
    return VALUES_FILE if rank == 0 else f"values-{rank:05d}.safetensors"
