"""DeepSpeed's monitors for scripts that write records of their own: `MonitorMaster` over the configured sinks, and each kind alone."""

from __future__ import annotations

from typing import Any, TypeVar

from hf_zero.config.view import MonitorView
from hf_zero.metrics import CometSink, CsvSink, EventWriter, Sink, TensorboardSink, TrackioSink, WandbSink, build_sinks
from hf_zero.observe import global_rank


class MonitorMaster(EventWriter):
    """Writes events to every monitor that is switched on; rank 0 does.

    Args:
        monitor_config: ``DeepSpeedConfig(...).monitor_config``.

    Attributes:
        tb_monitor: TensorBoard alone; None where it is off, and on other ranks than 0.
        wandb_monitor: Weights & Biases, likewise.
        comet_monitor: Comet, likewise.
        csv_monitor: CSV files, likewise.
        trackio_monitor: Trackio, likewise.

    Raises:
        ConfigError: A monitor is on whose package is not installed.
    """

    def __init__(self, monitor_config: MonitorView) -> None:
        super().__init__(build_sinks(monitor_config) if global_rank() == 0 else [])
        self.enabled = monitor_config.enabled
        self.tb_monitor = self._alone(TensorBoardMonitor, TensorboardSink, monitor_config)
        self.wandb_monitor = self._alone(WandbMonitor, WandbSink, monitor_config)
        self.comet_monitor = self._alone(CometMonitor, CometSink, monitor_config)
        self.csv_monitor = self._alone(csvMonitor, CsvSink, monitor_config)
        self.trackio_monitor = self._alone(TrackioMonitor, TrackioSink, monitor_config)

    def _alone(self, kind: type[_Kind], sink: type[Sink], monitor_config: MonitorView) -> _Kind | None:
        """Return the monitor of one kind over the sink that there is."""
        own = [mine for mine in self.sinks if isinstance(mine, sink)]
        return kind(getattr(monitor_config, kind.kind), own) if own else None


class _Single(EventWriter):
    """One kind of monitor, from its section; the section's keys are attributes.

    Args:
        config: The section.
        sinks: Monitors that are already open; None opens them, on rank 0.
    """

    kind: str

    def __init__(self, config: Any, sinks: list[Sink] | None = None) -> None:
        if sinks is None:
            alone = MonitorView.__new__(MonitorView)
            for name, value in _switched_off().items():
                setattr(alone, name, config if name == self.kind else value)
            sinks = build_sinks(alone) if config.enabled and global_rank() == 0 else []
        super().__init__(sinks)
        self.enabled = config.enabled
        self._section = config

    def __getattr__(self, name: str) -> Any:
        if name == "_section":
            raise AttributeError(name)
        return getattr(self._section, name)


class TensorBoardMonitor(_Single):
    """TensorBoard alone."""

    kind = "tensorboard"

    @property
    def summary_writer(self) -> Any:
        """Return torch's ``SummaryWriter``, for images, texts, histograms; None where it is off, and on other ranks than 0."""
        return next((sink.writer for sink in self.sinks if isinstance(sink, TensorboardSink)), None)


class WandbMonitor(_Single):
    """Weights & Biases alone."""

    kind = "wandb"


class CometMonitor(_Single):
    """Comet alone."""

    kind = "comet"

    @property
    def experiment(self) -> Any:
        """Return comet_ml's experiment; None where it is off, and on other ranks than 0."""
        return next((sink.experiment for sink in self.sinks if isinstance(sink, CometSink)), None)


class csvMonitor(_Single):  # noqa: N801  (DeepSpeed's name)
    """CSV files alone."""

    kind = "csv_monitor"


class TrackioMonitor(_Single):
    """Trackio alone."""

    kind = "trackio"


_Kind = TypeVar("_Kind", bound=_Single)


def _switched_off() -> dict[str, Any]:
    from hf_zero.config.schema import monitors

    return {
        "tensorboard": monitors.Tensorboard(),
        "wandb": monitors.Wandb(),
        "comet": monitors.Comet(),
        "csv_monitor": monitors.CsvMonitor(),
        "trackio": monitors.Trackio(),
    }
