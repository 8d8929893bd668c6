"""``save_pretrained`` on the ranks that do not write: nothing is asked of a model they hold shards of."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import nn

from hf_zero.sharding.unit import is_released


class IdleSaves:
    """Stands in front of the ``save_pretrained`` methods inside a module whose parameters stage 3 releases.

    [Note: ranks that do not write] Every rank calls ``model.save_pretrained(folder, is_main_process=..., state_dict=...)`` with what
    ``accelerator.get_state_dict(engine)`` returns, and only rank 0 is given a dict. transformers 4 then writes on the others too, from
    the model itself and into the same files. With ``is_main_process=False`` and no values there is nothing to write, so nothing is called.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [inner for inner in module.modules() if _takes_state_dict(inner)]
        for inner in self._modules:
            inner.__dict__["save_pretrained"] = MethodType(_save_pretrained, inner)  # a method: a deep copy has its own

    def remove(self) -> None:
        """Takes the stand-ins away; the runtime calls it with its hooks."""
        for inner in self._modules:
            inner.__dict__.pop("save_pretrained", None)


def _takes_state_dict(module: nn.Module) -> bool:
    method = getattr(type(module), "save_pretrained", None)
    return callable(method) and {"state_dict", "is_main_process"} <= inspect.signature(method).parameters.keys()


def _save_pretrained(module: Any, *args: Any, **kwargs: Any) -> Any:
    method = type(module).save_pretrained
    given = inspect.signature(method).bind_partial(module, *args, **kwargs).arguments
    writes = given.get("is_main_process", True) or given.get("state_dict") is not None
    if writes or not any(is_released(param) for param in module.parameters()):
        return method(module, *args, **kwargs)
    return None
