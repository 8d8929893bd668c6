"""Read checkpoint folders where Lightning expects one file: ``LightningModule.load_from_checkpoint(folder)``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_zero.checkpoint.format.names import LATEST_FILE
from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.deepspeed.served.state_files import read_client_state

AVERAGES = "hf_zero_averaged_weights"
"""Key of a checkpoint's client state under which the averages of Lightning's ``WeightAveraging`` are saved."""


def load_file(function: Callable[..., Any], path: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load the file of ``load_from_checkpoint``; local. A checkpoint folder gives what Lightning's other strategies write to a file.

    These write the averages of ``WeightAveraging`` in place of the weights.

    Returns:
        The dict of the checkpoint: Lightning's entries, and "state_dict" with the whole weights in fp32.

    Raises:
        FileNotFoundError, ValueError: The folder is no complete checkpoint, or it is damaged.
        CheckpointError: An entry is a pickle, which is not read.
    """
    if not isinstance(path, str | os.PathLike) or not os.path.isfile(os.path.join(path, LATEST_FILE)):
        return function(path, map_location, *args, **kwargs)
    entries = read_client_state(path)
    weights = get_fp32_state_dict_from_zero_checkpoint(path)
    weights |= entries.pop(AVERAGES, None) or {}
    device = _device_of(map_location)
    return entries | {"state_dict": {name: value.to(device) for name, value in weights.items()}}


def _device_of(map_location: Any) -> torch.device:
    """Return the device for tensors on the host that ``map_location`` of ``torch.load`` names."""
    if callable(map_location):
        placed = map_location(torch.empty(0).untyped_storage(), "cpu")
        return torch.device("cpu") if placed is None else placed.device  # type: ignore[no-any-return]
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    return torch.device("cpu" if map_location is None else map_location)
