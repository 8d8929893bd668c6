"""Snapshots in host memory: ranks that torchrun starts again go on from the newest one, bit for bit, as if none had died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import ranks
from tests.support.snapshot_runs import attempts, launch, train_trainer, undisturbed

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
