"""Snapshots in host memory: ranks that torchrun starts again go on from the newest one, bit for bit, as if none had died."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero import observe
from hf_zero.checkpoint import snapshots
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.observe import logger
from hf_zero.system import launcher_folders
from hf_zero.system.process import Process
from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start
from tests.support.processes import PATIENCE
from tests.support.snapshot_runs import attempts, launch, start_agent, train, train_trainer, undisturbed

TOTAL = 9


def _plan(kills: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {"total": TOTAL, "stage": 3, "dtype": "bf16", "extra": {}, "kills": kills, "disk_at": 1, "waits": True, **changes}


def _reference(plan: dict[str, Any]) -> tuple[list[list[Any]], str]:
    return ranks.run_ranks(undisturbed, 2, plan["total"], plan["stage"], plan["dtype"], plan["extra"])[0]


RESTARTED = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}


def test_a_trainer_goes_on_in_new_processes(tmp_path: Path, trainer_models: Path) -> None:
    """End an attempt by ``sys.exit``; ranks of the pool that replace its ranks are children of the same process, as under a launcher."""
    ended, whole = tmp_path / "ended", tmp_path / "whole"
    for folder in (ended, whole):
        folder.mkdir()
    logs, last = ranks.run_ranks(train_trainer, 2, whole, trainer_models, None)[0]
    kill = {"rank": 0, "step": 5, "exits": True}
    outcomes = ranks.observe_ranks(train_trainer, 2, ended, trainer_models, kill, timeout=600.0, grace=1.0, env=RESTARTED)
    assert "SystemExit: 3" in outcomes[0].text, outcomes
    found, again = ranks.run_ranks(train_trainer, 2, ended, trainer_models, None, env=RESTARTED)[0]
    assert again == {**last, "began": 4}, "from the snapshot, not from checkpoint-3"
    assert repr(found) == repr(logs)


@pytest.mark.slow  # the tests before and after have its parts, without torchrun
def test_a_loop_and_a_trainer_go_on_after_kills(tmp_path: Path, trainer_models: Path) -> None:
    """Kill a rank inside a snapshot of a loop, then end one by ``sys.exit`` under the Trainer that the same script runs after it."""
    kills = [{"rank": 1, "label": "checkpoint_file", "of": 6}, {"rank": 0, "trainer": True, "step": 5, "exits": True}]
    plan = _plan(kills, models=str(trainer_models))
    done = launch(tmp_path, plan)
    assert done.returncode == 0, done.stderr[-6000:]
    found = attempts(tmp_path)
    # The last attempt trains the loop again, from its checkpoint on disk: its snapshots went at the end of its training.
    assert [one["began"] for one in found] == [0, 4, 1]
    assert f"{tmp_path}/memory/hf_zero-" in found[1]["from"]
    seen, end = _reference(plan)
    assert all(one["seen"] == seen and one["end"] == end for one in found[1:])
    whole = tmp_path / "whole"
    whole.mkdir()
    logs, last = ranks.run_ranks(train_trainer, 2, whole, trainer_models, None)[0]
    assert found[2]["trainer"] == {**last, "began": 4}, "from the snapshot, not from checkpoint-3"
    assert repr(found[2]["logs"]) == repr(logs)
    assert list((tmp_path / "memory").iterdir()) == [], "the end of the run removes the snapshots"


PHASES = ("begun", "file", "written", "sealed", "named", "done")  # of a save, all but the second on rank 0


def _random_kills(chance: random.Random, count: int) -> list[dict[str, Any]]:
    kills: list[dict[str, Any]] = []
    for _ in range(count):
        rank, phase = chance.randrange(2), chance.choice(PHASES)
        inside = {"rank": rank if phase == "file" else 0, "label": f"checkpoint_{phase}", "of": 2 * chance.randrange(1, 20)}
        kills.append(
            chance.choice([{"rank": rank, "seconds": chance.uniform(0, 1.2)}, inside, {"rank": rank, "step": chance.randrange(1, 40)}])
        )
    return kills


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype", "offload"), [(3, "bf16", False), (2, "bf16", False), (1, "fp16", False), (3, "fp32", True)])
def test_random_kills(tmp_path: Path, stage: int, dtype: str, offload: bool) -> None:
    """Kill ranks at random moments and inside snapshots; those of a plan that a faster run passes by do not happen."""
    extra = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}}
    kills = _random_kills(random.Random(stage), 6)
    plan = _plan(kills, total=40, stage=stage, dtype=dtype, extra=extra if offload else {}, waits=False)
    done = launch(tmp_path, plan)
    found = attempts(tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    seen, end = _reference(plan)
    assert [step for step, *_ in seen] == list(range(40))
    assert found[-1]["seen"] == seen and found[-1]["end"] == end, (kills, [one["began"] for one in found])
    assert list((tmp_path / "memory").iterdir()) == []


def _engine(folder: Path, **extra: Any) -> Any:
    """Return the engine of a new process of this run: the first training of that process."""
    snapshots._made, snapshots._open[:] = 0, []
    return start(3, "bf16", hf_zero={"snapshot_steps": 2, "snapshot_folder": str(folder)}, **extra)


def _written(engine: Any) -> Path:
    """Return the folder of the snapshots when the last one is written."""
    engine.checkpoints.snapshots._background.finish(engine.checkpoints.everyone())
    return Path(engine.checkpoints.snapshot_folder)


def _files_in(folder: Path) -> dict[str, int]:
    """Return the files of ranks in a snapshot with their places in the file system."""
    return {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}


def _refusals(folder: Path) -> list[str]:
    told: list[str] = []
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    dead = launcher_folders.folder_of(Process(Process.own().place, Process.own().pid, "0"), folder)
    if ranks.rank() == 0:
        (dead / "1").mkdir(parents=True)
    torch.distributed.barrier()
    first = _engine(folder)
    assert not dead.exists(), "a launcher that has ended left it"
    with pytest.raises(ConfigError, match="two training engines"):
        start(3, "bf16", hf_zero={"snapshot_steps": 2, "snapshot_folder": str(folder)})
    seen: list[list[Any]] = []
    with mock.patch.object(snapshots, "_free", lambda _: 1000):
        with pytest.raises(CheckpointError, match=r"a snapshot takes .* are needed, and .* has .* free") as refused:
            train(first, 2, "bf16", seen)
    assert ranks.rank() == 0 or refused.value.args  # the same text is compared below
    train(first, 4, "bf16", seen)
    kept = _written(first)
    assert [path.name for path in kept.iterdir() if path.is_dir()] == ["global_step4"]
    with mock.patch.object(snapshots, "_free", lambda _: 1000):
        train(first, 6, "bf16", seen)
    assert _written(first) == kept and not (kept / "global_step6").exists(), "left out, and training goes on"
    nbytes = first.checkpoints.snapshots._bytes
    # Room for two: the older of them goes before the next one is written.
    with mock.patch.object(snapshots, "_free", lambda folder: nbytes * (2 - len(list(folder.glob("global_step*"))))):
        for step in (8, 10):
            places = _files_in(kept / "global_step4")
            train(first, step, "bf16", seen)
            _written(first)  # a snapshot that is still being written leaves the next one out
    assert places and places == _files_in(kept / "global_step10"), "each file was written over the one of the snapshot before the last"
    assert sorted(path.name for path in kept.glob("global_step*")) == ["global_step10", "global_step8"]
    broken = mock.patch("hf_zero.checkpoint.save.write_tensor_file", side_effect=OSError(28, "No space left on device"))
    with broken if ranks.rank() else contextlib.nullcontext():
        train(first, 12, "bf16", seen)
        first.checkpoints.snapshots.finish(first.checkpoints.everyone())
    assert first.checkpoints.snapshots.kept == "global_step10", "rank 0 has written over its files of step 8, rank 1 has failed"
    train(first, 14, "bf16", seen)
    _written(first)
    assert sorted(path.name for path in kept.glob("*global_step*")) == ["global_step10", "global_step14"]
    first.save_checkpoint(folder / "disk", tag="global_step7")
    assert first.load_checkpoint(folder / "disk")[0] == str(folder / "disk" / "global_step7"), "no snapshot after the first step"
    after: Any = _engine(folder)
    path, state = after.load_snapshot()
    assert path == str(kept / "global_step14") and state == {"seen": json.loads(json.dumps(seen)), "rank": ranks.rank()}
    assert differences(full_state(after), full_state(first)) == []
    torch.distributed.barrier()
    if ranks.rank() == 0:
        for step in (10, 14):
            (file,) = (kept / f"global_step{step}").glob("master-00001-*")
            os.truncate(file, 100)
    torch.distributed.barrier()
    damaged: Any = _engine(folder)
    path, _ = damaged.load_checkpoint(folder / "disk")
    assert path == str(folder / "disk" / "global_step7"), "from the disk: the snapshot is damaged"
    explicit: Any = _engine(folder)
    assert explicit.load_checkpoint(folder / "disk", tag="global_step7")[0] == str(folder / "disk" / "global_step7")
    train(explicit, explicit.global_steps + 2, "bf16", [])
    left = [path.name for path in _written(explicit).glob("global_step*")]
    torch.distributed.barrier()  # rank 0 removes the folder at the end, and rank 1 looks first
    assert left == ["global_step16"], f"what was left behind is gone: {left}"
    explicit.destroy()
    torch.distributed.barrier()
    assert not kept.exists()
    with mock.patch.dict(os.environ), mock.patch.object(observe, "_warned", set()):
        del os.environ["TORCHELASTIC_RUN_ID"]
        alone: Any = _engine(folder)
        assert alone.snapshot() is False and alone.load_snapshot() == (None, None)
    logger.removeHandler(handler)
    return [str(refused.value), *told]


def test_other_runs_little_room_and_damage(tmp_path: Path) -> None:
    zero, one = ranks.run_ranks(_refusals, 2, tmp_path, env=RESTARTED)
    assert zero[0] == one[0]
    for text in ("of a run that has ended, was removed", "has less than", "a snapshot is ignored", "no launcher would start"):
        assert any(text in line for line in zero), (text, zero)


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
