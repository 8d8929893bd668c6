"""transformers' table of experts implementations: what it holds also serves layers whose experts are divided over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hf_zero.expert_parallel.stacked import Implementation, dispatching

_EAGER = "eager"  # not in the table: each class has its own
_ours: dict[str, Implementation] = {}  # our functions in the table, by implementation


def dispatch_in_table(modules: Iterable[nn.Module]) -> None:
    """Puts functions in the place of all implementations that send the tokens of divided layers to their experts.

    Args:
        modules: Layers whose experts are divided; for all others the table is what it was.
    """
    if not list(modules):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as functions

    for name in [*functions.valid_keys(), _EAGER]:
        present = functions.get(name)
        if present is not None and present is _ours.get(name):
            continue
        functions[name] = _ours[name] = dispatching(_eager if present is None else _always(present))


def _always(implementation: Implementation) -> Callable[[nn.Module], Implementation]:
    return lambda module: implementation


def _eager(module: nn.Module) -> Implementation:
    """The forward that the module's class defines, which is computed where no implementation is chosen."""
    found: Any = type(module).forward
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found  # type: ignore[no-any-return]
