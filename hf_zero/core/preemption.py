"""Listen for a signal that asks the ranks of an engine to end, and make all ranks notice it at the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from hf_zero.observe import announce
from hf_zero.system import signals


@dataclass(frozen=True)
class PreemptionSettings:
    """Settings of preemption from a configuration.

    Attributes:
        number: Number of the signal; 0 listens for none.
        chosen: Whether the configuration names the signal itself; then the engine always listens for it.
        folder: Folder for the checkpoint of the step after which the ranks end; "" if the script or a library saves.
    """

    number: int
    chosen: bool = False
    folder: str = ""


class Preemption:
    """State of one engine's preemption.

    Args:
        settings: Settings from the configuration.

    Attributes:
        settings: The argument ``settings``.
        signal: Name of the signal that a rank has received, the same on all ranks from the same step on; "" while there is none.
        asked: Whether the script reads ``signal`` after its steps, so that it saves and ends by itself.
        listens: Whether the ranks listen; the same on all ranks. A rank whose engine is not in the main thread learns of the signal from
            other ranks.
    """

    def __init__(self, settings: PreemptionSettings) -> None:
        self.settings = settings
        self.signal = ""
        self.asked = False
        self.listens = False
        self._stop: Callable[[bool], None] | None = None

    def listen(self) -> None:
        """Begin to record the signal, until ``stop``; local."""
        self.listens = bool(self.settings.number)
        if self.listens and self._stop is None:
            self._stop = signals.listen(self.settings.number)

    def stop(self, deliver: bool = True) -> None:
        """Restore the former handler; ``deliver`` passes it a signal that was received and has not been handled at a boundary."""
        stop, self._stop, self.listens = self._stop, None, False
        if stop is not None:
            stop(deliver)

    def agree(self, number: int) -> None:
        """Record that the ranks have agreed that one of them received signal ``number``."""
        signals.answer()
        if not self.signal:
            self.signal = signal.Signals(number).name
            announce(f"a rank received {self.signal}: all ranks save a checkpoint and end after this step")
