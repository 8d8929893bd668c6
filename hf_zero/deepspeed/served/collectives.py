"""Provide the collectives of `deepspeed.comm`: those of torch.distributed, which also take DeepSpeed's names of arguments.

DeepSpeed calls some tensors otherwise than torch does, and its functions have three arguments for its log of collectives: ``prof``,
``log_name`` and ``debug``. These have no effect here, because the log has the engine's collectives only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_FOR_THE_LOG = frozenset(("prof", "log_name", "debug"))


def _collective(name: str, **torch_names: str) -> Callable[..., Any]:
    """Return ``torch.distributed.<name>`` as a function that takes the arguments of both libraries.

    Args:
        name: Name of torch's function; it is looked up in each call, so a replaced function is called.
        torch_names: DeepSpeed's name of an argument, and torch's name of the same argument.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {torch_names.get(key, key): value for key, value in kwargs.items() if key not in _FOR_THE_LOG}
        return getattr(dist, name)(*args, **given)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Call ``torch.distributed.{name}`` and return its result; take DeepSpeed's names of arguments too."
    return call


all_gather = _collective("all_gather")
all_gather_into_tensor = _collective("all_gather_into_tensor", tensor="input_tensor")
all_gather_object = _collective("all_gather_object")
all_reduce = _collective("all_reduce")
all_to_all = _collective("all_to_all")
all_to_all_single = _collective("all_to_all_single", tensor="input")
broadcast = _collective("broadcast")
broadcast_object_list = _collective("broadcast_object_list")
gather = _collective("gather")
irecv = _collective("irecv")
isend = _collective("isend")
monitored_barrier = _collective("monitored_barrier")
recv = _collective("recv")
reduce = _collective("reduce")
reduce_scatter = _collective("reduce_scatter")
reduce_scatter_tensor = _collective("reduce_scatter_tensor", output_tensor="output", tensor="input")
scatter = _collective("scatter")
send = _collective("send")
