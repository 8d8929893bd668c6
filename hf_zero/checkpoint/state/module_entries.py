"""Entries that modules add to their own state dicts, and modules that load in their own way (metrics, observers of quantization).

[Note: entries of modules] A module may override ``_save_to_state_dict`` and ``_load_from_state_dict`` or register hooks of the state dict.
What it adds beside parameters, buffers and extra state is saved as a value under its name in the state dict. At a load such a module
receives its buffers and entries as from ``load_state_dict``, so it may give a buffer another shape. Parameters are never among them,
because they may be sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.core.schedule.torch_internals import is_compiled_wrapper
from hf_zero.core.units.marks import is_of_library, is_wrapped
from hf_zero.core.units.names import bare_name, named_buffers, named_params, saved_name
from hf_zero.core.units.sharded_parameter import Valueless
from hf_zero.errors import CheckpointError, StateError
from hf_zero.observe import warn_once

_PLAIN = ("torch.nn.", "torch.distributed.algorithms._checkpoint.", "hf_zero.")  # these convert former versions and names


def entries_of(model: nn.Module) -> dict[str, Any]:
    """Return entries of modules' state dicts other than parameters, buffers and extra state, by name in the state dict. Local.

    An entry whose value is a view of a parameter is left out. A module whose state dict cannot be made gets a warning.
    """
    modules = {name: module for name, module in model.named_modules() if _saves_itself(module) and not _is_packed(module)}
    if not modules:
        return {}
    stored = {name for named in (named_params, _persistent_buffers) for name, _ in named(model)}
    stored |= {saved_name(f"{name}._extra_state".lstrip(".")) for name, _ in model.named_modules()}
    tensors = [tensor for named in (named_params, _persistent_buffers) for _, tensor in named(model)]
    held = _Held(set(map(id, tensors)), {param.untyped_storage().data_ptr() for param in model.parameters()} - {0})
    packed = tuple(f"{saved_name(name)}." for name, module in model.named_modules() if name and _is_packed(module))
    found: dict[str, Any] = {}
    for name, module in modules.items():
        try:
            # The model's own is called as scripts call it: one that joins the state dicts of parts gives them prefixes itself.
            own = module.state_dict(**({"prefix": f"{saved_name(name)}."} if name else {}), keep_vars=True)
        except Exception as error:  # any that a module's own code raises
            whose = f"module {name}" if name else "the model"
            warn_once(
                f"the state dict of {whose} cannot be made without its parameters ({type(error).__name__}: {error}): its entries other "
                "than parameters and buffers are not saved. Keep them in buffers, or in get_extra_state()"
            )
            continue
        kept = {key: value for key, value in own.items() if key not in stored and not key.startswith(packed)}
        found |= {key: value for key, value in kept.items() if value not in held}
    return found


def savers(model: nn.Module) -> set[str]:
    """Return the names in a state dict of the modules whose state rank 0 saves beside their buffers."""
    named = model.named_modules()
    return {saved_name(name) for name, module in named if _saves_itself(module) or has_extra_state(module)}


def has_extra_state(module: nn.Module) -> bool:
    """Return whether ``module`` keeps state of its own kind (``get_extra_state``)."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def own_loaders(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules, by name in a state dict, that load in their own way, without modules inside them."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        name = saved_name(path)
        inside = any(not outer or name.startswith(f"{outer}.") or name == outer for outer in found)
        if not inside and _loads_itself(module) and not _is_packed(module):
            found[name] = module
    return found


def load_own(name: str, module: nn.Module, values: Mapping[str, Any], known: set[str], strict: bool) -> None:
    """Hand ``values`` to ``module`` and the modules inside it, as ``load_state_dict`` does; local.

    Args:
        name: Name of the module in a state dict.
        module: A module that loads in its own way.
        values: Buffers and entries by name in a state dict.
        known: Names of the parameters and buffers of the model.
        strict: Raise when the module finds an entry missing; else warn.

    Raises:
        CheckpointError: The module refuses a value, or lacks an entry.
    """
    missing: list[str] = []
    refused: list[str] = []

    def load(part: nn.Module, given: dict[str, Any], prefix: str) -> None:
        if is_compiled_wrapper(part):
            load(part._orig_mod, given, prefix)  # type: ignore[arg-type]
            return
        metadata = {} if getattr(part, "_version", None) is None else {"version": part._version}
        try:
            part._load_from_state_dict(given, prefix, metadata, True, missing, [], refused)
        except Exception as error:  # any that a module's own code raises
            key = bare_name(str(error.args[0])) if isinstance(error, KeyError) and error.args else ""
            if strict and key not in known and not isinstance(error, StateError):
                raise CheckpointError(f"module {prefix.rstrip('.') or 'the model'} cannot load its state: {_shown(error)}") from error
            warn_once(
                f"module {prefix.rstrip('.') or 'the model'} cannot load its state in its own way ({_shown(error)}): its parameters and "
                "buffers are loaded by their names; other entries of its state dict are not loaded"
            )
        for child, inner in part._modules.items():
            if inner is not None:
                start = f"{prefix}{child}."
                load(inner, {key: value for key, value in given.items() if key.startswith(start)}, start)

    start = f"{name}." if name else ""
    load(module, {key: value for key, value in values.items() if key.startswith(start)}, start)
    lacking = sorted({bare_name(key) for key in missing} - known) if strict else []
    refused += [f"the checkpoint lacks {key}" for key in lacking if not key.endswith("_extra_state")]
    if refused:
        raise CheckpointError(f"module {name or 'the model'} cannot load its state: {'; '.join(refused)}")


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return named_buffers(model, persistent=True)


def _is_plain(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_PLAIN)


def _saves_itself(module: nn.Module) -> bool:
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return not all(_is_plain(one) for one in (type(module).state_dict, module._save_to_state_dict, *hooks))


def _loads_itself(module: nn.Module) -> bool:
    return not all(map(_is_plain, (module._load_from_state_dict, *module._load_state_dict_pre_hooks.values())))


def _is_packed(module: nn.Module) -> bool:
    """Return whether a library packs a parameter of ``module``; it then overrides methods of the state dict to store the packed bytes."""
    inner = module._modules.get("parametrizations")
    params = (*module.parameters(recurse=False), *(inner.parameters() if inner is not None else ()))
    return any(is_of_library(param) or is_wrapped(param) for param in params)


@dataclass(frozen=True)
class _Held:
    """Parameters and persistent buffers of a model, which are saved under their own names.

    Attributes:
        tensors: Their ids.
        storages: Addresses of the storages of parameters.
    """

    tensors: set[int]
    storages: set[int]

    def __contains__(self, value: Any) -> bool:
        """Return whether ``value`` is such a parameter or buffer, a placeholder of a sharded parameter, or a view of a parameter."""
        if not isinstance(value, torch.Tensor):
            return False
        return isinstance(value, Valueless) or id(value) in self.tensors or value.untyped_storage().data_ptr() in self.storages
