"""Write training records to TensorBoard, Weights & Biases, Comet, Trackio and CSV files, as configured in their sections.

Only one rank writes. The caller builds sinks on rank 0 and passes records to them. Names are written unchanged, so dashboards made for
DeepSpeed keep working if the caller uses DeepSpeed's names (`Train/Samples/train_loss`, `Train/Samples/lr`, `Train/Samples/loss_scale`).
"""

from __future__ import annotations

import csv
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from hf_zero.errors import ConfigError
from hf_zero.system import own_files
from hf_zero.system.folder import Folder

if TYPE_CHECKING:
    from hf_zero.config.schema.monitoring import Comet, CsvMonitor, Tensorboard, Trackio, Wandb


class EventWriter:
    """A writer with DeepSpeed's interface for a script's own records; ``engine.monitor`` is one.

    Args:
        sinks: Sinks to write to; empty on ranks that do not write.

    Attributes:
        enabled: Whether there is a sink.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks
        self.enabled = bool(sinks)

    def write_events(self, event_list: Sequence[tuple[Any, ...]], flush: bool = True) -> None:
        """Write events to all sinks.

        Args:
            event_list: Tuples (name, value, step); further elements of a tuple are ignored.
            flush: Has no effect, because every record is flushed.
        """
        for name, value, step, *_ in event_list:
            for sink in self.sinks:
                sink.write({name: float(value)}, int(step))


class Sink(ABC):
    """A destination of training records."""

    @abstractmethod
    def write(self, record: Mapping[str, float], step: int) -> None:
        """Write one record.

        Args:
            record: Name -> value, for example loss, learning rate, gradient norm and loss scale.
            step: Position on the horizontal axis, which must not decrease; DeepSpeed uses the number of samples.
        """

    @abstractmethod
    def close(self) -> None:
        """Flush and release files and connections of the sink. A second call does nothing."""


class MonitorSections(Protocol):
    """Interface of an object with the monitor sections: a complete configuration, or DeepSpeed's monitor configuration."""

    @property
    def tensorboard(self) -> Tensorboard:
        """Return the section ``tensorboard``."""

    @property
    def wandb(self) -> Wandb:
        """Return the section ``wandb`` (Weights & Biases)."""

    @property
    def comet(self) -> Comet:
        """Return the section ``comet``."""

    @property
    def csv_monitor(self) -> CsvMonitor:
        """Return the section ``csv_monitor`` (CSV files)."""

    @property
    def trackio(self) -> Trackio:
        """Return the section ``trackio``."""


def build_sinks(config: MonitorSections) -> list[Sink]:
    """Return the sinks whose sections are enabled, in the order tensorboard, wandb, comet, csv_monitor, trackio. Call it on one rank only.

    Raises:
        ConfigError: A section is enabled but its package is not installed. No sink is left open.
    """
    sinks: list[Sink] = []
    try:
        if config.tensorboard.enabled:
            sinks.append(TensorboardSink(config.tensorboard))
        if config.wandb.enabled:
            sinks.append(WandbSink(config.wandb))
        if config.comet.enabled:
            sinks.append(CometSink(config.comet))
        if config.csv_monitor.enabled:
            sinks.append(CsvSink(config.csv_monitor))
        if config.trackio.enabled:
            sinks.append(TrackioSink(config.trackio))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _import(section: str, module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"`{section}.enabled` is true but the package {package} cannot be imported ({error}). "
            f"Install it (pip install {package}) or set `{section}.enabled` to false"
        ) from error


def _open_folder(name: str, section: Tensorboard | CsvMonitor) -> Folder:
    """Create and open the folder of a file sink. ``output_path`` may be a symbolic link, ``job_name`` below it must not be one.

    Raises:
        ConfigError: The folder cannot be created, or ``job_name`` is a symbolic link.
    """
    base = Path(section.output_path or ".").expanduser()
    try:
        return own_files.make_inner(base, section.job_name)
    except OSError as error:
        raise ConfigError(
            f"`{name}`: the folder {str(base / section.job_name)!r} cannot be used: {error}. job_name must be a folder below output_path, "
            "not a symbolic link. Set another output_path or job_name"
        ) from error


class TensorboardSink(Sink):
    """A sink that writes TensorBoard event files in `<output_path>/<job_name>`.

    Attributes:
        writer: torch's `SummaryWriter`.
    """

    def __init__(self, section: Tensorboard) -> None:
        tensorboard = _import("tensorboard", "torch.utils.tensorboard", "tensorboard")
        with _open_folder("tensorboard", section) as folder:
            self.writer = tensorboard.SummaryWriter(log_dir=str(folder.path))

    def write(self, record: Mapping[str, float], step: int) -> None:
        for name, value in record.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbSink(Sink):
    """A sink that logs to the active Weights & Biases run (for example a tracker's); it starts its own run if none is active."""

    def __init__(self, section: Wandb) -> None:
        wandb = _import("wandb", "wandb", "wandb")
        self._own = wandb.run is None
        self._run = wandb.init(project=section.project, group=section.group, entity=section.team) if self._own else wandb.run

    def write(self, record: Mapping[str, float], step: int) -> None:
        if self._own:
            self._run.log(dict(record), step=step)
        else:  # the run's owner counts its steps; wandb drops records with a smaller step
            self._run.log({**record, "hf_zero/step": step})

    def close(self) -> None:
        if self._own:
            self._run.finish()
        self._own = False


class CometSink(Sink):
    """A sink that logs to a Comet experiment, at most once every `samples_log_interval` steps.

    Attributes:
        experiment: The experiment object of comet_ml.
    """

    def __init__(self, section: Comet) -> None:
        comet = _import("comet", "comet_ml", "comet_ml")
        options = {
            "api_key": section.api_key,
            "project": section.project,
            "workspace": section.workspace,
            "experiment_key": section.experiment_key,
            "mode": section.mode,
            "online": section.online,
        }
        self.experiment = comet.start(**{name: value for name, value in options.items() if value is not None})
        if section.experiment_name is not None:
            self.experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
        self._last: int | None = None

    def write(self, record: Mapping[str, float], step: int) -> None:
        if self._last is not None and step - self._last < self._interval:
            return
        self._last = step
        self.experiment.log_metrics(dict(record), step=step)

    def close(self) -> None:
        self.experiment.end()


class TrackioSink(Sink):
    """A sink that logs to its own Trackio run."""

    def __init__(self, section: Trackio) -> None:
        self._trackio: Any = _import("trackio", "trackio", "trackio")
        self._trackio.init(project=section.project)

    def write(self, record: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(record), step=step)

    def close(self) -> None:
        if self._trackio is not None:
            self._trackio.finish()
        self._trackio = None


class CsvSink(Sink):
    """A sink that writes one CSV file per record name in `<output_path>/<job_name>`; later runs append.

    The columns are `step` and, as in DeepSpeed's files, the part of the name after the last `/`.
    """

    def __init__(self, section: CsvMonitor) -> None:
        self._folder = _open_folder("csv_monitor", section)
        self._files: dict[str, IO[str]] = {}
        self._taken: dict[str, str] = {}  # case-folded file name -> name of the record in that file

    def write(self, record: Mapping[str, float], step: int) -> None:
        for name, value in record.items():
            file = self._files.get(name) or self._open(name)
            csv.writer(file).writerow([step, value])
            file.flush()

    def _open(self, name: str) -> IO[str]:
        safe = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)
        number = next(n for n in count(1) if self._taken.setdefault(_numbered(safe, n).casefold(), name) == name)
        try:
            file = own_files.append_to(self._folder, _numbered(safe, number))
        except OSError as error:
            raise ConfigError(f"`csv_monitor` cannot write the record {name!r}: {error}. Set another output_path or job_name") from error
        if file.tell() == 0:
            csv.writer(file).writerow(["step", name.rsplit("/", 1)[-1]])
        self._files[name] = file
        return file

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._folder.close()


def _numbered(name: str, number: int) -> str:
    """Return the file name of the ``number``-th record with the escaped name ``name`` (``a/b`` and ``a_b``, or ``Loss`` and ``loss``)."""
    return f"{name}.csv" if number == 1 else f"{name}-{number}.csv"
