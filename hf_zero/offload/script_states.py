"""Let a script's looks at the states of an optimizer wait for updates that are still running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.core.optimizer.script_states import NamedStates
from hf_zero.offload.updates import in_update_thread


class WaitingStates(NamedStates):
    """``optimizer.state`` of an engine whose offloaded updates continue after ``step``; the engine itself uses ``dict``'s methods.

    Attributes:
        settle: Waits for running updates.
    """

    settle: Callable[[], None] = staticmethod(lambda: None)

    def _wait(self) -> None:
        if not in_update_thread():
            self.settle()

    def __getitem__(self, key: Any) -> Any:
        self._wait()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wait()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._wait()
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:  # type: ignore[override]
        """Return the state of ``key``."""
        self._wait()
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:  # type: ignore[override]
        """Remove the state of ``key`` and return it."""
        self._wait()
        return super().pop(key, *default)

    def items(self) -> Any:
        """Return parameters and their states."""
        self._wait()
        return super().items()

    def values(self) -> Any:
        """Return the states."""
        self._wait()
        return super().values()

    def clear(self) -> None:
        """Remove all states."""
        self._wait()
        super().clear()
