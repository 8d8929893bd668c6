"""The GPU benchmark of offload at toy size on the CPU: every contender trains, the same losses, and the trace shows the updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import device_processes
from benchmarks.gpu import parts as gpu
from benchmarks.offload import offload_gpu
from tests.support.processes import REPO


@pytest.mark.slow
def test_toy_run_on_the_cpu(tmp_path: Path) -> None:
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    command = [sys.executable, "-m", "benchmarks.offload.offload_gpu", "--device", "cpu", "--toy", "--steps", "2", "--warmup", "2"]
    command += ["--overlap", "full", "--dtypes", "bf16", "--contenders", "hf_zero", "fsdp2", "pytorch"]
    command += ["--json", str(result), "--trace", str(trace)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row[0]: row for row in json.loads(result.read_text())["rows"]}
    assert list(rows) == ["hf_zero-3, cpu offload, bf16", "FSDP2, CPUOffloadPolicy, bf16", "PyTorch, bf16"]
    losses = [float(row[5]) for row in rows.values()]
    assert max(losses) - min(losses) < 0.02 * losses[0]
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("hf_zero::speculate") for name in names)


CUT = "import sys, time; sys.stderr.buffer.write(b'50%|\\xe2\\x96'); sys.stderr.flush(); time.sleep({seconds})"


def test_a_progress_bar_that_is_cut_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(CUT.format(seconds=60))
    monkeypatch.setattr(device_processes, "WORKER", worker)
    job = {"contender": "deepspeed", "device": "cpu", "limit": 1}
    assert device_processes.run(job, sys.executable).reason == "not done after 1 s"
    assert "50%|" in capsys.readouterr().err
    part = gpu.Part("cut", [sys.executable, "-c", CUT.format(seconds=0)], 30)
    assert gpu.run(part, tmp_path / "log.txt", os.environ, tmp_path)["tail"].startswith("50%|")


def test_a_measured_row_stays_when_the_search_for_the_largest_model_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> str:
        raise KeyboardInterrupt

    answer = {"seconds": 2.0, "gpu": 2**30, "host": 2**31, "loss": 1.0}
    monkeypatch.setattr(offload_gpu, "run", lambda job, python: device_processes.Outcome(answer))
    monkeypatch.setattr(offload_gpu, "largest", killed)
    rows = offload_gpu.rows_of(Namespace(trace="", largest=True), {"dtype": "bf16"}, {"pytorch": sys.executable}, {})
    assert next(rows) == ["PyTorch, bf16", "2.000", "", "1.00", "2.00", "1.0000", ""]
    with pytest.raises(KeyboardInterrupt):
        next(rows)
