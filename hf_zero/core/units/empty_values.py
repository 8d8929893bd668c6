"""What a state dict holds of a sharded parameter: its shape, type and device, and no values that a file could be made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_zero.core.units.packed import is_packed
from hf_zero.core.units.tp_shard import is_elsewhere, is_expert, whole_shape
from hf_zero.core.units.unit import find_unit, full_shape, is_sharded
from hf_zero.errors import StateError


def refusal(name: str) -> StateError:
    """The error for an attempt to read or write the values of the sharded parameter ``name``."""
    return StateError(
        f"parameter {name} is divided over the ranks (ZeRO stage 3, experts, a pipeline): this rank's state dict has no values of it, and "
        "a file would be empty. Save with save_model(folder) of the class that trains; or, called by all ranks, "
        "engine.save_16bit_model(folder) or model.save_pretrained(folder, state_dict=accelerator.get_state_dict(engine), "
        "is_main_process=accelerator.is_main_process); or inside `with hf_zero.zero.GatheredParameters(model.parameters()):`, entered by "
        "all ranks (not for experts and pipelines)"
    )


class UnsavedTensor(torch.Tensor):
    """Stands for a sharded parameter in a state dict: shape, dtype and device of the whole one, no memory and no values.

    [Note: no empty file] Scripts look at names, shapes and dtypes of a sharded model's state dict, copy it, and load it back; libraries
    search it for shared storages and undo weight conversions. All that needs no values and works; what is computed from a
    stand-in is one too. What needs them raises: whatever puts a tensor into a file asks for its address, its bytes or its pickle.

    Attributes:
        parameter: Name of the parameter it stands for.
    """

    parameter: str
    _own_storage: torch.UntypedStorage
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> UnsavedTensor:
        """The stand-in for parameter ``name``."""
        tensor: UnsavedTensor = torch.Tensor._make_wrapper_subclass(UnsavedTensor, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        tensor.parameter = name
        tensor._own_storage = torch.UntypedStorage(1)  # so that no search takes two stand-ins for tied weights
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Computes the shape and dtype of the result, which stands for the same parameter."""
        first = next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, UnsavedTensor))
        options = dict(kwargs or {})
        device = torch.device(options.pop("device", None) or first.device)
        copies_out = func._schema.is_mutable and not isinstance(args[0], UnsavedTensor)
        if copies_out or func is torch.ops.aten._local_scalar_dense.default:
            raise refusal(first.parameter)
        args, options = tree_map_only(torch.Tensor, _without_values, (args, options))
        try:
            result = func(*args, **options)
        except NotImplementedError as error:
            raise refusal(first.parameter) from error
        if isinstance(result, (bool, int, float)):
            raise refusal(first.parameter)  # torch.equal
        return tree_map_only(torch.Tensor, lambda tensor: UnsavedTensor.of(first.parameter, tensor.shape, tensor.dtype, device), result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnsavedTensor({self.parameter}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> UnsavedTensor:
        return UnsavedTensor.of(self.parameter, self.shape, self.dtype, self.device)

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage that no other tensor has."""
        return self._own_storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal(self.parameter)

    def data_ptr(self) -> int:
        """Refused: the bytes are wanted."""
        raise refusal(self.parameter)

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: the values are wanted."""
        raise refusal(self.parameter)

    def tolist(self) -> Any:
        """Refused: the values are wanted."""
        raise refusal(self.parameter)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise refusal(self.parameter)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def guard_state_dict(module: nn.Module) -> None:
    """Lets ``state_dict()`` and ``load_state_dict()`` know stand-ins for the module's own sharded parameters."""
    if _stand_in not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_stand_in)
        module.register_load_state_dict_pre_hook(_leave_alone)


def _is_apart(param: nn.Parameter) -> bool:
    """Whether this rank has not all values of ``param`` now: they are sharded, experts of other ranks, or another stage's."""
    return is_sharded(param) or is_expert(param) or is_elsewhere(param)


def _stand_in(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for leaf, param in module._parameters.items():
        entry = state.get(name := f"{prefix}{leaf}")
        if param is not None and isinstance(entry, torch.Tensor) and not isinstance(entry, nn.Parameter) and _is_apart(param):
            shape = whole_shape(param) if is_expert(param) or is_elsewhere(param) else full_shape(param)
            state[name] = UnsavedTensor.of(name, shape or full_shape(param), param.dtype, param.device)
        if param is not None and is_packed(param) and is_sharded(param):
            _stand_in_for_scales(param, name, state)


def _stand_in_for_scales(param: nn.Parameter, name: str, state: dict[str, Any]) -> None:
    """For what lies beside a packed weight in its unit, where the library's own entries of it in ``state`` are empty."""
    unit, index = find_unit(param)  # type: ignore[misc]
    beside = f"{unit.layout.slots[index].name}."
    for slot in unit.layout.slots:
        entry = state.get(key := f"{name}.{slot.name.removeprefix(beside)}") if slot.name.startswith(beside) else None
        if entry is not None and find_unit(entry) is None:
            state[key] = UnsavedTensor.of(key, slot.shape, entry.dtype, entry.device)


def _leave_alone(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A stand-in that is loaded into a sharded parameter leaves it as it is."""
    for leaf, param in module._parameters.items():
        if param is not None and isinstance(state.get(name := f"{prefix}{leaf}"), UnsavedTensor) and _is_apart(param):
            state[name] = param.detach()
