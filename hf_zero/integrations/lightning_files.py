"""Read checkpoint folders where Lightning expects one file, and one file of another strategy where it expects a folder.

``LightningModule.load_from_checkpoint`` reads a folder; a strategy with ``load_full_weights=True`` reads both, at every stage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_zero.checkpoint.format.names import LATEST_FILE
from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.deepspeed.requests import load_module_state_dict
from hf_zero.deepspeed.served.state_files import read_client_state

AVERAGES = "hf_zero_averaged_weights"
"""Key of a checkpoint's client state under which the averages of Lightning's ``WeightAveraging`` are saved."""


def load_file(function: Callable[..., Any], path_or_url: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load the file of ``load_from_checkpoint``; local. A checkpoint folder gives what Lightning's other strategies write to a file.

    These write the averages of ``WeightAveraging`` in place of the weights.

    Returns:
        The dict of the checkpoint: Lightning's entries, and "state_dict" with the whole weights in fp32.

    Raises:
        FileNotFoundError, ValueError: The folder is no complete checkpoint, or it is damaged.
        CheckpointError: An entry is a pickle, which is not read.
    """
    if not isinstance(path_or_url, str | os.PathLike) or not os.path.isfile(os.path.join(path_or_url, LATEST_FILE)):
        return function(path_or_url, map_location, *args, **kwargs)
    entries = read_client_state(path_or_url)
    weights = get_fp32_state_dict_from_zero_checkpoint(path_or_url)
    weights |= entries.pop(AVERAGES, None) or {}
    device = _device_of(map_location)
    return entries | {"state_dict": {name: value.to(device) for name, value in weights.items()}}


def opens_file(strategy: Any, path: Any) -> tuple[Any, bool]:
    """Return rank 0's ``path``, and whether ``strategy`` loads it as one file: with ``load_full_weights`` what is no folder; collective."""
    if not strategy.load_full_weights:
        return path, False
    path, folder = strategy.broadcast((path, os.path.isdir(path)))
    return path, not folder


@contextmanager
def as_folder(strategy: Any) -> Iterator[None]:
    """Let Lightning's methods load the engine's own folder inside the context, whatever ``load_full_weights`` says."""
    whole, strategy.load_full_weights = strategy.load_full_weights, False
    try:
        yield
    finally:
        strategy.load_full_weights = whole


def of_one_file(strategy: Any) -> Callable[..., Any]:
    """Return the ``load_checkpoint`` of Lightning's strategies that read one file."""
    base: Any = next(kind for kind in type(strategy).__mro__ if kind.__name__ == "Strategy")
    return base.load_checkpoint  # type: ignore[no-any-return]


def load_weights(function: Callable[..., None], strategy: Any, checkpoint: Any, strict: bool = True) -> None:
    """Load the weights of one file that another strategy wrote, by ``load_state_dict`` on every rank; collective.

    Lightning's method has effect at stage 3 only. There it loads buffers on rank 0 alone, and says nothing of parameters that are missing
    or have another shape. A folder is loaded already.

    Raises:
        RuntimeError: Names or shapes do not match, as in ``load_state_dict``.
    """
    engine = strategy.model
    if not isinstance(engine, ConfiguredEngine):
        function(strategy, checkpoint, strict)
    elif getattr(strategy, "_hf_zero_file", False):
        load_module_state_dict(engine, checkpoint["state_dict"], strict)


def _device_of(map_location: Any) -> torch.device:
    """Return the device for tensors on the host that ``map_location`` of ``torch.load`` names."""
    if callable(map_location):
        placed = map_location(torch.empty(0).untyped_storage(), "cpu")
        return torch.device("cpu") if placed is None else placed.device  # type: ignore[no-any-return]
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    return torch.device("cpu" if map_location is None else map_location)
