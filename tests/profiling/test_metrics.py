"""Training records arrive where the sections of the config say."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hf_zero.config.resolve import resolve
from hf_zero.errors import ConfigError
from hf_zero.metrics import CsvSink, Sink, build_sinks

pytestmark = pytest.mark.quick

RECORD = {"Train/Samples/train_loss": 2.5, "Train/Samples/lr": 1e-4}


def sinks_of(config: dict[str, Any]) -> list[Sink]:
    return build_sinks(resolve(config).config)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_nothing_is_enabled_by_default() -> None:
    assert sinks_of({"csv_monitor": {"output_path": "x"}}) == []


def test_csv(tmp_path: Path) -> None:
    section = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    for run in range(2):  # the second run appends and writes no second head
        (sink,) = sinks_of(section)
        sink.write(RECORD, step=8 * (run + 1))
        sink.close()
        sink.close()
    files = {file.name: list(csv.reader(file.open())) for file in (tmp_path / "job").iterdir()}
    assert files == {
        "Train_Samples_train_loss.csv": [["step", "train_loss"], ["8", "2.5"], ["16", "2.5"]],
        "Train_Samples_lr.csv": [["step", "lr"], ["8", "0.0001"], ["16", "0.0001"]],
    }


def test_csv_default_folder_is_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (sink,) = sinks_of({"csv_monitor": {"enabled": True}})
    sink.close()
    assert (tmp_path / "DeepSpeedJobName").is_dir()


def test_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (sink,) = sinks_of({"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    sink.write(RECORD, step=4)
    sink.write({"Train/Samples/train_loss": 2.0}, step=8)
    sink.close()
    read = events.EventAccumulator(str(tmp_path / "job"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("Train/Samples/train_loss")] == [(4, 2.5), (8, 2.0)]
    assert [e.step for e in read.Scalars("Train/Samples/lr")] == [4]


class FakeRun:
    """Records what a tracker is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log(self, record: dict[str, float], **options: Any) -> None:
        self.calls.append(("log", record, options))

    def log_metrics(self, record: dict[str, float], step: int) -> None:
        self.calls.append(("log_metrics", record, step))

    def set_name(self, name: str) -> None:
        self.calls.append(("set_name", name))

    def finish(self) -> None:
        self.calls.append(("finish",))

    end = finish


def test_wandb_opens_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = FakeRun(), {}
    fake_module(monkeypatch, "wandb", run=None, init=lambda **options: asked.update(options) or run)
    (sink,) = sinks_of({"wandb": {"enabled": True, "team": "us", "group": "g", "project": "p"}})
    sink.write(RECORD, step=4)
    sink.close()
    sink.close()
    assert asked == {"project": "p", "group": "g", "entity": "us"}
    assert run.calls == [("log", RECORD, {"step": 4}), ("finish",)]


def test_wandb_joins_a_run_that_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun()
    fake_module(monkeypatch, "wandb", run=run, init=lambda **options: pytest.fail("a second run was opened"))
    (sink,) = sinks_of({"wandb": {"enabled": True}})
    sink.write(RECORD, step=4)
    sink.close()
    assert run.calls == [("log", {**RECORD, "hf_zero/step": 4}, {})], "its owner counts the steps and finishes it"


def test_comet_keeps_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = FakeRun(), {}
    fake_module(monkeypatch, "comet_ml", start=lambda **options: asked.update(options) or run)
    (sink,) = sinks_of(
        {"comet": {"enabled": True, "samples_log_interval": 10, "project": "p", "mode": "get", "experiment_name": "n", "online": False}}
    )
    for step in (4, 8, 13, 14, 24):
        sink.write(RECORD, step=step)
    sink.close()
    assert asked == {"project": "p", "mode": "get", "online": False}
    assert run.calls == [("set_name", "n"), *[("log_metrics", RECORD, step) for step in (4, 14, 24)], ("finish",)]


@pytest.mark.parametrize(
    ("section", "module", "package"),
    [("tensorboard", "torch.utils.tensorboard", "tensorboard"), ("wandb", "wandb", "wandb"), ("comet", "comet_ml", "comet_ml")],
)
def test_missing_package_is_named(section: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"`{section}\.enabled`.*pip install {package}"):
        sinks_of({section: {"enabled": True}})


def test_no_sink_stays_open_when_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = FakeRun()
    fake_module(monkeypatch, "wandb", run=None, init=lambda **options: run)
    fake_module(monkeypatch, "comet_ml", start=lambda **options: SimpleNamespace().missing)
    with pytest.raises(AttributeError):
        sinks_of({"wandb": {"enabled": True}, "comet": {"enabled": True}})
    assert run.calls == [("finish",)]


def test_sinks_share_one_interface() -> None:
    assert issubclass(CsvSink, Sink)
    with pytest.raises(TypeError):
        Sink()  # type: ignore[abstract]
