"""``from_pretrained`` with a ``distributed_config``, where an engine will divide the model; see [Note: DistributedConfig].

Imports little: every program that loads a model of transformers comes here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def from_pretrained(method: Callable[..., Any], model_class: Any, *args: Any, **kwargs: Any) -> Any:
    """``PreTrainedModel.from_pretrained``; beside a DeepSpeed configuration it loads the model whole, and notes the sizes on it.

    Raises:
        UnsupportedError: The ``distributed_config`` asks for something that is not provided.
        ConfigError: Its ``ep_plan`` names what the model does not have.
    """
    given = kwargs.get("distributed_config")
    if given is None or not _configuration_in_use():
        return method(model_class, *args, **kwargs)
    from hf_zero.integrations.distributed_config import NotedSizes

    sizes = NotedSizes(given)
    del kwargs["distributed_config"]
    loaded = method(model_class, *args, **kwargs)
    sizes.note_on(loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def _configuration_in_use() -> bool:
    module = sys.modules.get("transformers.integrations.deepspeed")
    return module is not None and module.deepspeed_config() is not None
