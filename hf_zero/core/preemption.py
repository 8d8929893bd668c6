"""A signal that asks the ranks of an engine to end: who listens for it, and that all ranks have heard of it at the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from hf_zero.observe import log_rank0
from hf_zero.system import signals


@dataclass(frozen=True)
class PreemptionSettings:
    """What a configuration says of preemption.

    Attributes:
        number: Of the signal; 0 when none is listened for.
        chosen: The configuration names the signal itself, so it is listened for without further question.
        folder: Where a step saves that the ranks have agreed to end after; "" when the script or a library saves.
    """

    number: int = int(signal.SIGTERM)
    chosen: bool = False
    folder: str = ""


class Preemption:
    """What one engine knows of signals.

    Args:
        settings: From the configuration.

    Attributes:
        settings: The same.
        signal: Name of the signal that a rank has heard, the same on all ranks from the same step on; "" while there is none.
        asked: A script asks for it after its steps, so it saves and ends by itself.
        listens: The signal is listened for, alike on all ranks: one whose engine is not in the main thread hears of it through the others.
    """

    def __init__(self, settings: PreemptionSettings) -> None:
        self.settings = settings
        self.signal = ""
        self.asked = False
        self.listens = False
        self._stop: Callable[[bool], None] | None = None

    def listen(self) -> None:
        """Notes the signal from now on, until ``stop``; local."""
        self.listens = bool(self.settings.number)
        if self.listens and self._stop is None:
            self._stop = signals.listen(self.settings.number)

    def stop(self, deliver: bool = True) -> None:
        """Puts the former handler back; ``deliver`` to it what was heard and came to no boundary any more."""
        stop, self._stop, self.listens = self._stop, None, False
        if stop is not None:
            stop(deliver)

    def agree(self, number: int) -> None:
        """The ranks have agreed that signal ``number`` was heard by one of them."""
        signals.answer()
        if not self.signal:
            self.signal = signal.Signals(number).name
            log_rank0("a rank received %s: all ranks save a checkpoint and end after this step", self.signal)
