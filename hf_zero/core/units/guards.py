"""Refuse forwards on sharded parameters, and reads of the values of empty parameters, with messages that name the parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_zero.core.units.marks import is_elsewhere, is_expert, is_packed, whole_shape
from hf_zero.core.units.sharded_parameter import Valueless, refusal
from hf_zero.core.units.unit import Unit, find_unit, full_shape, is_sharded
from hf_zero.errors import StateError, saved_without_values
from hf_zero.observe import logger, warn_once

# Attribute of an engine's forward hook: the module that the hook was made for. A deep copy of the module has the same hooks.
HOOKED_MODULE = "_hf_zero_module"

# Functions of integrations: the unsharded value of a parameter that this rank may save now, None if it has none. Local.
gathered_values: list[Callable[[nn.Parameter], torch.Tensor | None]] = []


def refuse_sharded(module: nn.Module, *_: Any) -> None:
    """Raise if ``module`` has a sharded parameter; the forward pre-hook of modules that belong to no engine.

    Raises:
        StateError: A parameter of the module is an empty tensor now.
    """
    for param in module._parameters.values():
        if param is not None and is_sharded(param):
            unit, index = find_unit(param)  # type: ignore[misc]
            raise StateError(
                f"{type(module).__name__} was called, but its parameter {unit.layout.slots[index].name} is divided over the ranks (ZeRO "
                "stage 3) and no engine gathers it. Call the model that accelerator.prepare(model) or initialize(model=model, ...) has "
                "prepared (a deep copy needs an engine of its own); or run it, on all ranks, inside "
                "`with hf_zero.zero.GatheredParameters(list(model.parameters())):`"
            )


def guard_unprepared(module: nn.Module) -> None:
    """Register ``refuse_sharded`` as a forward pre-hook of a module whose parameters have been sharded."""
    if refuse_sharded not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(refuse_sharded, prepend=True)


def unguard_unprepared(module: nn.Module) -> None:
    """Remove ``refuse_sharded`` from ``module`` and all modules in it, and the hooks that a deep copy took over from its original's
    engine.
    """
    for inner in module.modules():
        for hooks in (inner._forward_pre_hooks, inner._forward_hooks):
            for key, hook in list(hooks.items()):
                if hook is refuse_sharded or getattr(hook, HOOKED_MODULE, inner) is not inner:
                    del hooks[key]
                    inner._forward_pre_hooks_with_kwargs.pop(key, None)
                    inner._forward_hooks_with_kwargs.pop(key, None)
                    inner._forward_hooks_always_called.pop(key, None)


Refuse = Callable[..., None]
"""Forward pre-hook that raises ``called_before_engine``; a module-level function, so that copies of a guarded module are guarded."""


def guard(module: nn.Module, refuse: Refuse) -> None:
    """Run ``refuse`` before every forward of ``module``, and put placeholders for its missing parameters into its state dicts."""
    for inner in module.modules():
        guard_state_dict(inner)
    if refuse not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(refuse, prepend=True)


def release(module: nn.Module, refuse: Refuse) -> None:
    """Remove ``refuse``, because the module belongs to an engine now, which also guards its state dict."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is refuse:
            del module._forward_pre_hooks[key]


def called_before_engine(module: nn.Module, what: str) -> StateError:
    """Return the error for a forward of ``module``, of which this rank has loaded only ``what``."""
    return StateError(
        f"{type(module).__name__} was called directly, but this rank has loaded only {what}. Call the model that "
        "accelerator.prepare(model) or initialize(model=model, ...) has prepared, on all ranks. To keep a model unsharded (a "
        "teacher, for example), load it before the configuration is created"
    )


# Functions that move elements and compute nothing: libraries undo conversions of weights with them.
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "_reshape_alias", "reshape", "cat", "stack", "clone", "contiguous", "_to_copy", "split", "split_with_sizes",
        "chunk", "unbind", "repeat", "flip", "roll", "index_select", "index", "gather", "constant_pad_nd", "select", "slice", "detach",
        "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
    )
)  # fmt: skip


class UnsavedTensor(Valueless):
    """Placeholder of a sharded parameter in a state dict: shape, dtype and device of the unsharded parameter, no memory and no values.

    [Note: no empty file] Scripts read names, shapes and dtypes from a sharded model's state dict, and load it back; libraries search it for
    shared storages and undo weight conversions. All of this needs no values and works; moving or copying a placeholder gives another
    placeholder. Operations that need values raise: arithmetic, and writing to a file, which reads the tensor's address or its bytes. Only a
    pickle (``torch.save``) succeeds, with a warning: some scripts write it on rank 0, and then the gathered weights over it.
    Loading such a file raises, and so does the next step on all ranks unless the parameters were gathered in between; a model that does not
    train (an average, a reference) takes no steps, so the next step of any engine raises. ``load_state_dict`` accepts only the placeholder
    of the same parameter, and leaves the parameter unchanged. It refuses a copy of the placeholder, because a real copy would contain the
    values at the time of copying.
    """

    copied: UnsavedTensor | None = None  # the placeholder that this one is a copy of

    @staticmethod
    def of(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, param: nn.Parameter | None = None) -> UnsavedTensor:
        """Return the placeholder of parameter ``name``; ``param`` is the parameter itself, None for a copy."""
        tensor: UnsavedTensor = UnsavedTensor.make(name, shape, dtype, device)
        tensor.source = param
        return tensor

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> UnsavedTensor:
        """Return a placeholder like ``tensor`` of the same parameter."""
        copy = UnsavedTensor.of(self.parameter, tensor.shape, tensor.dtype, device)
        copy.copied = self if self.copied is None else self.copied
        return copy

    def refused(self, attempt: str) -> StateError:
        """Return the error for ``attempt``; the message also says that the tensor comes from a state dict."""
        return refusal(self.parameter, f"this rank's state dict has no values of it, and {attempt}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Return placeholders of the same parameter for an operation that only moves elements; raise for an operation that needs values."""
        if not (func.is_view or func._schema.name in _MOVES) or func in _SAME:
            return super().__torch_dispatch__(func, types, args, kwargs)
        first = next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, UnsavedTensor))
        options = dict(kwargs or {})
        device = torch.device(options.pop("device", None) or first.device)
        args, options = tree_map_only(torch.Tensor, _without_values, (args, options))
        result = func(*args, **options)
        return tree_map_only(torch.Tensor, lambda tensor: first._copy(tensor, device), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        source = (self if self.copied is None else self.copied).source
        owner = find_unit(source) if source is not None else None
        training = owner[0].belongs_to() if owner is not None and owner[0].belongs_to is not None else None
        if owner is None or training is None or is_expert(source) or is_elsewhere(source):
            raise self.refused("its bytes were requested")
        if not any(unit.unsaved for unit in training.units()):
            logger.warning("%s", self.refused("the script has saved it nevertheless: loading that file will raise an error"))
        owner[0].unsaved.add(owner[1])
        if not training.trains:
            _unsaved_beside.add(owner[0])
        return saved_without_values, (self.parameter, tuple(self.shape), str(self.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> UnsavedTensor:
        return self._copy(self, self.device)


_unsaved_beside: WeakSet[Unit] = WeakSet()


def unsaved_beside() -> list[Unit]:
    """Return units of engines that do not train in which the script has saved parameters without values, and not gathered them since."""
    return [unit for unit in _unsaved_beside if unit.unsaved]


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def guard_state_dict(module: nn.Module) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of the module use placeholders for its own sharded parameters.

    Where a library has gathered the values for a save (``gathered_values``), ``state_dict()`` has them instead of the placeholders.
    """
    if _put_placeholders not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_put_placeholders)
        module._register_load_state_dict_pre_hook(_KeepSharded(module._parameters))


def _is_apart(param: nn.Parameter) -> bool:
    """Return whether this rank lacks values of ``param`` now: it is sharded, an expert, or held by other pipeline stages."""
    return is_sharded(param) or is_expert(param) or is_elsewhere(param)


def _put_placeholders(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for leaf, param in module._parameters.items():
        entry = state.get(name := f"{prefix}{leaf}")
        if param is not None and isinstance(entry, torch.Tensor) and not isinstance(entry, nn.Parameter) and _is_apart(param):
            shape = (whole_shape(param) if is_expert(param) or is_elsewhere(param) else None) or full_shape(param)
            gathered = (value for find in gathered_values if (value := find(param)) is not None and value.shape == shape)
            state[name] = next(gathered, None)
            if state[name] is None:
                state[name] = UnsavedTensor.of(name, shape, param.dtype, param.device, param)
        if param is not None and is_packed(param) and is_sharded(param):
            _put_placeholders_of_scales(param, name, state)


def _put_placeholders_of_scales(param: nn.Parameter, name: str, state: dict[str, Any]) -> None:
    """Put placeholders into ``state`` for the scales of a packed weight, where the library's own entries are empty. The scales are in the
    weight's unit.
    """
    unit, index = find_unit(param)  # type: ignore[misc]
    beside = f"{unit.layout.slots[index].name}."
    for slot in unit.layout.slots:
        entry = state.get(key := f"{name}.{slot.name.removeprefix(beside)}") if slot.name.startswith(beside) else None
        if entry is not None and find_unit(entry) is None:
            state[key] = UnsavedTensor.of(key, slot.shape, entry.dtype, entry.device)


class _KeepSharded:
    """Hook before ``load_state_dict``: keep a sharded parameter unchanged when its own placeholder is loaded into it.

    The hook reads the module's dict of parameters, which a deep copy copies with it, and not the module: the layers of adapters take the
    hooks and parameters of a layer whose place they take, and torch's own hooks refuse to run after their module is garbage.

    Args:
        parameters: The module's own parameters by name.
    """

    def __init__(self, parameters: dict[str, nn.Parameter | None]) -> None:
        self._parameters = parameters

    def __call__(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put parameters in the place of their placeholders in ``state``.

        Values of a parameter of another pipeline stage are replaced too.

        Raises:
            StateError: The placeholder belongs to another parameter, or to a copy; or a value is loaded into a sharded parameter.
        """
        for leaf, param in self._parameters.items():
            entry = state.get(name := f"{prefix}{leaf}")
            if (
                param is not None
                and isinstance(entry, torch.Tensor)
                and entry.numel()
                and is_sharded(param)
                and not isinstance(entry, Valueless)
            ):
                raise StateError(
                    f"load_state_dict(): parameter {name} is divided over the ranks now (ZeRO stage 3), so this rank has no full tensor "
                    "to load into. Load inside `with hf_zero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):` on "
                    "rank 0, or use engine.load_checkpoint(), or from_pretrained()"
                )
            if param is not None and is_elsewhere(param) and isinstance(entry, torch.Tensor) and entry.shape == whole_shape(param):
                state[name] = param  # the stages that hold it load the values
                warn_once(
                    "load_state_dict() of the whole model into a pipeline: each stage loads only its own layers, so every rank must "
                    "call it with the same values; a rank that loads alone changes its own stage only"
                )
            if param is None or not isinstance(entry, Valueless):
                continue
            if entry.source is not param or not _is_apart(param):
                raise refusal(entry.parameter, f"a state dict without its values was loaded into {name}")
            state[name] = param
