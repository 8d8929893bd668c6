"""transformers' table of attention functions, in which ours stand for those of sliced models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.attention import Core, dispatching

_EAGER = "eager_attention_forward"  # the name each modeling file gives it
_replaced: dict[str, Core] = {}  # our functions in transformers' table, by implementation


def trade_in_attention(implementation: str) -> None:
    """Put a function in the place of ``implementation``'s that trades for the modules of sliced models and calls it for all others."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    present = functions.get(implementation)
    if present is not None and present is _replaced.get(implementation):
        return
    if implementation == "eager" and not hasattr(functions, "get_interface"):
        raise UnsupportedError(
            "sequence parallelism: with transformers 4 eager attention is not called through the table of attention functions; make the "
            "model with attn_implementation='sdpa', or install transformers 5"
        )
    if present is None and implementation != "eager":
        raise UnsupportedError(f"sequence parallelism: transformers has no attention function {implementation!r}: {sorted(functions)}")
    own = dispatching((lambda module: present) if present is not None else eager_function)
    functions[implementation] = _replaced[implementation] = own


@contextmanager
def standing_in(implementation: str, attend: Callable[..., Any]) -> Iterator[None]:
    """Let ``attend`` stand in transformers' table for ``implementation``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    before = functions.get(implementation)
    functions[implementation] = attend
    try:
        yield
    finally:
        if before is not None:
            functions[implementation] = before
        else:
            del functions[implementation]


def eager_function(module: nn.Module) -> Core:
    """Return the eager attention of the file that defines ``module``."""
    for base in type(module).__mro__:
        found: Core | None = getattr(sys.modules.get(base.__module__), _EAGER, None)
        if found is not None:
            return found
    raise UnsupportedError(f"{type(module).__module__} defines no {_EAGER}; make the model with attn_implementation='sdpa'")
