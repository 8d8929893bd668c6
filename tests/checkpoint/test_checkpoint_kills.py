"""SIGKILL at every phase of a save and at random moments: a run that resumes is the run that was never killed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.checkpoints import differences
from tests.support.killed_saves import PHASES, RESUMED_WRONGLY, WORLD, Plan, run, states


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The state after 0, 1, 2, ... steps of a run that nothing happens to."""
    found: list[dict[str, Any]] = ranks.run_ranks(states, WORLD, 6)[0]
    return found


def _resume(plan: Plan, reference: list[dict[str, Any]]) -> int:
    """Runs ``plan`` to its end; everything is as in the reference. Returns the step it began at."""
    for first, begin, end, _ in ranks.run_ranks(run, WORLD, plan):
        assert differences(begin, reference[first]) == []
        assert differences(end, reference[plan.total]) == []
    left = sorted(path.name for path in Path(plan.folder).iterdir())
    assert not [name for name in left if name.startswith(".")], left
    return first


def _kill(plan: Plan) -> None:
    outcomes = ranks.observe_ranks(run, WORLD, plan, grace=0.1)
    assert any(outcome.status == "died" for outcome in outcomes), [outcome.text for outcome in outcomes]


QUICK = {("checkpoint_file", True), ("checkpoint_latest", False)}


def _cases() -> list[Any]:
    cases = []
    for background in (False, True):
        for phase in PHASES:
            name = f"{phase}-background" if background else phase
            cases.append(pytest.param(phase, background, id=name, marks=() if (phase, background) in QUICK else pytest.mark.slow))
    return cases


@pytest.mark.fast_rows("checkpoint_latest")
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


@pytest.mark.slow  # fast: `test_all_ranks_killed_at_a_phase_of_a_save`
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
    seconds = ranks.run_ranks(run, WORLD, Plan(str(tmp_path / "whole"), total))[0][-1]
    while kills < 50 or not runs:
        if kills > 25 and not runs:
            seconds *= 1.2  # the machine has more to do than when a whole run was timed
        folder.mkdir(exist_ok=True)
        victims = chance.choice([(0,), (1,), (0, 1)])
        mode: dict[str, Any] = {"background": chance.random() < 0.5, "tag": chance.choice([None, None, "t"])}
        plan = Plan(str(folder), total, victims=victims, seconds=chance.uniform(0.05, seconds), **mode)
        outcomes = ranks.observe_ranks(run, WORLD, plan, reference, grace=0.1)
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
