"""Shard each quantized weight at stage 3 as soon as it is loaded, so that a rank holds its shards and one unsharded weight at most.

[Note: packed as loaded] If a model is quantized while it is loaded, transformers does not use ``zero.Init`` and makes the model on the meta
device. Its loader then processes the weights one by one, in the order of their names, which is the same on every rank: it reads, quantizes,
and registers a parameter with its module. A hook of torch on this registration shards the weight together with its scales, with rank 0's
bytes. Weights that are not quantized (embeddings, norms, a head) stay whole until ``initialize``, because transformers resizes and ties
them without gathering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hf_zero.assembly.packed_weights import divide_loaded
from hf_zero.deepspeed.zero_init import Init
from hf_zero.memory import host_memory


def load_packed(load: Callable[[], Any]) -> Any:
    """Call ``load``, which loads a quantized model, and return its result; at stage 3 shard each weight, which is collective.

    See [Note: packed as loaded].
    """
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

    host_memory.return_large_blocks()  # unsharded weights and buffers of quantization are freed between packed ones that stay
    if not is_deepspeed_zero3_enabled():
        return load()
    init = Init(config_dict_or_path=deepspeed_config()).inner
    if not init.saves_memory:
        return load()

    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        divide_loaded(module, name, param, init)

    handle = register_module_parameter_registration_hook(registered)
    try:
        return load()
    finally:
        handle.remove()
