"""Let a script that looks for the state of a parameter of the model know where the engine keeps it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hf_zero.core.units.sharded_parameter import OWNER
from hf_zero.errors import StateError


def foreign_state(key: Any) -> str:
    """Return the text of an error if ``key``, for which ``optimizer.state`` was asked, is a parameter of an engine's model; "" if not."""
    owner = getattr(key, OWNER, None)
    if owner is None:
        return ""
    unit, index = owner
    return (
        f"optimizer.state was used with {unit.layout.slots[index].name}, but the engine keeps the states of flat parts of its "
        "parameters there, so this entry has no effect. Use hf_zero.utils.safe_get_full_optimizer_state and "
        "safe_set_full_optimizer_state, the tensors in optimizer.param_groups, or optimizer.state.clear() to begin anew"
    )


class NamedStates(defaultdict[Any, Any]):
    """``optimizer.state`` of an engine, which raises where a script reads the state of a model's parameter: it has none, and an
    empty one would hide that. The engine itself uses ``dict``'s methods.
    """

    def __missing__(self, key: Any) -> Any:
        """Make an empty state.

        Raises:
            StateError: ``key`` is a parameter of an engine's model.
        """
        if text := foreign_state(key):
            raise StateError(text)
        return super().__missing__(key)

    def get(self, key: Any, default: Any = None) -> Any:  # type: ignore[override]
        """Return the state of ``key``; it raises as ``__missing__`` does."""
        if key not in self and (text := foreign_state(key)):
            raise StateError(text)
        return super().get(key, default)

    def __reduce__(self) -> Any:
        """Return a recipe for a plain ``defaultdict``: a copy has no engine."""
        return defaultdict, (self.default_factory,), None, None, iter(self.items())
