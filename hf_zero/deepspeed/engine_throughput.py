"""Counter behind ``engine.tput_timer``: the samples per second of an engine, from the first use of the timer on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import ref

from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.deepspeed.timers import ThroughputTimer


class EngineThroughput(ThroughputTimer):
    """Started by the engine's forwards for training, stopped by the micro-step's end; does not wait for the device.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: ConfiguredEngine) -> None:
        super().__init__(SimpleNamespace(enabled=True, synchronized=False), engine.samples_per_step)
        self._engine = ref(engine)
        engine.clock.watchers.append(self._watch)

    @contextmanager
    def _watch(self, phase: str) -> Iterator[None]:
        engine: Any = self._engine()
        if engine is not None and phase == "forward" and engine.training and not self.started:
            self.batch_size = engine.samples_per_step
            self.start()
        yield
        if engine is not None and (phase == "step" or (phase == "backward" and not engine.accumulation.boundary)):
            self.stop(global_step=phase == "step", report_speed=False)
