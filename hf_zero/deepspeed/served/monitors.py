"""Provide DeepSpeed's monitors for scripts that write their own records: `MonitorMaster` for all configured sinks, and one per kind."""

from __future__ import annotations

from typing import Any, TypeVar

from hf_zero.config.view import MonitorView
from hf_zero.metrics import CometSink, CsvSink, EventWriter, Sink, TensorboardSink, TrackioSink, WandbSink, build_sinks
from hf_zero.observe import global_rank


class MonitorMaster(EventWriter):
    """A writer of events to every enabled monitor; only rank 0 writes.

    Args:
        monitor_config: ``DeepSpeedConfig(...).monitor_config``.

    Attributes:
        tb_monitor: Monitor of TensorBoard only; None if it is disabled, and on other ranks than 0 (as the following).
        wandb_monitor: Monitor of Weights & Biases only.
        comet_monitor: Monitor of Comet only.
        csv_monitor: Monitor of CSV files only.
        trackio_monitor: Monitor of Trackio only.

    Raises:
        ConfigError: A monitor is enabled, but its package is not installed.
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
        """Return a monitor of one kind for the open sink of that kind; None if there is no such sink."""
        own = [mine for mine in self.sinks if isinstance(mine, sink)]
        return kind(getattr(monitor_config, kind.kind), own) if own else None


class _Single(EventWriter):
    """Base class of a monitor of one kind; the keys of its section are attributes.

    Args:
        config: Section of the configuration.
        sinks: Sinks that are already open; None opens the sink, on rank 0.
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
    """A monitor that writes to TensorBoard only."""

    kind = "tensorboard"

    @property
    def summary_writer(self) -> Any:
        """Return torch's ``SummaryWriter``, for images, texts, histograms; None if TensorBoard is disabled, and on other ranks than 0."""
        return next((sink.writer for sink in self.sinks if isinstance(sink, TensorboardSink)), None)


class WandbMonitor(_Single):
    """A monitor that writes to Weights & Biases only."""

    kind = "wandb"


class CometMonitor(_Single):
    """A monitor that writes to Comet only."""

    kind = "comet"

    @property
    def experiment(self) -> Any:
        """Return comet_ml's experiment object; None if Comet is disabled, and on other ranks than 0."""
        return next((sink.experiment for sink in self.sinks if isinstance(sink, CometSink)), None)


class csvMonitor(_Single):  # noqa: N801  (DeepSpeed's name)
    """A monitor that writes to CSV files only."""

    kind = "csv_monitor"


class TrackioMonitor(_Single):
    """A monitor that writes to Trackio only."""

    kind = "trackio"


_Kind = TypeVar("_Kind", bound=_Single)


def _switched_off() -> dict[str, Any]:
    from hf_zero.config.schema import monitoring

    return {
        "tensorboard": monitoring.Tensorboard(),
        "wandb": monitoring.Wandb(),
        "comet": monitoring.Comet(),
        "csv_monitor": monitoring.CsvMonitor(),
        "trackio": monitoring.Trackio(),
    }
