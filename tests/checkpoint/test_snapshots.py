"""Snapshots in host memory: ranks that torchrun starts again go on from the newest one, bit for bit, as if none had died."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.processes import PATIENCE
from tests.support.snapshot_runs import attempts, launch, start_agent, train_trainer, undisturbed

TOTAL = 9


def _plan(kills: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {"total": TOTAL, "stage": 3, "dtype": "bf16", "extra": {}, "kills": kills, "disk_at": 1, "waits": True, **changes}


def _reference(plan: dict[str, Any]) -> tuple[list[list[Any]], str]:
    return ranks.run_ranks(undisturbed, 2, plan["total"], plan["stage"], plan["dtype"], plan["extra"])[0]


def test_a_loop_and_a_trainer_go_on_after_kills(tmp_path: Path, trainer_models: Path) -> None:
    """Kill a rank inside a snapshot of a loop, then one under the Trainer that the same script runs after it."""
    plan = _plan([{"rank": 1, "label": "checkpoint_file", "of": 6}, {"rank": 0, "trainer": True, "step": 5}], models=str(trainer_models))
    done = launch(tmp_path, plan)
    assert done.returncode == 0, done.stderr[-6000:]
    found = attempts(tmp_path)
    # The last attempt trains the loop again, from its checkpoint on disk: its snapshots went at the end of its training.
    assert [one["began"] for one in found] == [0, 4, 1]
    assert f"{tmp_path}/memory/hf_zero-" in found[1]["from"]
    seen, end = _reference(plan)
    assert found[1]["seen"] == seen and found[1]["end"] == end
    whole = tmp_path / "whole"
    whole.mkdir()
    logs, last = ranks.run_ranks(train_trainer, 2, whole, trainer_models, None)[0]
    assert found[2]["trainer"] == {**last, "began": 4}, "from the snapshot, not from checkpoint-3"
    assert repr(found[2]["logs"]) == repr(logs)
    assert list((tmp_path / "memory").iterdir()) == [], "the end of the run removes the snapshots"


def _wait_for(path: Path) -> None:
    while not path.exists():  # pytest's time limit ends it
        time.sleep(0.05)


@pytest.mark.slow
def test_a_lost_node_gets_its_files_from_the_next_one(tmp_path: Path) -> None:
    plan = _plan([], hold_at=5, disk_at=1)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    port = ranks._free_port()
    agents = [start_agent(tmp_path, port, 3)]
    time.sleep(2)  # the first one keeps the store
    agents.append(start_agent(tmp_path, port, 3))
    try:
        for rank in range(2):
            _wait_for(tmp_path / f"held_{rank}")
        pids = [int((tmp_path / f"held_{rank}").read_text()) for rank in range(2)]
        lost = agents[1].pid
        for pid in [lost, *(pid for pid in pids if _parent(pid) == lost)]:
            os.kill(pid, signal.SIGKILL)
        (memory,) = (tmp_path / "memory").glob(f"hf_zero-*-{lost}-*")
        shutil.rmtree(memory)
        agents.append(start_agent(tmp_path, port, 3))
        (tmp_path / "go").touch()
        for agent in (agents[0], agents[2]):
            agent.wait(300 * PATIENCE)
        assert [agents[0].returncode, agents[2].returncode] == [0, 0], _logs(tmp_path)
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    found = attempts(tmp_path)
    assert [one["began"] for one in found] == [0, 4], _logs(tmp_path)
    seen, end = _reference(plan)
    assert found[-1]["seen"] == seen and found[-1]["end"] == end
    assert "copied to nodes that lack them" in _logs(tmp_path)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(folder.glob("agent_*.log")))
