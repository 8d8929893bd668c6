"""Change ``from_pretrained`` for models that an engine will divide: its ``distributed_config`` ([Note: DistributedConfig]) and its reads.

A model that is loaded and split over tensor-parallel ranks in one call is read in slices by each rank. This module imports little, because
every program that loads a model of transformers imports it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.assembly.kept_types import cast_unnamed
from hf_zero.comm.topology import build_topology
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.split import split_model


def from_pretrained(method: Callable[..., Any], model_class: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``PreTrainedModel.from_pretrained``: record the sizes of ``distributed_config`` on the model, if a configuration is in use.

    If an engine exists at stage 3 and only this rank loads, it loads an unsharded model ([Note: calls of one rank]).

    Raises:
        UnsupportedError: The ``distributed_config`` requests a feature that is not supported.
        ConfigError: Its ``ep_plan`` names modules or parameters that the model does not have.
    """
    if _loads_alone():
        from hf_zero.integrations.loading import configuration_hidden

        with configuration_hidden():
            return from_pretrained(method, model_class, *args, **kwargs)
    given = kwargs.get("distributed_config")
    if given is None or not _configuration_in_use():
        return method(model_class, *args, **kwargs)
    from hf_zero.integrations.distributed_config import NotedSizes

    sizes = NotedSizes(given)
    del kwargs["distributed_config"]
    with sizes.known():
        loaded = method(model_class, *args, **kwargs)
    sizes.note_on(loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def _loads_alone() -> bool:
    """Return whether this load would be collective although the other ranks do not take part in it."""
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if "hf_zero.comm.hang_watch" not in sys.modules or deepspeed is None or not deepspeed.is_deepspeed_zero3_enabled():
        return False  # there is no engine
    from hf_zero.comm.companions import comes_alone

    return comes_alone()


def load_weights(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace ``PreTrainedModel._load_pretrained_model``: read only this rank's experts or layers, and shard quantized weights at once.

    Up to transformers 5.0 the method is a class method with another signature; with it every rank reads everything, and the engine divides.
    """
    if not _configuration_in_use():
        return method(*args, **kwargs)
    signature = inspect.signature(method)
    _widen_named(**signature.bind_partial(*args, **kwargs).arguments)
    return _load_share(method, *args, **kwargs) if next(iter(signature.parameters)) == "model" else method(*args, **kwargs)


def _widen_named(model: Any = None, dtype: Any = None, load_config: Any = None, **_: Any) -> None:
    """Cast to fp32 the parameters and buffers of a sharded model that transformers keeps in fp32, before it loads their values; local.

    For an unsharded model the loader replaces each tensor by one of the right type. For shards it copies the values, and the constructor
    has made all shards in the type of the model.
    """
    from hf_zero.assembly.kept_types import named_for_fp32
    from hf_zero.core.model_init import cast_sharded
    from hf_zero.core.units.unit import find_unit

    if not hasattr(model, "parameters") or all(find_unit(param) is None for param in model.parameters()):
        return
    import torch

    for tensor in named_for_fp32(model, getattr(load_config, "dtype", dtype)):
        if find_unit(tensor) is not None:
            cast_sharded(tensor, torch.float32)
        elif not tensor.is_meta:
            tensor.data = tensor.data.float()


def _load_share(
    method: Callable[..., Any], model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    from hf_zero.integrations.checkpoint_slices import Load

    load = Load(method, model, state_dict, checkpoint_files, load_config, args, kwargs)
    if load_config.is_quantized:
        from hf_zero.integrations.packed_loads import load_packed

        return load_packed(load.whole)
    if not load.may_be_parted:
        return load.whole()
    from hf_zero.integrations.experts import load_experts
    from hf_zero.integrations.stage_loads import load_stage

    found = load_experts(load, load_stage)
    if found is None:
        found = load_stage(load)
    return found if found is not None else load.whole()


def _configuration_in_use() -> bool:
    module = sys.modules.get("transformers.integrations.deepspeed")
    return module is not None and module.deepspeed_config() is not None


def tp_from_pretrained(
    model_class: Any, name: str, tp_size: int, dtype: torch.dtype | None = None, plan: TpPlan | None = None
) -> nn.Module:
    """Load a saved model, split over groups of ``tp_size`` adjacent ranks; collective.

    transformers maps safetensors files into memory, where a page is read at its first access. The split copies this rank's slices from
    there, and the cast to ``dtype`` follows on the slices.

    Args:
        model_class: Class with ``from_pretrained``, for example ``AutoModelForCausalLM``.
        name: Folder of a saved model, or an ID on the Hub.
        tp_size: Number of ranks that hold one model together.
        dtype: Type of the parameters, except those that the model keeps in fp32; None keeps the type of the files.
        plan: The tensor-parallel plan; None makes one from the model.

    Raises:
        ConfigError: The sizes of the model are not divisible by ``tp_size``.
    """
    model: nn.Module = model_class.from_pretrained(name, dtype="auto")
    split_model(model, {}, build_topology(model_parallel=tp_size), plan)
    return cast_unnamed(model, dtype) if dtype is not None else model
