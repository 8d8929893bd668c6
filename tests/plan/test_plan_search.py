"""The search of ``hf-zero plan --fit``: how often it runs the engine, and its answer if Ctrl-C or ``--minutes`` stops it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_zero.cli import main
from hf_zero.errors import HfZeroError
from hf_zero.plan import fit
from hf_zero.plan.candidates import Layout, Space, tiers_of
from hf_zero.plan.command import settled
from hf_zero.plan.costs import Costs, Part, rates_of
from hf_zero.plan.few_blocks import blocks_of
from hf_zero.plan.inputs import Cluster, Hardware, ModelWish
from hf_zero.plan.planner import Planner
from hf_zero.plan.search import Search
from hf_zero.plan.workers import Task, Workers
from tests.support.planned import LLAMA


class MadeUp(Workers):
    """Tells made-up costs of what it is to plan."""

    def costs(self, tasks: Sequence[Task]) -> list[Costs | HfZeroError]:
        self.planned += len(tasks)
        return [self._told(task) for task in tasks]

    def _told(self, task: Task) -> Costs:
        zero, accumulation = task.config["zero_optimization"], task.config["gradient_accumulation_steps"]
        blocks, stage, again = task.model.settings["num_hidden_layers"], zero["stage"], task.model.checkpointing
        held = (18, 9, 8, 5)[stage] * (1 if "offload_optimizer" not in zero else 0.5) + task.load.micro_batch * (2 if again else 8)
        work = Part(1e15 * (4 if again else 3) * blocks, 0, 0, blocks * accumulation, 1e9 * blocks * (1 + stage), 0, 0)
        return Costs(blocks * held, blocks, 0, work, replace(work, flops=0.0), 0, 0, 0)


def planner_of(workers: MadeUp, memory: int) -> Planner:
    space = Space({}, 8, 64, [Layout()], tiers_of(False, ""))
    blocks = replace(blocks_of(ModelWish("llama", {**LLAMA, "num_hidden_layers": 40})), count=40)
    return Planner(space, blocks, Cluster(8, 8), Hardware(memory=memory), 16, "sdpa", settled, workers=workers)


@pytest.mark.parametrize(("memory", "most", "best"), [(2000, 54, "stage 0"), (700, 68, "stage 1"), (300, 56, "stage 1")])
def test_a_search_runs_the_engine_no_more_often_than_it_did(memory: int, most: int, best: str) -> None:
    workers = MadeUp()
    answer = Search(planner_of(workers, memory), rates_of({}, {}, 8, on_host=False)).run()
    assert str(answer.best[0].candidate).startswith(best)
    assert all(one.whole for one in answer.best)
    assert workers.planned == answer.planned <= most


def test_warnings_about_the_configuration_are_in_the_answer() -> None:
    searching = planner_of(MadeUp(), 2000)
    searching.space = replace(searching.space, base={"other_key": 1})
    rates = rates_of({}, {}, 8, on_host=False)
    answer = Search(searching, rates).run()
    assert any(line.startswith("- a run warns: `other_key` is ignored") for line in fit._lines(answer, searching, rates))
    (warning,) = fit._to_dict(answer, searching, rates)["warnings"]
    assert warning.startswith("`other_key`")


@dataclass
class Stopping(MadeUp):
    """Calls ``stop`` instead of more than ``most`` plans."""

    most: int = 0
    stop: Callable[[], object] = int

    def costs(self, tasks: Sequence[Task]) -> list[Costs | HfZeroError]:
        if self.planned >= self.most:
            self.stop()
        return super().costs(tasks)


@pytest.mark.parametrize("most", [0, 12, 30])
@pytest.mark.parametrize("by", ["Ctrl-C", "time"])
def test_a_search_that_is_stopped_has_the_best_so_far(by: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("hf_zero.plan.planner.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def interrupt() -> None:
        raise KeyboardInterrupt

    workers = Stopping(most=most, stop=interrupt if by == "Ctrl-C" else lambda: clock.__setitem__(0, 61.0))
    searching = planner_of(workers, memory=700)
    searching.until = 60.0
    rates = rates_of({}, {}, 8, on_host=False)
    answer = Search(searching, rates).run()
    assert answer.stopped == by and answer.planned <= most + 8  # the plans that run at the same time
    assert bool(answer.best) if most or by == "time" else not answer.best  # time is up after the first plans, Ctrl-C comes before them
    assert list(answer.best) == sorted(answer.best, key=lambda one: one.seconds)
    lines = fit._lines(answer, searching, rates)
    said = next(line for line in lines if line.startswith("STOPPED by " + {"time": "--minutes"}.get(by, by)))
    assert ("a faster candidate may exist" in said) == bool(answer.best) and not any("NOTHING FITS" in line for line in lines)
    assert fit._to_dict(answer, searching, rates)["stopped"] == by


def test_ctrl_c_prints_and_writes_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Planner._run

    def run(planner: Planner, tasks: list[Task]) -> list[Costs | HfZeroError]:
        if planner.workers.planned >= 6:
            raise KeyboardInterrupt
        return real(planner, tasks)

    monkeypatch.setattr(Planner, "_run", run)
    words = ["llama", *(word for name, value in LLAMA.items() for word in ("--set", f"{name}={value}"))]
    search = ["--fit", "--axes", "none", "--global-batch", "8", "--ranks", "2", "--memory", "1GB", "--sequence", "8", "--device", "cpu"]
    assert main(["plan", *words, *search, "--write", str(tmp_path / "best")]) == 130
    out = capsys.readouterr().out
    assert "STOPPED by Ctrl-C: a faster candidate may exist" in out and "\n1. stage" in out
    assert json.loads((tmp_path / "best" / "ds.json").read_text())["train_batch_size"] == 8
