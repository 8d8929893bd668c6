"""Snapshots in host memory: ranks that torchrun starts again go on from the newest one, bit for bit, as if none had died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import ranks
from tests.support.snapshot_runs import attempts, launch, undisturbed

TOTAL = 9


def _plan(kills: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {"total": TOTAL, "stage": 3, "dtype": "bf16", "extra": {}, "kills": kills, "disk_at": 1, "waits": True, **changes}


def _reference(plan: dict[str, Any]) -> tuple[list[list[Any]], str]:
    return ranks.run_ranks(undisturbed, 2, plan["total"], plan["stage"], plan["dtype"], plan["extra"])[0]


def test_a_killed_rank_and_a_kill_inside_a_snapshot(tmp_path: Path) -> None:
    plan = _plan([{"rank": 1, "step": 5}, {"rank": 1, "label": "checkpoint_file", "of": 8}])
    done = launch(tmp_path, plan)
    assert done.returncode == 0, done.stderr[-6000:]
    found = attempts(tmp_path)
    assert [one["began"] for one in found] == [0, 4, 6], "from the newest complete snapshot"
    assert all(f"{tmp_path}/memory/hf_zero-" in one["from"] for one in found[1:])
    seen, end = _reference(plan)
    assert found[-1]["seen"] == seen and found[-1]["end"] == end
    assert list((tmp_path / "memory").iterdir()) == [], "the end of the training removes the snapshots"
