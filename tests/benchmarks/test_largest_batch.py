"""The search for the largest batch of the published experiments: by lines through peaks, and smaller where a batch does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.device_processes import Outcome
from benchmarks.common.device_worker import searched
from benchmarks.common.training import build_model, make_batch
from benchmarks.experiments import largest_batch
from tests.support.processes import REPO

TOY = [
    {**one.size, **{key: value for key, value in largest_batch.TOY.items() if key in one.size}}
    for one in largest_batch.EXPERIMENTS.values()
]


@pytest.mark.parametrize("limit", [1e3, 5e3, 1e5])
def test_the_largest_batch_is_where_the_line_meets_the_limit(limit: float) -> None:
    """Below 20 samples the peak is that of the update, which does not grow."""
    tried: list[int] = []

    def peak(batch: int) -> int:
        tried.append(batch)
        return max(300, 100 + 10 * batch)

    found = searched(peak, lambda batch: batch, 2, limit)
    assert max(100 + 10 * found, 300) <= limit < 100 + 10 * (found + 1)
    assert all(100 + 10 * batch <= limit for batch in tried), "a step that does not fit"
    assert searched(peak, lambda batch: batch - 3, 2, limit) <= found, "all ranks take the least"


def test_a_batch_that_failed_is_not_exceeded() -> None:
    tried: list[int] = []
    assert searched(lambda batch: tried.append(batch) or 10 * batch, lambda batch: batch, 2, 1000, most=80) == 80  # type: ignore[func-returns-value]
    assert tried == [2, 4]


def test_a_batch_that_does_not_fit_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def run(job: dict[str, Any], python: str) -> Outcome:
        seen.append(job.get("most", 0))
        if len(seen) < 3:
            return Outcome(reason="out of GPU memory", errors="tries a batch of 100\n" if len(seen) == 1 else "tries a batch of 93\n")
        return Outcome({"batch": 86, "seconds": 2.0, "gpu": 2**30})

    monkeypatch.setattr(largest_batch, "run", run)
    arguments = Namespace(device="cuda", cap_gib=24.0, limit=0.0, world=2, steps=3, only=["deberta"], methods=["DDP"], toy=False)
    (row,) = largest_batch.rows_of(arguments)
    assert seen == [0, 93, 86]
    assert row[1:] == ["DDP", "86", "1.00", f"{3668 / 172 * 2:.1f}", "1.00", "2.000", "1.0"]


def test_a_model_that_does_not_fit_at_all_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_batch, "run", lambda job, python: Outcome(reason="out of GPU memory"))
    arguments = Namespace(device="cuda", cap_gib=24.0, limit=0.0, world=2, steps=3, only=["gpt2-xl"], methods=["DDP"], toy=False)
    assert [row[:3] for row in largest_batch.rows_of(arguments)] == [["GPT-2 XL, wikitext-2, 128 tokens", "DDP", "out of GPU memory"]]


@pytest.mark.parametrize(("shape", "size"), list(zip([one.shape for one in largest_batch.EXPERIMENTS.values()], TOY, strict=True)))
def test_the_models_take_their_batches(shape: str, size: dict[str, int]) -> None:
    loss = build_model(shape, size)(**make_batch(0, 0, size)).loss
    assert loss.ndim == 0 and bool(loss.isfinite())


@pytest.mark.slow
def test_toy_run_on_the_pretend_accelerator(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.experiments.largest_batch", "--toy", "--device", "pretend", "--cap-gib", "0.1"]
    command += ["--methods", "ZeRO-2", "--steps", "2", "--json", str(result)]  # DDP knows no such device
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    batches = [int(row[2]) for row in json.loads(result.read_text())["rows"]]
    assert len(batches) == 3 and min(batches) > 8
