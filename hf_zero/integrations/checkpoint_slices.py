"""Safetensors files of a checkpoint before anything of them is read: what is in them, and which parameter each tensor leads to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_SAFETENSORS = ".safetensors"

Sources = dict[str, list[str]]
"""Of one parameter: names in the files, by the pattern of the converter that they match; "" where they are only renamed."""


@dataclass(frozen=True)
class Load:
    """One call of ``PreTrainedModel._load_pretrained_model``.

    Attributes:
        method: That method.
        model: It has no values yet.
        state_dict: What the caller gives in place of files.
        files: The checkpoint's.
        config: How transformers is to load it.
        args: The method's further arguments.
        kwargs: Those by name.
        values: What is to be loaded, by names in the files, where somebody has left something out already; None is all that is there.
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
        """Whether an engine may divide the model, ranks are known already, and a tensor of the files is read when it is asked for."""
        config = self.config
        placed = config.is_quantized or config.device_map is not None or config.device_mesh is not None
        return self.state_dict is None and not placed and dist.is_initialized() and self._are_mapped()

    def whole(self) -> Any:
        """The call as it is."""
        return self.method(self.model, self.state_dict, self.files, self.config, *self.args, **self.kwargs)

    def open(self, stack: ExitStack) -> dict[str, Any]:
        """What is to be loaded, of which nothing has been read."""
        return open_slices(stack, self.files) if self.values is None else self.values

    def of(self, values: dict[str, Any]) -> Any:
        """The call with ``values``, by their names in the files, in place of all that is there."""
        return self.method(self.model, values, None, self.config, *self.args, **self.kwargs)

    def _are_mapped(self) -> bool:
        """Return whether transformers maps the files into memory."""
        from transformers import modeling_utils

        on_mount = getattr(modeling_utils, "_is_on_hf_mount", lambda path: False)
        named = self.files is not None and all(str(file).endswith(_SAFETENSORS) for file in self.files)
        disabled = getattr(self.config, "disable_mmap", None)  # newer than transformers 5.5
        return named and not disabled and not any(on_mount(file) for file in self.files)


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
