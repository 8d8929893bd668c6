"""Quantized weights at stage 3: each is divided as soon as it has been read and quantized, so that a rank holds its share and one weight.

[Note: packed as loaded] transformers leaves ``zero.Init`` out where a model is quantized while it is loaded, and makes it on the meta
device. Its loader then goes through the weights one by one, in the order of their names, which is the same on every rank: reads,
quantizes, and registers a parameter with its module. torch reports that, and there the weight with its scales becomes a shard, with rank
0's bytes. What is not quantized (embeddings, norms, a head) stays whole until ``initialize``: transformers resizes and ties those without
gathering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hf_zero.assembly.packed_weights import divide_loaded
from hf_zero.deepspeed.zero_init import Init
from hf_zero.memory import heap


def load_packed(load: Callable[[], Any]) -> Any:
    """What ``load`` returns, which loads the weights of a quantized model; see [Note: packed as loaded]. Collective at stage 3."""
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

    heap.return_large_blocks()  # whole weights, and what quantizing them takes, come and go between packed ones that stay
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
