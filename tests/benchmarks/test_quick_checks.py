"""The "quick check" commands in the heads of the benchmarks run: a benchmark that nobody has started for weeks still does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.plan import plan_tables
from tests.support import ranks
from tests.support.rows import slow_but

REPO = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^ *python -m (benchmarks\.[\w.]+)(.*?) +# quick check$", re.MULTILINE)
LEFT_OUT = ("benchmarks.checkpoint.replica_kills", "benchmarks.checkpoint.stores")  # need torchft, and rclone


def _commands() -> dict[str, list[str]]:
    """Return the arguments of the quick checks by module."""
    files = sorted((REPO / "benchmarks").rglob("*.py"))
    found = {name: shlex.split(words) for path in files for name, words in LINE.findall(path.read_text(encoding="utf-8"))}
    return {name: words for name, words in found.items() if name not in LEFT_OUT}


COMMANDS = _commands()


@pytest.mark.parametrize("name", slow_but(COMMANDS, "benchmarks.offload.host_adam"))
def test_a_quick_check_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", name, *COMMANDS[name]]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip(), "no table was printed"


def test_most_benchmarks_have_a_quick_check() -> None:
    assert len(COMMANDS) >= 23 and all((REPO / f"{name.replace('.', '/')}.py").is_file() for name in COMMANDS)


def _smallest_plans() -> list[str]:
    rows = []
    for model, settings in plan_tables.MODELS.items():
        experts = {"num_experts": 8} if "num_experts" in settings else {}
        plan_tables.MODELS[model] = {**settings, **experts, "num_hidden_layers": 1}
        rows.append(plan_tables.row(model, max(plan_tables.RANKS[model]), "stage 3"))
    return rows


def test_the_examples_of_the_page_of_plans_can_be_planned() -> None:
    rows: list[str] = ranks.run_alone(_smallest_plans)
    starts = [f"| {max(counts)} | stage 3 | " for counts in plan_tables.RANKS.values()]
    assert all(row.startswith(start) and row.count("|") == 10 for row, start in zip(rows, starts, strict=True)), rows
