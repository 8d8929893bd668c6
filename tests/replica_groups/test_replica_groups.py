"""Replica groups that die and come back: the others go on, and all end with the weights of plain PyTorch on the batches that were taken."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint.replica_kills import plan_of
from benchmarks.collectives.slow_network import why_not
from tests.replica_groups.group_run import PLACES
from tests.replica_groups.history import check, deaths_of
from tests.support.processes import REPO, environment

pytestmark = pytest.mark.slow
torchft = pytest.importorskip("torchft", reason="torchft is not installed: pip install 'hf_zero[replicas]'")


# A machine with much other work keeps a group silent for seconds. A group that is left out for that ends, and is started again.
_UNDER_LOAD = {"heartbeat": 5000, "failures": 20}


def _run(folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Carry out a plan, check it, and return its steps and its deaths."""
    plan = {"groups": 2, "ranks": 1, "steps": 16, "stage": 3, "accumulation": 1, "limit": 1800, "deaths": {}, **_UNDER_LOAD, **changes}
    (folder / "plan.json").write_text(json.dumps(plan))
    variables = environment({"OMP_NUM_THREADS": "1", "RUST_LOG": "off"})
    done = subprocess.run(
        [sys.executable, "-m", "tests.replica_groups.agents", str(folder)], cwd=REPO, env=variables, capture_output=True, text=True
    )
    logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("log-*"))[:8])
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{logs}"
    return check(folder, plan, plan.get("gamma", 0.9)), deaths_of(folder)


def _death(place: str, rank: int = 0, after: int = 2, kind: str = "rank", lone: bool = True) -> dict[str, Any]:
    return {"rank": rank, "after": after, "place": place, "kind": kind, "lone": lone}


@pytest.mark.parametrize(("stage", "ranks", "accumulation"), [(0, 1, 1), (1, 2, 2), (2, 1, 1), (3, 2, 1)])
def test_a_group_dies_at_each_place_of_a_step(tmp_path: Path, stage: int, ranks: int, accumulation: int) -> None:
    deaths = [_death(place, rank=index % ranks, lone=index % 2 == 0) for index, place in enumerate(PLACES)]
    steps, died = _run(tmp_path, stage=stage, ranks=ranks, accumulation=accumulation, steps=60, deaths={"1": deaths})
    assert [death["place"] for death in died] == list(PLACES)
    assert {tuple(step["taken"]) for step in steps} == {("0", "1"), ("0",)}


@pytest.mark.parametrize(
    ("how", "stage", "ranks", "accumulation", "gamma"),
    [("accelerate", 3, 2, 2, 0.9), ("accelerate", 1, 1, 1, 0.9), ("trainer", 2, 1, 1, 1.0), ("trainer", 3, 2, 2, 1.0)],
)
def test_scripts_of_accelerate_and_trainer(tmp_path: Path, how: str, stage: int, ranks: int, accumulation: int, gamma: float) -> None:
    deaths = {"1": [_death("inside"), _death("averaged", lone=False)], "0": [_death("backward")]}
    _, died = _run(tmp_path, how=how, stage=stage, ranks=ranks, accumulation=accumulation, gamma=gamma, steps=30, deaths=deaths)
    assert len(died) == 3
    for path in tmp_path.glob("trainer-*"):
        assert json.loads(path.read_text())["global_step"] == 30, "a Trainer that came back counts the steps of the run"


@pytest.mark.parametrize(("how", "stage"), [("engine", 3), ("accelerate", 3), ("engine", 1), ("engine", 2)])
def test_a_step_that_only_the_other_group_has_taken(tmp_path: Path, how: str, stage: int) -> None:
    """An exchange fails on one rank of a group when the other group is past it: the group gets the state after the step, and goes on."""
    deaths = {"1": [_death("averaged", rank=1, after=3, kind="error")]}
    steps, _ = _run(tmp_path, how=how, stage=stage, ranks=2, deaths=deaths)
    assert all(set(step["taken"]) == {"0", "1"} for step in steps), "its batch was part of the step"
    assert not list(tmp_path.glob("attempt-*-1")), "no group was started again"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_group_that_was_frozen_and_left_out_ends_and_returns(tmp_path: Path, stage: int) -> None:
    """Its loader has read batches that the other group has taken meanwhile."""
    deaths = {"1": [_death("averaged", kind="pause"), _death("forward", kind="pause")]}
    steps, _ = _run(tmp_path, timeout=4, steps=30, stage=stage, deaths=deaths)
    assert any(set(step["taken"]) == {"0"} for step in steps)
    said = "".join(path.read_text() for path in tmp_path.glob("log-1-*"))
    assert "was left out of a step, and the batches that its loader has read were given to other groups" in said


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_random_kills_of_ranks_and_launchers(tmp_path: Path, stage: int) -> None:
    plan = plan_of(random.Random(stage), kills=8, nodes=0, groups=3)
    _, died = _run(tmp_path, **{**plan, "stage": stage, "limit": 3000})
    assert len(died) == 8


def test_torchrun_starts_the_groups_again(tmp_path: Path) -> None:
    deaths = {"1": [_death("averaged", rank=1, lone=False), _death("forward", lone=False)], "0": [_death("voted", rank=1, lone=False)]}
    _, died = _run(tmp_path, torchrun=True, ranks=2, steps=24, deaths=deaths)
    assert len(died) == 3
    assert not list(tmp_path.glob("attempt-*")), "no launcher of our own"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_node_is_lost_without_a_word(tmp_path: Path, stage: int) -> None:
    if reason := why_not():
        pytest.skip(reason)
    deaths = {"1": [_death("averaged", kind="node"), _death("forward", kind="node")]}
    steps, died = _run(tmp_path, stage=stage, ranks=2, nodes=True, timeout=4, deaths=deaths)
    assert [death["kind"] for death in died] == ["node", "node"]
    assert any(set(step["taken"]) == {"0"} for step in steps)
