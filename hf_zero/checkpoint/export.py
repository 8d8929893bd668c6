"""Whole weights from a sharded model: a plain state dict on rank 0, gathered unit by unit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hf_zero.checkpoint import agreement, folders
from hf_zero.checkpoint.tensor_file import whole, write_tensor_file
from hf_zero.comm.collectives import Collectives, build_collectives
from hf_zero.observe import warn_once
from hf_zero.sharding.slices import slice_of
from hf_zero.sharding.unit import Unit, find_unit


def consolidated_state_dict(
    module: nn.Module, collectives: Collectives, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor] | None:
    """The state dict of ``module`` with whole parameters of the training type, on the host; collective.

    At any time one unit is gathered. Every entry has a storage of its own; tied parameters share one tensor.

    Args:
        module: The user's module; its parameters may be released.
        collectives: The axis it is divided over.
        exclude_frozen_parameters: Leave out parameters that need no gradient (a PEFT base model).

    Returns:
        The dict on rank 0 (of both axes), None on every other rank.
    """
    entries = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not (exclude_frozen_parameters and _is_frozen(value))
    }
    writes = collectives.rank == 0
    model = build_collectives(collectives.topology.model) if collectives.topology.model is not None else None
    copies: dict[int, torch.Tensor] = {}
    for unit, members in _by_unit(list(entries.values())):
        with unit.gathered():
            if writes:
                copies.update({id(param): _host_copy(_joined(param, model)) for param in members})
    if not writes:
        return None
    for value in entries.values():
        if id(value) not in copies:
            copies[id(value)] = _host_copy(_joined(value, model))
    if model is not None and model.rank != 0:
        return None
    return {name: copies[id(value)] for name, value in entries.items()}


def _joined(value: torch.Tensor, model: Collectives | None) -> torch.Tensor:
    """The whole of a parameter that the ranks of the model axis hold together, on each of them; collective over that axis."""
    part = slice_of(value)
    if part is None or model is None:
        return value
    ranges = model.gather_objects([(piece.start, piece.stop) for piece in part.ranges], "slices")
    local = value.detach().contiguous()
    parts = torch.empty((model.world, *local.shape), dtype=local.dtype, device=local.device)
    model.all_gather(parts.view(-1), local.view(-1), "whole parameter").wait()
    whole = torch.empty(part.full_shape, dtype=local.dtype, device=local.device)
    for piece, pieces in zip(parts, ranges, strict=True):
        indices = torch.cat([torch.arange(start, stop, device=local.device) for start, stop in pieces])
        whole.index_copy_(part.dim, indices, piece)
    return whole


def _by_unit(values: list[torch.Tensor]) -> list[tuple[Unit, list[torch.Tensor]]]:
    """Units that hold any of ``values``, with the ones they hold, in the order they first appear: the same on every rank."""
    found: dict[int, tuple[Unit, list[torch.Tensor]]] = {}
    for value in values:
        owner = find_unit(value)
        if owner is not None:
            found.setdefault(id(owner[0]), (owner[0], []))[1].append(value)
    return list(found.values())


def _is_frozen(value: torch.Tensor) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _host_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def safetensors_name(filename: str) -> str:
    """The file name under which ``filename`` is written: never a pickle, and HF's own name in place of ``pytorch_model.bin``."""
    stem, _, ending = filename.rpartition(".")
    if ending == "safetensors":
        return filename
    if ending not in ("bin", "pt", "pth"):
        return f"{filename}.safetensors"
    return "model.safetensors" if stem == "pytorch_model" else f"{stem}.safetensors"


def write_model_file(
    module: nn.Module, collectives: Collectives, folder: Path, filename: str, exclude_frozen_parameters: bool = False
) -> Path:
    """Writes the whole weights of the training type as one safetensors file that ``from_pretrained`` reads; collective.

    A tied parameter is stored once, under the name that ``named_parameters`` gives it, as Hugging Face does.

    Args:
        module: The user's module.
        collectives: The axis it is divided over.
        folder: Made when it does not exist.
        filename: A ``.bin`` or ``.pt`` ending becomes ``.safetensors``, ``pytorch_model.bin`` becomes ``model.safetensors``.
        exclude_frozen_parameters: Leave out parameters that need no gradient.

    Returns:
        The file.

    Raises:
        CheckpointError: On every rank, when the file cannot be written.
    """
    name = safetensors_name(filename)
    if name != filename:
        warn_once(f"save_16bit_model: the weights are written as {name}, in safetensors format, not as {filename}: no pickle is written")
    weights = consolidated_state_dict(module, collectives, exclude_frozen_parameters)
    what = f"saving the model to {folder / name}"
    # The first rank of every slice is asked; the one that has the whole weights writes.
    agreement.on_first(collectives, what, lambda: _write(weights, folder, name) if weights is not None else None)
    return folder / name


def _write(weights: dict[str, torch.Tensor], folder: Path, name: str) -> None:
    once = {id(tensor): (key, tensor) for key, tensor in reversed(list(weights.items()))}  # the first name of each tensor
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{name}.part"
    hidden.unlink(missing_ok=True)
    write_tensor_file(hidden, [whole(key, tensor) for key, tensor in reversed(list(once.values()))])
    hidden.replace(folder / name)
    folders.sync_folder(folder)
