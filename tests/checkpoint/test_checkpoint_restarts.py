"""Launchers that start dead ranks again: the run goes on from its newest checkpoint by itself and ends as if nothing had happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.checkpoints import start, steps
from tests.support.examples import EXAMPLES, RUN_SECONDS
from tests.support.examples import run as run_example
from tests.support.processes import REPO, run

# A script that makes its group itself: else all attempts share one store, in which a rank may find the address that a dead one has left.
STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

SCRIPT = """
import json, os, signal, sys
import torch.distributed as dist
from tests.support.checkpoints import start, steps

folder = sys.argv[1]
dist.init_process_group("gloo")
engine = start(3, "bf16", checkpoint={"writer": {"decoupled": True}})
engine.load_checkpoint(folder)
first, seen = engine.global_steps, []
for step in range(first, 6):
    seen += steps(engine, step, 1, "bf16")
    engine.save_checkpoint(folder)
    if step == 3 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
engine.wait_for_checkpoint()
if dist.get_rank() == 0:
    print(json.dumps([first, seen]))
"""


def _uninterrupted() -> list[tuple[float, float]]:
    engine = start(3, "bf16")
    seen = steps(engine, 0, 6, "bf16")
    engine.destroy()
    return seen


def test_torchrun_starts_a_killed_run_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1"]
    printed = run([*command, str(script), str(tmp_path / "run")], cwd=REPO, env={"PYTHONPATH": str(REPO), STORES: "1"}, timeout=200)
    first, seen = json.loads(next(line for line in printed.splitlines() if line.startswith("[")))
    expected = ranks.run_ranks(_uninterrupted, 2)[0]
    assert 2 <= first <= 4, "resumed from the checkpoint before the kill"
    assert [tuple(pair) for pair in seen] == expected[first:]


# Runs an example as it is; in the first attempt rank 1 kills itself when a checkpoint is whole.
DYING = """
import os, pathlib, runpy, signal, sys, threading, time

folder, mark, script = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.argv = sys.argv[3:]
sys.path.insert(0, str(pathlib.Path(script).parent))

def watch():
    while not list(folder.glob(mark)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    threading.Thread(target=watch, daemon=True).start()
runpy.run_path(script, run_name="__main__")
"""

FLAGS = ["--n_layer", "2", "--n_embd", "32", "--n_head", "2", "--vocab_size", "300", "--block_size", "32", "--learning_rate", "5e-3"]


def _text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("\n".join(f"line {number} says that {number} times {number} is {number * number}." for number in range(1500)))
    return path


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_SECONDS)
@pytest.mark.parametrize("way", ["torchrun", "accelerate"])
def test_an_example_starts_again_and_resumes(tmp_path: Path, way: str) -> None:
    example = EXAMPLES / "clm"
    flags: list[Any] = ["--train_file", str(_text(tmp_path)), *FLAGS, "--per_device_train_batch_size", "4", "--logging_steps", "1"]
    if way == "torchrun":  # Trainer
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1"]
        script, mark = example / "run_clm.py", "checkpoint-8/trainer_state.json"
        flags += ["--deepspeed", str(example / "zero3.json"), "--report_to", "none", "--save_steps", "4", "--max_steps", "16"]
    else:
        launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(example / "accelerate_zero3.yaml")]
        launcher += ["--max_restarts", "1"]
        script, mark = example / "run_clm_no_trainer.py", "step_8/progress.json"
        flags += ["--checkpointing_steps", "4", "--max_train_steps", "16"]
    flags += ["--resume_from_checkpoint", "latest"]
    dying = tmp_path / "dying.py"
    dying.write_text(DYING)
    cache, killed, whole = tmp_path / "cache", str(tmp_path / "killed"), str(tmp_path / "whole")
    run_example([*launcher, str(dying), killed, mark, str(script), *flags, "--output_dir", killed], cache=cache)
    run_example([*launcher, str(script), *flags, "--output_dir", whole], cache=cache)
    weights = [Path(folder, "model.safetensors").read_bytes() for folder in (killed, whole)]
    assert weights[0] == weights[1]
