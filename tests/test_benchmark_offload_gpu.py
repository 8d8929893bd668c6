"""The GPU benchmark of offload at toy size on the CPU: every contender trains, the same losses, and the trace shows the updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import REPO


@pytest.mark.slow
def test_toy_run_on_the_cpu(tmp_path: Path) -> None:
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    command = [sys.executable, "-m", "benchmarks.offload_gpu", "--device", "cpu", "--toy", "--steps", "2", "--warmup", "2"]
    command += ["--overlap", "full", "--dtypes", "bf16", "--contenders", "hf_zero", "fsdp2", "pytorch"]
    command += ["--json", str(result), "--trace", str(trace)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row[0]: row for row in json.loads(result.read_text())["rows"]}
    assert list(rows) == ["hf_zero-3, cpu offload, bf16", "FSDP2, CPUOffloadPolicy, bf16", "PyTorch, bf16"]
    losses = [float(row[5]) for row in rows.values()]
    assert max(losses) - min(losses) < 0.02 * losses[0]
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("hf_zero::speculate") for name in names)
