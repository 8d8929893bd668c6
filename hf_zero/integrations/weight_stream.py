"""Stream unsharded weights under Hugging Face's names, bucket by bucket (``iter_full_params``), for inference engines and other receivers.

Adapters that peft has put around layers are merged one layer at a time, and the layers get the names that they had before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.checkpoint.model.export import expert_axis_of, joined, model_axis_of
from hf_zero.checkpoint.model.stream import Piece, WeightStream
from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.marks import is_expert, is_packed, is_wrapped, tp_shard_of
from hf_zero.core.units.names import named_params, saved_name
from hf_zero.core.units.parts import WITHOUT_FUNCTION
from hf_zero.errors import ConfigError, StateError, UnsupportedError

if TYPE_CHECKING:
    from hf_zero.core.engine import Engine

_PREFIX = "base_model.model."  # before names of the model inside a PeftModel


def merged_pieces(module: nn.Module, model: Collectives | None) -> list[Piece]:
    """Return the model without adapters, as ``merge_and_unload`` leaves it: merged weights under the names of the base model.

    Args:
        module: A model with or without peft's adapters.
        model: Collectives of the model axis, whose ranks divide its layers; None if there is one such rank.

    Raises:
        UnsupportedError: An adapter cannot be merged layer by layer.
    """
    if "peft" not in sys.modules:
        return plain_pieces(module)
    _refuse_prompts(module)
    taken: dict[int, Piece | None] = {}  # parameters that belong to a merged piece; None if another parameter of the piece represents it
    renamed: dict[int, str] = {}
    for path, layer in _outermost(module):
        name = saved_name(path)
        if _is_tuner_layer(layer):
            _take_layer(name, layer, taken, model)
        else:
            _take_copy(name, layer, taken, renamed)
    pieces = []
    for name, param in named_params(module):
        piece = taken.get(id(param), _MISSING)
        if piece is _MISSING:
            pieces.append(Piece.of_param(renamed.get(id(param), name).removeprefix(_PREFIX), param))
        elif piece is not None and piece.params[0] is param:
            pieces.append(piece)
    return pieces


def plain_pieces(module: nn.Module) -> list[Piece]:
    """Return every parameter as a piece of its own, unmerged; a tied parameter once, under its first name."""
    return [Piece.of_param(name, param) for name, param in named_params(module)]


_MISSING: Any = object()


def _is_tuner_layer(module: nn.Module) -> bool:
    return isinstance(module, sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer)


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, sys.modules["peft.utils.other"].AuxiliaryTrainingWrapper)


def _outermost(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield dotted name and module of the layers that peft has wrapped, without wrapped layers inside other wrapped layers."""
    inside: set[int] = set()
    for name, child in module.named_modules():
        if id(child) not in inside and (_is_tuner_layer(child) or _is_wrapper(child)):
            inside.update(id(part) for part in child.modules())
            yield name, child


def _take_layer(name: str, layer: Any, taken: dict[int, Piece | None], model: Collectives | None) -> None:
    base = layer.get_base_layer()
    owned = {id(param): param for param in layer.parameters()}
    for param in owned.values():
        taken[id(param)] = None
    named = [(key, param) for key, param in base.named_parameters() if id(param) in owned]
    for key, param in named:
        if is_packed(param) or is_wrapped(param) or not (param.is_floating_point() or param.is_complex()):
            kind = _kind(param)
            raise UnsupportedError(f"{name}.{key} is {kind}: adapters on quantized layers are not merged; pass merge_adapters=False")
    names = tuple(f"{name}.{key}".removeprefix(_PREFIX) for key, _ in named)
    params = tuple(param for _, param in named)
    if params:
        make, every = partial(_merge, layer, params), tuple(owned.values())
        divided = model is not None and not any(map(is_expert, every))
        if model is not None and divided:
            make = partial(_merge_whole, layer, params, every, model)
        taken[id(params[0])] = Piece(names, params, every, make, whole=divided)


def _kind(param: nn.Parameter) -> str:
    return type(param).__name__ if is_wrapped(param) else str(param.dtype)


def _merge(layer: Any, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return the values of ``params`` with the active adapters merged into them; the layer itself does not change."""
    chain = [part for part in layer.modules() if _is_tuner_layer(part) and not part.disable_adapters]
    before = [(part, list(part.merged_adapters)) for part in chain]
    originals = [param.data for param in params]
    try:
        for param in params:
            param.data = param.data.clone()
        for part in reversed(chain):
            part.merge(adapter_names=[name for name in part.active_adapters if name not in part.merged_adapters])
        return [param.data for param in params]
    finally:
        for param, original in zip(params, originals, strict=True):
            param.data = original
        for part, merged in before:
            part.merged_adapters[:] = merged


def _merge_whole(layer: Any, params: Sequence[nn.Parameter], owned: Sequence[nn.Parameter], model: Collectives) -> list[torch.Tensor]:
    """Return values as ``_merge`` from the whole parameters of a layer that the ranks of a model axis divide; collective over the axis.

    A product of parts of A and B is not a part of the product where the inner dimension is divided, and other stages of a pipeline have no
    values of the layer. So every rank joins all parameters of the layer, and merges the whole layer.
    """
    parts = [param.data for param in owned]
    with WITHOUT_FUNCTION():
        try:
            for param, part in zip(owned, parts, strict=True):
                param.data = joined(part, tp_shard_of(param), model)
            return _merge(layer, params)
        finally:
            for param, part in zip(owned, parts, strict=True):
                param.data = part


def _take_copy(name: str, wrapper: Any, taken: dict[int, Piece | None], renamed: dict[int, str]) -> None:
    """Replace a layer in PEFT's ``modules_to_save`` by its active trained copy, under the layer's own name."""
    copies = getattr(wrapper, "modules_to_save", None)
    if copies is None:
        raise UnsupportedError(f"{name}: {type(wrapper).__name__} cannot be merged layer by layer; pass merge_adapters=False")
    for param in wrapper.parameters():
        taken[id(param)] = None
    active = copies[wrapper.active_adapters[0]] if not wrapper.disable_adapters else wrapper.original_module
    for key, param in active.named_parameters():
        taken.pop(id(param), None)
        renamed[id(param)] = f"{name}.{key}"


def _refuse_prompts(module: nn.Module) -> None:
    for kind, settings in getattr(module, "peft_config", {}).items():
        if getattr(settings, "is_prompt_learning", False):
            raise UnsupportedError(
                f"adapter {kind!r} is {settings.peft_type}: prompts belong to no layer and cannot be merged; pass merge_adapters=False"
            )


def iter_full_params(
    engine: Engine,
    bucket_bytes: int = 1 << 30,
    merge_adapters: bool = True,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield unsharded parameters one by one, in the order and under the names of the Hugging Face checkpoint; collective.

    Every rank must iterate to the end (``for _ in iter_full_params(...): pass`` if it needs no values). Each unit is gathered once, while
    the caller uses the bucket before it, and freed with the next bucket: at most two buckets, the largest layer and the parameters that the
    first and last layers share are unsharded at a time. A tensor that the caller keeps does not change; at stages 0 to 2 and without
    ``dtype`` it is the parameter itself, until the next step. Do not write to the tensors: a write may or may not reach the model.

    Args:
        engine: Engine from ``initialize``; its weights do not change.
        bucket_bytes: Bytes of gathered parameters in a bucket.
        merge_adapters: Whether to merge peft's active adapters, layer by layer, and to use the base model's names. False yields every
            parameter of the model unchanged, adapters included.
        dtype: Type that floating-point tensors are cast to; None keeps each tensor's own type.
        rank0_only: Whether only the first data-parallel rank yields tensors; the others take part in the collectives and yield nothing.

    Yields:
        (name, value): each parameter; a tied parameter once, under its first name.

    Raises:
        StateError: A forward or backward is running, or a step was taken since the iteration began.
        ConfigError: ``bucket_bytes`` is not positive.
        UnsupportedError: An adapter cannot be merged layer by layer.
    """
    if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
        raise ConfigError(f"iter_full_params: bucket_bytes is {bucket_bytes!r}; a positive number of bytes is allowed")
    model, expert = model_axis_of(engine.collectives), expert_axis_of(engine.collectives)
    pieces = merged_pieces(engine.module, model) if merge_adapters else plain_pieces(engine.module)
    steps = engine.progress.global_steps

    def check() -> None:
        if engine.runtime.backward.begun or any(block.open for block in (engine.runtime.root, *engine.runtime.blocks)):
            raise StateError("iter_full_params: a forward or backward is running; stream weights between step() and the next forward")
        if engine.progress.global_steps != steps:
            raise StateError("iter_full_params: step() was called before the iteration ended, so weights of two steps would be mixed")

    check()
    return _values(engine, WeightStream(pieces, model, bucket_bytes, check, expert), merge_adapters, dtype, rank0_only)


def _values(
    engine: Engine, stream: WeightStream, merged: bool, dtype: torch.dtype | None, rank0_only: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    gives = not rank0_only or engine.collectives.data.rank == 0
    for bucket in stream:
        named = _names_of_checkpoint(engine.module, bucket) if merged else list(bucket)
        bucket.clear()
        while gives and named:
            name, value = named.pop(0)
            yield name, value.to(dtype) if dtype is not None and value.is_floating_point() else value
            del value
        named.clear()


def _names_of_checkpoint(module: nn.Module, bucket: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return ``bucket`` in the shapes and names of the model's checkpoint, which differ from those in memory in transformers 5."""
    loading: Any = sys.modules.get("transformers.core_model_loading")
    inner: Any = getattr(module, "get_base_model", lambda: module)()
    if loading is None or not isinstance(inner, sys.modules["transformers.modeling_utils"].PreTrainedModel):
        return list(bucket)
    return list(loading.revert_weight_conversion(inner, dict(bucket)).items())
