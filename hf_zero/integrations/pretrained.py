"""``from_pretrained`` where an engine will divide the model: its ``distributed_config`` ([Note: DistributedConfig]), and what it reads.

Imports little: every program that loads a model of transformers comes here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def from_pretrained(method: Callable[..., Any], model_class: Any, *args: Any, **kwargs: Any) -> Any:
    """``PreTrainedModel.from_pretrained``; beside a DeepSpeed configuration it loads the model for an engine, and notes the sizes on it.

    At stage 3, where an engine has been made, a rank that loads alone loads a whole model ([Note: calls of one rank]).

    Raises:
        UnsupportedError: The ``distributed_config`` asks for something that is not provided.
        ConfigError: Its ``ep_plan`` names what the model does not have.
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
    """Return whether this load would be collective, and the other ranks do not take part."""
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if "hf_zero.comm.hang_watch" not in sys.modules or deepspeed is None or not deepspeed.is_deepspeed_zero3_enabled():
        return False  # there is no engine
    from hf_zero.comm.companions import comes_alone

    return comes_alone()


def load_weights(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``PreTrainedModel._load_pretrained_model``; a rank keeps its share of quantized weights, and reads its own experts or layers.

    Up to transformers 5.0 it is a class method, which loads in other ways: there every rank reads all, and the engine divides it.
    """
    if not _configuration_in_use():
        return method(*args, **kwargs)
    signature = inspect.signature(method)
    _widen_named(**signature.bind_partial(*args, **kwargs).arguments)
    return _load_share(method, *args, **kwargs) if next(iter(signature.parameters)) == "model" else method(*args, **kwargs)


def _widen_named(model: Any = None, dtype: Any = None, load_config: Any = None, **_: Any) -> None:
    """Give a sharded model's parameters and buffers that transformers loads in fp32 that type, before their values come; local.

    Unsharded, the loader replaces a tensor by one of the type that it shall have. Into shards it copies, and the constructor has made them
    in the type of the whole model.
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
