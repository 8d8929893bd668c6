"""State dicts of a module whose parameters are released: entries that tell their shape and refuse to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from hf_zero.errors import StateError
from hf_zero.sharding.unit import full_shape, is_released

_guarded: WeakSet[nn.Module] = WeakSet()
_ATTRIBUTES = ("shape", "dtype", "device", "requires_grad", "ndim", "is_meta", "layout", "nbytes")
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex")
_DESCRIPTIONS = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        torch.numel,
        torch.is_floating_point,
    )
)


class ReleasedValue(torch.Tensor):
    """Stands for a parameter that is released: has its shape and type, and raises when its values are asked for.

    [Note: state dicts of released parameters] ``model.save_pretrained(folder)`` or ``torch.save(model.state_dict())`` at stage 3 would
    write files of empty tensors that nobody notices before they are loaded. Gathering here is no way out: scripts call these on rank 0
    alone. So the dict has its keys and shapes, which is what libraries look at, and reading an entry says what to call instead.
    """

    _hf_zero_name: str

    @staticmethod
    def of(name: str, param: torch.Tensor) -> ReleasedValue:
        """The stand-in for ``param``."""
        value: ReleasedValue = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            ReleasedValue, full_shape(param), dtype=param.dtype, device=param.device
        )
        value._hf_zero_name = name
        return value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.detach:
            return args[0]
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise StateError(_advice(args))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise StateError(_advice(args))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedValue({self._hf_zero_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(_advice((self,)))


def _advice(args: tuple[Any, ...]) -> str:
    name = next((arg._hf_zero_name for arg in args if isinstance(arg, ReleasedValue)), "a parameter")
    return (
        f"state_dict() of a model sharded at stage 3: {name} is not whole on any rank, so it cannot be saved or copied from there. On all "
        "ranks call accelerator.get_state_dict(model) and give the result to save_pretrained(state_dict=...), or trainer.save_model(), "
        "or engine.save_16bit_model(folder), or take the state dict inside GatheredParameters(model.parameters())"
    )


def guard_state_dicts(module: nn.Module) -> None:
    """Lets the state dicts of ``module`` and its submodules hold ``ReleasedValue`` for what is released when they are made."""
    for inner in module.modules():
        if inner._parameters and inner not in _guarded:
            _guarded.add(inner)
            inner.register_state_dict_post_hook(_replace_released)


def _replace_released(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, param in module._parameters.items():
        key = prefix + name
        # With keep_vars the entry is the parameter itself, for callers who gather it.
        if param is not None and key in state and state[key] is not param and is_released(param):
            state[key] = ReleasedValue.of(key, param)
