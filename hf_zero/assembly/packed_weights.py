"""Find and shard quantized weights: bytes that bitsandbytes packed, and tensors of torchao's own class, see [Note: inner tensors].

The engine moves their bytes and does not cast them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.model_init import ModelInit
from hf_zero.core.units.grouping import NamedParam
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.marks import inner_tensors, is_packed, is_wrapped, mark_inner, mark_packed
from hf_zero.core.units.unit import find_unit, full_shape
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.observe import log_rank0
from hf_zero.system.sizes import size_text

_WITHOUT_GRADIENT = "Int4"  # torchao's classes of 4-bit weights: torch has no derivative of their products


def prepare_wrapped(model: nn.Module, sharded: bool, world: int) -> set[int]:
    """Mark the weights that units will hold, and log how many bytes they take; local.

    Args:
        model: The user's module.
        sharded: Whether parameters are sharded (stage 3).
        world: Number of ranks that share them.

    Returns:
        The ids of parameters that belong in units: at stage 3 those that can be sharded, otherwise those that are sharded already.

    Raises:
        StateError: A weight is trainable.
        UnsupportedError: A parameter is trained beside a weight whose products have no gradient.
    """
    found = [(name, param) for name, param in model.named_parameters() if is_wrapped(param)]
    trains = any(param.requires_grad for param in model.parameters())
    for name, param in found:
        if param.requires_grad:
            raise StateError(
                f"{name} is a {type(param).__name__} and requires a gradient: quantized weights are not trained here. Freeze it "
                "(model.requires_grad_(False) before get_peft_model), and train adapters on it"
            )
        if trains and type(param).__name__.startswith(_WITHOUT_GRADIENT):
            raise UnsupportedError(
                f"{name} is a {type(param).__name__}: torchao's products with 4-bit weights have no gradient, so no adapter before one can "
                "train. Quantize with BitsAndBytesConfig(load_in_4bit=True), or with TorchAoConfig(Int8WeightOnlyConfig()): both train and "
                "are sharded at stage 3"
            )
    divided = [param for _, param in found if find_unit(param) is not None or (sharded and mark_inner(param))]
    _log([param for param in divided if sharded], f"sharded over {world} rank(s) and gathered packed")
    taken = {id(param) for param in divided}
    for module in model.modules():
        if any(id(param) in taken for param in module._parameters.values()):
            keep_divided(module)
    _log(
        [param for _, param in found if sharded and id(param) not in taken],
        ("whole on every rank, because tensors of this kind cannot be sharded"),
    )
    return taken


def keep_divided(module: nn.Module) -> None:
    """Let ``module.to`` and similar methods skip sharded weights: torch would replace them by new ones without values."""
    module.__dict__["_apply"] = MethodType(_apply, module)


def _apply(module: Any, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
    divided = {name: param for name, param in module._parameters.items() if param is not None and is_wrapped(param) and find_unit(param)}
    module._parameters.update(dict.fromkeys(divided))
    try:
        return type(module)._apply(module, fn, recurse)  # type: ignore[no-any-return]
    finally:
        module._parameters.update(divided)


def _log(params: list[nn.Parameter], where: str) -> None:
    if params:
        kinds = sorted({type(param).__name__ for param in params})
        inner = [tensor for param in params for tensor in inner_tensors(param).values()]
        nbytes = sum(full_shape(tensor).numel() * tensor.element_size() for tensor in inner)
        log_rank0("%d weights are %s: %s, %s", len(params), " and ".join(kinds), size_text(nbytes, ".1f", "MiB"), where)


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight.

    Attributes:
        name: Dotted name of its module.
        module: The layer of bitsandbytes that owns it.
        param: The packed weight, ``Params4bit`` or ``Int8Params``.
    """

    name: str
    module: Any
    param: Any

    @property
    def statistics(self) -> list[tuple[Any, str]]:
        """Return (holder, attribute) of the tensors that are needed to decode its bytes."""
        if not hasattr(self.param, "quant_state"):
            return [(self.module.state, "SCB")] if hasattr(self.module, "state") else [(self.param, "SCB")]
        inner = self.param.quant_state
        nested = [(inner, "offset"), (inner.state2, "absmax"), (inner.state2, "code")] if inner.state2 is not None else []
        return [(inner, "absmax"), (inner, "code"), *nested]


def _is_quantized(param: Any) -> bool | None:
    """Return whether ``param`` holds codes of bitsandbytes; False before it has quantized them, None for any other parameter."""
    library = sys.modules.get("bitsandbytes")
    if (
        library is None
        or not isinstance(param, (library.nn.Params4bit, library.nn.Int8Params))
        or getattr(param, "has_fp16_weights", False)
    ):
        return None
    return param.quant_state is not None if isinstance(param, library.nn.Params4bit) else param.dtype == torch.int8


def packed_weights(model: nn.Module) -> list[PackedWeight]:
    """Return the quantized weights of ``model``, in its order, each once.

    Raises:
        StateError: A weight is trainable, or not quantized yet.
    """
    found: dict[int, PackedWeight] = {}
    for name, module in model.named_modules():
        for leaf, param in module._parameters.items():
            ready = _is_quantized(param)
            if ready is None or id(param) in found:
                continue
            weight = f"{name}.{leaf}"
            if not ready:
                raise StateError(
                    f"{weight} is marked for bitsandbytes but not quantized yet: load the model with from_pretrained, or move it to "
                    "the device once (model.to(device)) before initialize()"
                )
            if param.requires_grad:
                raise StateError(f"{weight} is quantized and requires a gradient; freeze it, and train adapters on it (peft)")
            found[id(param)] = PackedWeight(name, module, param)
    return list(found.values())


def refuse_packed(model: nn.Module, axis: str) -> None:
    """Raise if a weight of ``model`` is quantized.

    Args:
        model: The user's module.
        axis: The axis that would divide its layers.

    Raises:
        UnsupportedError: A weight is quantized: its bytes have no rows and columns that ranks could share.
    """
    wrapped = (name for name, param in model.named_parameters() if is_wrapped(param))
    found = next((weight.name for weight in packed_weights(model)), next(wrapped, None))
    if found is not None:
        raise UnsupportedError(
            f"{found} is quantized: {axis} cannot divide packed weights. Load the model without "
            "quantization_config, or shard it with ZeRO stage 3 alone"
        )


def prepare_packed(packed: list[PackedWeight], sharded: bool, collectives: Collectives) -> None:
    """Mark quantized weights and their scales, move their statistics and let their layers find the bytes in units; collective.

    If they are sharded, all ranks get rank 0's statistics, and also its bytes.

    Args:
        packed: The result of ``packed_weights``.
        sharded: Whether they will be in units that are resharded between uses (stage 3).
        collectives: All data-parallel ranks.
    """
    if not packed:
        return
    device = collectives.topology.device
    for weight in packed:
        mark_packed(weight.param)
        _keep_format(weight)
        if isinstance(getattr(weight.module, "state", None), sys.modules["bitsandbytes"].MatmulLtState):
            _use_bytes_of_weight(weight.module)
        elif hasattr(weight.param, "CB"):
            weight.param.CB = None  # weight of an embedding, which reads the weight itself
        for holder, name in weight.statistics:
            if find_unit(getattr(holder, name)) is None:
                setattr(holder, name, getattr(holder, name).to(device).contiguous())
                if sharded:
                    collectives.data.broadcast(getattr(holder, name), 0, f"{name} of {weight.name}")
        if (scales := _scales(weight.param)) is not None:
            mark_packed(scales)
    divided = [tensor for weight in packed for tensor in (weight.param, _scales(weight.param)) if tensor is not None]
    nbytes = sum(full_shape(tensor).numel() * tensor.element_size() for tensor in divided)
    where = f"sharded over {collectives.world} rank(s) and gathered packed" if sharded else "whole on every rank"
    log_rank0("%d weights quantized by bitsandbytes: %s, packed and with scales, %s", len(packed), size_text(nbytes, ".1f", "MiB"), where)


def divide_loaded(module: nn.Module, leaf: str, param: Any, init: ModelInit) -> None:
    """Shard a weight that is about to be registered, if it is quantized; collective.

    Args:
        module: Module that is about to register it.
        leaf: Name of the attribute.
        param: Any parameter.
        init: The ``ModelInit`` that shards it.
    """
    if param is None or param.is_meta or find_unit(param) is not None:
        return
    if _is_quantized(param):
        mark_packed(param)
        if (scales := _scales(param)) is not None:
            mark_packed(scales)
    elif is_wrapped(param) and mark_inner(param):
        keep_divided(module)
    else:
        return
    label = f"{type(module).__name__}.{leaf}"
    pieces = pieces_of(NamedParam(label, param, FROZEN))
    init.divide(module, label, pieces, pieces[0].param.dtype)
    if getattr(param, "CB", None) is not None:
        param.CB = param.data  # a second reference to the same bytes


def pieces_of(member: NamedParam) -> list[NamedParam]:
    """Return the members of a unit for a parameter: itself, followed by the scales of a packed 4-bit weight; the inner tensors of a
    wrapped one.

    The remaining statistics of 4-bit weights (scales of the scales, tables), and an 8-bit weight's one number per row, are about a
    thousandth of its bytes and stay whole.
    """
    if is_wrapped(member.param):
        inner = inner_tensors(member.param).items()
        names = (member.name if index == 0 else f"{member.name}.{name}" for index, (name, _) in enumerate(inner))
        return [NamedParam(name, tensor, FROZEN) for name, (_, tensor) in zip(names, inner, strict=True)]  # type: ignore[arg-type]
    scales = _scales(member.param) if is_packed(member.param) else None
    return [member] if scales is None else [member, NamedParam(f"{member.name}.absmax", scales, FROZEN)]


def _scales(param: Any) -> Any:
    state = getattr(param, "quant_state", None)
    return state.absmax if state is not None else None


def _keep_format(weight: PackedWeight) -> None:
    """Keep a 4-bit layer from repacking its weight.

    On CPUs with AVX512-BF16 a forward in eval mode writes the weight in another order for a kernel that has no backward, and rounds its
    scales: adapters below such a layer would get no gradient for the rest of the run, and bytes in a unit would not fit them any more.

    Raises:
        StateError: The weight was repacked already; the former scales cannot be restored.
    """
    if getattr(getattr(weight.param, "quant_state", None), "packing_format_for_cpu", False):
        raise StateError(
            f"{weight.name} ran in eval mode on this CPU before initialize(); bitsandbytes then rounded its scales for an "
            "inference kernel that cannot train. Load the model again, and call initialize (accelerator.prepare) before the "
            "first evaluation"
        )
    if hasattr(weight.module, "support_avx512bf16_for_cpu"):
        weight.module.support_avx512bf16_for_cpu = False


def _use_bytes_of_weight(module: Any) -> None:
    """Let an 8-bit layer compute with its weight's present data, instead of a reference to the data of its first forward."""
    if module.weight.CB is not None:
        module.init_8bit_state()
    state = module.state
    vars(state).pop("CB", None)
    kind: Any = type(state)
    state.__class__ = _following_state(kind)
    state.layer = module


@functools.cache
def _following_state(kind: Hashable) -> type[Any]:
    """Return a subclass of the library's state of an 8-bit product that reads the bytes from the layer's weight at each use."""
    base: Any = kind
    if hasattr(base, "_follows"):
        return base  # type: ignore[no-any-return]

    def read(self: Any) -> torch.Tensor:
        return self.layer.weight.data  # type: ignore[no-any-return]

    def write(self: Any, value: torch.Tensor | None) -> None:
        """Ignore the value: the library writes the bytes that it has read, on a device to which the weight has moved before."""

    return type(base.__name__, (base,), {"CB": property(read, write), "_follows": True})
