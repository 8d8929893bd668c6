"""SIGKILL at every phase of a save and at random moments: a run that resumes is the run that was never killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_zero.system.own_files import write_text
from tests.support import ranks
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps

WORLD = 2
RESUMED_WRONGLY = "resumed wrongly"
# Labels of observe.note inside a save, in order, and the step that a run resumes from when the save after step 2 is killed there.
PHASES = {
    "checkpoint_begun": 1,
    "checkpoint_file": 1,
    "checkpoint_written": 1,
    "checkpoint_sealed": 1,
    "checkpoint_named": 1,  # complete, but ``latest`` names the former one
    "checkpoint_latest": 1,
    "checkpoint_done": 2,
}


@dataclass(frozen=True)
class Plan:
    """How a process trains, and how it dies.

    Attributes:
        folder: Of the checkpoints.
        total: Steps of the whole run.
        tag: One name for all checkpoints; None: one for each step.
        background: Save in the background.
        phase: Die at this label ...
        at_step: ... of the save after this step.
        victims: Ranks that die.
        seconds: Die so long after the engine is there, whatever happens then.
    """

    folder: str
    total: int
    tag: str | None = None
    background: bool = False
    phase: str = ""
    at_step: int = 0
    victims: tuple[int, ...] = ()
    seconds: float = 0.0


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run(plan: Plan, reference: list[dict[str, Any]] | None = None) -> tuple[int, dict[str, Any], dict[str, Any], float]:
    """Resumes from what there is and trains to the end.

    Returns the step it began at, the state there and at the end, and the seconds from there to the end.
    With ``reference`` it looks at once whether it has begun where it may, so that runs that are killed later prove something too.
    """
    from hf_zero import observe

    engine = start(3, "bf16", **(IN_BACKGROUND if plan.background else {}))
    began = time.monotonic()
    timer = threading.Timer(plan.seconds, _die)
    timer.daemon = True
    if ranks.rank() in plan.victims and plan.seconds:  # not before: a new process takes longer to import than to train
        timer.start()
    engine.load_checkpoint(plan.folder)
    first, begin = engine.global_steps, full_state(engine)
    done = Path(plan.folder, "done")
    if reference is not None:
        acknowledged = int(done.read_text() or 0) if done.exists() else 0
        wrong = differences(begin, reference[first])
        if first < acknowledged or wrong:
            raise RuntimeError(f"{RESUMED_WRONGLY} at step {first} of {acknowledged} that were acknowledged: {wrong}")

    def listen(label: str) -> None:
        meant = engine.global_steps == plan.at_step if plan.tag else f"global_step{plan.at_step}" in label
        if ranks.rank() in plan.victims and plan.phase and plan.phase in label and meant:
            _die()

    observe._listeners.append(listen)
    try:
        for step in range(first, plan.total):
            steps(engine, step, 1, "bf16")
            engine.save_checkpoint(plan.folder, plan.tag)
            # What has been acknowledged must never be lost; in the background that is the save before this one.
            if ranks.rank() == 0:
                write_text(done, str(step if plan.background else step + 1))
        engine.wait_for_checkpoint()
    finally:
        observe._listeners.remove(listen)
        timer.cancel()
    seconds = time.monotonic() - began
    end = full_state(engine)
    engine.destroy()
    return first, begin, end, seconds


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The state after 0, 1, 2, ... steps of a run that nothing happens to."""
    states: list[dict[str, Any]] = ranks.run_ranks(_states, WORLD, 6)[0]
    return states


def _states(count: int) -> list[dict[str, Any]]:
    engine = start(3, "bf16")
    found = [full_state(engine)]
    for step in range(count):
        steps(engine, step, 1, "bf16")
        found.append(full_state(engine))
    engine.destroy()
    return found


def _resume(plan: Plan, reference: list[dict[str, Any]]) -> int:
    """Runs ``plan`` to its end; everything is as in the reference. Returns the step it began at."""
    for first, begin, end, _ in ranks.run_ranks(_run, WORLD, plan):
        assert differences(begin, reference[first]) == []
        assert differences(end, reference[plan.total]) == []
    left = sorted(path.name for path in Path(plan.folder).iterdir())
    assert not [name for name in left if name.startswith(".")], left
    return first


def _kill(plan: Plan) -> None:
    outcomes = ranks.observe_ranks(_run, WORLD, plan, grace=0.1)
    assert any(outcome.status == "died" for outcome in outcomes), [outcome.text for outcome in outcomes]


QUICK = {("checkpoint_file", True), ("checkpoint_latest", False)}


def _cases() -> list[Any]:
    cases = []
    for background in (False, True):
        for phase in PHASES:
            name = f"{phase}-background" if background else phase
            cases.append(pytest.param(phase, background, id=name, marks=() if (phase, background) in QUICK else pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("phase", "background"), _cases())
def test_all_ranks_killed_at_a_phase_of_a_save(tmp_path: Path, reference: Any, phase: str, background: bool) -> None:
    _kill(Plan(str(tmp_path), 3, background=background, phase=phase, at_step=2, victims=(0, 1)))
    first = _resume(Plan(str(tmp_path), 3, background=background), reference)
    assert first == PHASES[phase]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_one_rank_killed_while_it_writes(tmp_path: Path, reference: Any, background: bool) -> None:
    _kill(Plan(str(tmp_path), 3, background=background, phase="checkpoint_file", at_step=2, victims=(1,)))
    assert _resume(Plan(str(tmp_path), 3), reference) == 1


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("checkpoint_sealed", marks=pytest.mark.slow),
        "checkpoint_aside",
        pytest.param("checkpoint_named", marks=pytest.mark.slow),
    ],
)
def test_killed_while_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path, reference: Any, phase: str) -> None:
    _kill(Plan(str(tmp_path), 3, tag="t", phase=phase, at_step=2, victims=(0, 1)))
    assert _resume(Plan(str(tmp_path), 3, tag="t"), reference) == (2 if phase == "checkpoint_named" else 1)


@pytest.mark.slow
def test_killed_in_the_first_save_the_run_begins_anew(tmp_path: Path, reference: Any) -> None:
    _kill(Plan(str(tmp_path), 2, phase="checkpoint_sealed", at_step=1, victims=(0, 1)))
    assert _resume(Plan(str(tmp_path), 2), reference) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_kills_at_random_moments(tmp_path: Path, reference: Any, seed: int) -> None:
    """Fifty per seed, of one rank or all; the next process goes on from what is there, until the run is whole and a new one begins."""
    chance = random.Random(seed)
    total, kills, runs = 6, 0, 0
    folder = tmp_path / "run"
    seconds = ranks.run_ranks(_run, WORLD, Plan(str(tmp_path / "whole"), total))[0][-1]
    while kills < 50 or not runs:
        if kills > 25 and not runs:
            seconds *= 1.2  # the machine has more to do than when a whole run was timed
        folder.mkdir(exist_ok=True)
        victims = chance.choice([(0,), (1,), (0, 1)])
        mode: dict[str, Any] = {"background": chance.random() < 0.5, "tag": chance.choice([None, None, "t"])}
        plan = Plan(str(folder), total, victims=victims, seconds=chance.uniform(0.05, seconds), **mode)
        outcomes = ranks.observe_ranks(_run, WORLD, plan, reference, grace=0.1)
        assert not [outcome.text for outcome in outcomes if RESUMED_WRONGLY in outcome.text]
        if any(outcome.status == "died" for outcome in outcomes):
            kills += 1
            done = (folder / "done").read_text() if (folder / "done").exists() else 0
            print(f"{kills} kills within {seconds:.1f} s, {runs} whole runs, acknowledged step {done}")
            continue
        for outcome in outcomes:
            assert outcome.ok, outcome.text
            first, begin, end, _ = outcome.value
            assert differences(begin, reference[first]) == [] and differences(end, reference[total]) == []
        runs += 1
        shutil.rmtree(folder)
