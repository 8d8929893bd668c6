"""Launchers that start dead ranks again: the run goes on from its newest checkpoint by itself, as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.checkpoints import start, steps
from tests.support.examples import EXAMPLES, TEST_SECONDS
from tests.support.examples import run as run_example
from tests.support.processes import REPO, environment

# A script that makes its group itself: else all attempts share one store, in which a rank may find the address that a dead one has left.
STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# In the first attempt rank 1 aborts, as nccl's watchdog ends a process, and rank 0 neither notices nor ends by itself, as a host does that
# waits for its GPU. In the second rank 1 cannot write the last checkpoint, which nobody waits for.
SCRIPT = """
import json, os, pathlib, sys, time
import torch.distributed as dist
from hf_zero.checkpoint import save
from tests.support.checkpoints import start, steps

folder, attempt = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
rank = dist.get_rank()
engine = start(3, "bf16", checkpoint={"writer": {"decoupled": True}})
engine.load_checkpoint(folder / "run")
first, seen, original = engine.global_steps, [], save.write_tensor_file

def full(path, entries, **options):
    if rank == 1:
        raise OSError(28, "No space left on device", str(path))
    return original(path, entries, **options)

for step in range(first, 6):
    seen += steps(engine, step, 1, "bf16")
    if step == 3 and attempt == "0":
        (folder / f"pid_{rank}").write_text(str(os.getpid()))
        dist.barrier()
        if rank == 1:
            os.abort()
        time.sleep(1000)
    if step == 5:
        engine.wait_for_checkpoint()
        save.write_tensor_file = full
    engine.save_checkpoint(folder / "run")
(folder / f"seen_{rank}.json").write_text(json.dumps([first, seen]))
"""


@dataclass(frozen=True)
class Launched:
    """What torchrun left: its status, what the ranks said, the folder."""

    status: int
    err: str
    folder: Path


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1"]
    env = environment({"PYTHONPATH": str(REPO), STORES: "1"})
    words = [*command, str(folder / "train.py"), str(folder)]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=600)  # rank 0 would sleep on
    return Launched(done.returncode, done.stderr, folder)


def _uninterrupted() -> list[tuple[float, float]]:
    engine = start(3, "bf16")
    seen = steps(engine, 0, 6, "bf16")
    engine.destroy()
    return seen


@pytest.mark.slow
def test_torchrun_ends_the_other_rank_and_starts_again(launched: Launched) -> None:
    assert "exitcode: -6" in launched.err and "local_rank: 1" in launched.err, launched.err[-3000:]
    assert not Path("/proc", (launched.folder / "pid_0").read_text()).exists(), "rank 0 of the first attempt runs on"
    first, seen = json.loads((launched.folder / "seen_0.json").read_text())
    expected = ranks.run_ranks(_uninterrupted, 2)[0]
    assert 2 <= first <= 3, "resumed from the checkpoint before the end"
    assert [tuple(pair) for pair in seen] == expected[first:]


@pytest.mark.slow
def test_torchrun_hears_of_a_last_save_that_was_lost(launched: Launched) -> None:
    assert launched.status != 0
    run = launched.folder / "run"
    assert (run / "latest").read_text() == "global_step5"
    told = [line for line in launched.err.splitlines() if "the script ended without waiting for it" in line]
    assert any("global_step6" in line and f"newest complete one is {run / 'global_step5'}" in line for line in told), launched.err[-3000:]


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
@pytest.mark.timeout(TEST_SECONDS)
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
