"""What runs of the scripts of examples/clusters have computed, and the same runs under torchrun on this machine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hf_zero.utils import newest_trainer_checkpoint
from tests.support import processes
from tests.support.examples import EXAMPLES
from tests.support.processes import REPO

# For runs that end when a test has seen enough of them: the constant learning rate makes a shorter run equal to their beginning.
CONSTANT = ("--lr_scheduler_type", "constant", "--logging_steps", "1")
ENDLESS = ("--max_steps", "1000000", "--save_steps", "10")


def history(folder: Path) -> dict[int, float]:
    """Return the loss of each step that the newest complete checkpoint of a Trainer knows."""
    entries = json.loads(Path(str(newest_trainer_checkpoint(folder)), "trainer_state.json").read_text())["log_history"]
    losses = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    assert len(losses) == len(dict(losses)), "a step was taken twice"
    return dict(losses)


def step_of(folder: Path) -> int:
    """Return the step of the newest complete checkpoint of a Trainer; 0 if there is none."""
    found = newest_trainer_checkpoint(folder)
    return int(found.rpartition("-")[2]) if found else 0


def steps_printed(text: str) -> dict[int, str]:
    """Return the loss of each step that accelerate_loop.py has printed; fail if a step was taken twice with different losses."""
    lines = [(int(step), loss) for step, loss in re.findall(r"\bstep +(\d+) +loss ([0-9.]+)", text)]
    assert len(set(lines)) == len(dict(lines)), "a step taken again has another loss"
    return dict(lines)


def on_torchrun(folder: Path, script: str, ranks: int, *words: str) -> str:
    """Run a script of examples/clusters on ranks of this machine without an engine, and return its output."""
    words = ("--nproc_per_node", str(ranks), str(EXAMPLES / "clusters" / script), *words)
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", *words]
    return processes.run(command, cwd=folder, env={"PYTHONPATH": str(REPO)}, timeout=3600)
