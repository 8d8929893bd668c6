"""What becomes of ranks when `hf-zero launch` is killed: they end, whatever they are waiting for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero.launch import rank
from tests.support.processes import REPO, environment, until

SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
import hf_zero.comm.bootstrap as bootstrap
bootstrap.init_distributed()
child = subprocess.Popen([sys.executable, "-c", "import os; from hf_zero.launch.rank import end_with_launcher as e; e(); print('ok')"])
assert child.wait() == 0
place = Path(sys.argv[1], os.environ["RANK"])
place.with_suffix(".new").write_text(str(os.getpid()))
place.with_suffix(".new").rename(place)
time.sleep(600)
"""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone tells a process that its parent died")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["launch", "--num_gpus", "2", "--master_port", "29739", str(script), str(tmp_path)]
    launcher = subprocess.Popen([sys.executable, "-m", "hf_zero", *words], env={**environment(), "PYTHONPATH": str(REPO)}, cwd=REPO)
    ranks: list[int] = []
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        until(lambda: all(file.exists() for file in files) or launcher.poll() is not None, "two ranks")
        assert launcher.poll() is None
        ranks = [int(file.read_text()) for file in files]
        assert all(map(_runs, ranks))
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        until(lambda: not any(map(_runs, ranks)), "the end of the ranks whose launcher died")
    finally:
        launcher.kill()
        launcher.wait()
        for pid in ranks:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)


def test_only_ranks_that_the_launcher_started_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(rank, "linux_function", lambda *words: asked.append(words) or (lambda *given: 0))
    for value in ("", "1", "x", str(os.getpid())):
        monkeypatch.setenv(rank.VARIABLE, value)
        rank.end_with_launcher()
    assert not asked or os.getppid() == 1
    monkeypatch.setenv(rank.VARIABLE, str(os.getppid()))
    rank.end_with_launcher()
    assert asked
