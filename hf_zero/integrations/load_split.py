"""``from_pretrained`` for a model that is split: each rank reads its slices from the safetensors files and never holds more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import build_collectives
from hf_zero.comm.topology import build_topology
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.sharding.slices import mark_slice
from hf_zero.tensor_parallel.apply import param_slice
from hf_zero.tensor_parallel.plan import SplitParameter, TpPlan
from hf_zero.tensor_parallel.split import split_model

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def tp_from_pretrained(
    model_class: Any, name: str, tp_size: int, dtype: torch.dtype | None = None, plan: TpPlan | None = None
) -> nn.Module:
    """Builds a model of a saved one, split over groups of ``tp_size`` adjacent ranks; collective.

    The model is constructed without values, the plan is made, and every rank reads the ranges of its slices. Peak memory is the
    slices (and one whole parameter while the model is constructed).

    Args:
        model_class: A class of transformers, ``AutoModelForCausalLM`` and the like included.
        name: Folder with ``config.json`` and safetensors files, or an ID on the Hub.
        tp_size: Ranks that hold one model together.
        dtype: Type of the parameters; None takes that of the files.
        plan: What to follow; None makes one.

    Raises:
        ConfigError: The folder has no safetensors files, or the model does not divide.
        UnsupportedError: The files name parameters otherwise than the model, so that transformers would have to convert them.
    """
    from transformers import AutoConfig

    folder = Path(name) if Path(name).is_dir() else _download(name)
    config = AutoConfig.from_pretrained(folder)
    with _empty_parameters():
        builder = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
        model: nn.Module = builder(config)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]  # ``init_empty_weights`` has untied what the constructor tied
    files = _files(folder)
    topology = build_topology(model_parallel=tp_size)
    rank = topology.model.rank if topology.model is not None else 0

    def fill(plan: TpPlan | None) -> None:
        _fill(model, files, plan, rank, dtype)

    if topology.model is None:
        fill(None)
        return model
    split_model(model, {}, topology, plan, fill)
    build_collectives(topology.model).any_rank(False, "loaded")
    return model.eval()


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))


@contextmanager
def _empty_parameters() -> Iterator[None]:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        yield


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        names = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / file for key, file in names.items()}
    if not (folder / _SINGLE).is_file():
        raise ConfigError(f"{folder} has neither {_SINGLE} nor {_INDEX}; save the model with save_pretrained()")
    with safe_open(folder / _SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _SINGLE)


def _fill(model: nn.Module, files: dict[str, Path], plan: TpPlan | None, rank: int, dtype: torch.dtype | None) -> None:
    aliases: dict[int, list[str]] = {}
    for alias, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(alias)
    prefix = getattr(model, "base_model_prefix", "")
    for name, param in list(model.named_parameters()):
        known = aliases[id(param)]
        spellings = [*known, *(f"{prefix}.{alias}" for alias in known), *(alias.removeprefix(f"{prefix}.") for alias in known)]
        stored = next((key for key in spellings if key in files), None)
        if stored is None:
            raise UnsupportedError(
                f"the files hold no {name}: transformers converts this checkpoint while loading. Load it with from_pretrained() and let "
                "initialize() split it"
            )
        entry = plan.parameters.get(name) if plan is not None else None
        values = _read(files[stored], stored, entry, rank, tuple(param.shape))
        filled = nn.Parameter(values.to(dtype) if dtype is not None else values, param.requires_grad)
        if entry is not None:
            mark_slice(filled, param_slice(entry, rank))
        for alias in known:
            holder, _, leaf = alias.rpartition(".")
            model.get_submodule(holder)._parameters[leaf] = filled


def _read(path: Path, key: str, entry: SplitParameter | None, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stored = file.get_slice(key)
        if tuple(stored.get_shape()) != shape:
            raise ConfigError(f"{path}: {key} has shape {tuple(stored.get_shape())}, the model's configuration says {shape}")
        if entry is None:
            return file.get_tensor(key)
        before = (slice(None),) * entry.dim
        wanted = [(*before, slice(start, stop)) for start, stop in entry.ranges[rank]]
        parts = [stored[where] for where in wanted]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, dim=entry.dim)
