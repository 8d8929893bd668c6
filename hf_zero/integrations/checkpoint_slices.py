"""List the tensors in the safetensors files of a checkpoint without reading their values, and map each tensor to its parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_SAFETENSORS = ".safetensors"

Sources = dict[str, list[str]]
"""Names of tensors in the files that make up one parameter, grouped by converter pattern; key "" for tensors that are only renamed."""


@dataclass(frozen=True)
class Load:
    """One call of ``PreTrainedModel._load_pretrained_model``.

    Attributes:
        method: The original method of transformers.
        model: Model to load into; its parameters have no values yet.
        state_dict: State dict that the caller passes instead of files, or None.
        files: Paths of the checkpoint's files.
        config: The ``LoadStateDictConfig`` of transformers.
        args: Further positional arguments of the method.
        kwargs: Further keyword arguments of the method.
        values: Tensors to load, by their names in the files, after some were left out; None for all tensors in the files.
    """

    method: Callable[..., Any]
    model: Any
    state_dict: Any
    files: Any
    config: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: dict[str, Any] | None = None

    @property
    def may_be_parted(self) -> bool:
        """Return whether this rank can read a part: an engine may divide the model, ranks exist, and the files are memory-mapped."""
        config = self.config
        placed = config.is_quantized or config.device_map is not None or config.device_mesh is not None
        return self.state_dict is None and not placed and dist.is_initialized() and self._are_mapped()

    def whole(self) -> Any:
        """Run the original call, which loads everything."""
        return self.method(self.model, self.state_dict, self.files, self.config, *self.args, **self.kwargs)

    def open(self, stack: ExitStack) -> dict[str, Any]:
        """Return the tensors to load as slices by name in the files; opens the files in ``stack`` and reads no values."""
        return open_slices(stack, self.files) if self.values is None else self.values

    def of(self, values: dict[str, Any]) -> Any:
        """Run the original call for the tensors ``values`` only, given by their names in the files."""
        return self.method(self.model, values, None, self.config, *self.args, **self.kwargs)

    def _are_mapped(self) -> bool:
        """Return whether transformers maps the files into memory."""
        from transformers import modeling_utils

        on_mount = getattr(modeling_utils, "_is_on_hf_mount", lambda path: False)
        named = self.files is not None and all(str(file).endswith(_SAFETENSORS) for file in self.files)
        disabled = getattr(self.config, "disable_mmap", None)  # newer than transformers 5.5
        return named and not disabled and not any(on_mount(file) for file in self.files)


def open_slices(stack: ExitStack, files: Iterable[Any]) -> dict[str, Any]:
    """Return a slice object for every tensor in the files, by name; opens the files in ``stack`` and reads no values."""
    from safetensors import safe_open

    found = {}
    for file in files:
        opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        found.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118  # not a dict
    return found


def converters_of(load_config: Any) -> dict[str, Any]:
    """Return the weight converters of transformers (not its renamings), by the patterns of the names that they take."""
    from transformers.core_model_loading import WeightConverter

    found = [entry for entry in load_config.weight_mapping or () if isinstance(entry, WeightConverter)]
    return {pattern: converter for converter in found for pattern in converter.source_patterns}


def sources_of(model: Any, slices: dict[str, Any], load_config: Any) -> dict[str, Sources]:
    """Return the sources of each parameter in the files, by its name in the model, in the order in which transformers reads them."""
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
