"""What is on the console when ranks have ended: the cause, within the last lines, in place of the launcher's own traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launches import run_warm
from tests.support.processes import Ended, environment

# A launcher that ends as torch's does: with the failures of its ranks, or with the signal that it was sent. What the ranks left is given.
LAUNCHER = """
import json, os, pathlib, sys, time
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from hf_zero.errors import ConfigError
from hf_zero.system import last_words, launcher_report
root = pathlib.Path(sys.argv[1])

class Logs:
    root_log_dir = str(root)
class Settings:
    logs_specs = Logs()

def file_of(rank):
    path = root / "run_1" / "attempt_0" / str(rank) / "error.json"
    path.parent.mkdir(parents=True)
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path)
    return path
def failed(*paths):
    return ChildFailedError("train.py", {rank: ProcessFailure(rank, 100 + rank, 1, str(path)) for rank, path in enumerate(paths)})
def end_with(error):
    def method(config):
        raise error
    launcher_report.launch_agent(method, Settings())
"""
ENDS = {
    "settings": "path = file_of(0)\nlast_words.leave('ConfigError: a key', 'line 1\\n', kind=last_words.SETTINGS)\nend_with(failed(path))",
    "cause": "path = file_of(0)\nlast_words.leave('ValueError: broken', '  File script, line 7\\n')\nend_with(failed(path))",
    "long": "path = file_of(0)\nlast_words.leave('\\n'.join(f'row {n}' for n in range(99)))\nend_with(failed(path))",
    "elses": "path = file_of(0)\ntold = {'py_callstack': 'of another', 'timestamp': '1'}\n"
    "path.write_text(json.dumps({'message': {'message': 'of another', 'extraInfo': told}}))\nend_with(failed(path))",
    "silent": "end_with(failed(file_of(0)))",
    "interrupted": "file_of(0)\nlast_words.leave('interrupted', kind=last_words.INTERRUPTED)\nend_with(SignalException('2', 2))",
    "stopped": "end_with(SignalException('2', 2))",
    "before": "path = file_of(0)\nlast_words.leave('interrupted', kind=last_words.INTERRUPTED)\nos.utime(path, (1, 1))\n"
    "end_with(SignalException('2', 2))",
    "caught": "path = file_of(0)\nlast_words.leave('ConfigError: a key', kind=last_words.SETTINGS)\n"
    "try:\n    end_with(failed(path))\nexcept ChildFailedError:\n    print('caught')\nraise ValueError('another')",
    "well": "print(launcher_report.launch_agent(lambda config: {0: 'result'}, Settings()))",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    codes = {name: LAUNCHER + code for name, code in ENDS.items()}
    return run_warm(codes, tmp_path_factory.mktemp("ends"), "import torch.distributed.run, hf_zero.system.launcher_report")


def test_the_cause_is_the_last_thing_that_is_printed(ended: dict[str, Ended]) -> None:
    assert ended["settings"].err == "[hf_zero] rank 0 ended first, with exit status 1: see its ConfigError above\n"
    lines = ended["cause"].err.splitlines()
    assert lines == ["[hf_zero] rank 0 ended first, with exit status 1:", "  File script, line 7", "ValueError: broken"]
    lines = ended["long"].err.splitlines()
    assert len(lines) == 17 and lines[1] == "row 0" and lines[-1] == "  ... 84 more lines above"
    assert all(ended[name].status == 1 for name in ("settings", "cause", "long", "interrupted"))


def test_an_interruption_that_a_rank_has_told_is_not_told_again(ended: dict[str, Ended]) -> None:
    assert ended["interrupted"].err == ""
    for name in ("stopped", "before"):  # ranks of another library, or of a run before in the same folder
        assert "SignalException" in ended[name].err and "Traceback" in ended[name].err


def test_what_is_not_ours_is_reported_as_ever(ended: dict[str, Ended]) -> None:
    for name in ("elses", "silent"):
        assert "ChildFailedError" in ended[name].err and "Traceback" in ended[name].err
    assert ended["caught"].out == "caught\n" and "ValueError: another" in ended["caught"].err
    assert ended["well"].out == "{0: 'result'}\n" and ended["well"].err == ""


WRONG_KEY = """
from hf_zero.system.last_words import report_to_launcher
from hf_zero.config.resolve import resolve
report_to_launcher()
resolve({"gradient_cliping": 1.0, "zero_optimization": {"stage": 2, "overlap_com": True}})
"""


@pytest.mark.slow  # fast: `test_the_cause_is_the_last_thing_that_is_printed`
def test_a_wrong_key_under_torchrun(tmp_path: Path) -> None:
    """Our lines are five: where, what, the two keys, and which rank ended; the others are torchrun's log."""
    (tmp_path / "train.py").write_text(WRONG_KEY)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    found = subprocess.run(words, cwd=tmp_path, env=environment({"OMP_NUM_THREADS": "1"}), capture_output=True, text=True, timeout=600)
    lines = [line for line in found.stderr.splitlines() if not (line[:1] in "WE" and "torch/distributed/elastic" in line)]
    assert found.returncode == 1 and len(lines) == 5, found.stderr
    assert lines[0].endswith('resolve({"gradient_cliping": 1.0, "zero_optimization": {"stage": 2, "overlap_com": True}})')
    assert "`gradient_cliping` is unknown; did you mean `gradient_clipping`?" in "".join(lines[2:4])
    assert "`zero_optimization.overlap_com` is unknown; did you mean `zero_optimization.overlap_comm`?" in "".join(lines[2:4])
    assert lines[4].startswith("[hf_zero] rank 0 ended first")
