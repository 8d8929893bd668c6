"""Safetensors files of a checkpoint before anything of them is read: what is in them, and which parameter each tensor leads to."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

_SAFETENSORS = ".safetensors"

Sources = dict[str, list[str]]
"""Of one parameter: names in the files, by the pattern of the converter that they match; "" where they are only renamed."""


def divided_later(load_config: Any) -> bool:
    """Whether an engine may divide the model that is being loaded, and ranks are known already."""
    placed = load_config.is_quantized or load_config.device_map is not None or load_config.device_mesh is not None
    return not placed and dist.is_initialized()


def are_mapped(files: Any, load_config: Any) -> bool:
    """Whether transformers maps ``files`` into memory, where a slice is read when it is asked for."""
    from transformers import modeling_utils

    on_mount = getattr(modeling_utils, "_is_on_hf_mount", lambda path: False)
    named = files is not None and all(str(file).endswith(_SAFETENSORS) for file in files)
    return named and not load_config.disable_mmap and not any(on_mount(file) for file in files)


def open_slices(stack: ExitStack, files: Iterable[Any]) -> dict[str, Any]:
    """Slices of every tensor in the files, of which nothing has been read."""
    from safetensors import safe_open

    found = {}
    for file in files:
        opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        found.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118  # not a dict
    return found


def converters_of(load_config: Any) -> dict[str, Any]:
    """Those of transformers that compute something, by the patterns of what they take."""
    from transformers.core_model_loading import WeightConverter

    found = [entry for entry in load_config.weight_mapping or () if isinstance(entry, WeightConverter)]
    return {pattern: converter for converter in found for pattern in converter.source_patterns}


def sources_of(model: Any, slices: dict[str, Any], load_config: Any) -> dict[str, Sources]:
    """Parameter -> what the files have for it, in the order in which transformers takes it."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = load_config.weight_mapping or ()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, known = model.base_model_prefix, model.state_dict()
    found: dict[str, Sources] = {}
    for key in sorted(slices, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=known)
        if name in known:
            found.setdefault(name, {}).setdefault(pattern or "", []).append(key)
    return found
