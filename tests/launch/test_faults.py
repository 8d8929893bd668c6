"""A rank that dies, hangs or fails: the others end within the group's timeout, with an error that names unit and phase."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, initialize
from tests.support.processes import REPO, environment
from tests.support.rows import thinned

TIMEOUT = 12.0  # of a collective: no rank of a run that is well is that late, even on a busy machine
# Where rank 1 stops: before a block's forward, in its backward, between backward and step.
PLACES = ("forward", "backward", "step")
WAYS = ("dies", "aborts", "hangs", "raises")


def _stop(way: str) -> None:
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "aborts":  # as nccl's watchdog ends a process
        os.abort()
    if way == "hangs":
        time.sleep(1000)
    raise ValueError("rank 1 has a bug of its own")


def _train_until(stage: int, place: str, way: str) -> None:
    engine = initialize(CASES["mlp"].build(), Run(stage=stage))
    armed = ranks.rank() == 1
    count = 0

    def in_second_step(*_: Any) -> None:
        if armed and count == 1:
            _stop(way)

    block = engine.module.blocks[1]
    if place == "forward":
        block.register_forward_pre_hook(in_second_step)
    if place == "backward":
        block.down.register_full_backward_pre_hook(in_second_step)
    for count in range(3):
        loss = class_loss(engine, CASES["mlp"].rows(count, 0, ranks.rank()))
        engine.backward(loss)
        if place == "step":
            in_second_step()
        engine.step()


@pytest.mark.fast_rows("3-forward-dies", "3-backward-aborts", "3-step-hangs")
@thinned(None, place=PLACES, way=WAYS)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_other_rank_ends_with_the_unit_and_phase(stage: int, place: str, way: str) -> None:
    grace = 1.0 if way == "hangs" else TIMEOUT + 60  # one that hangs never reports, the survivor comes first
    outcomes = ranks.observe_ranks(_train_until, 2, stage, place, way, timeout=TIMEOUT + 120, group_timeout=TIMEOUT, grace=grace)
    survivor, culprit = outcomes
    assert culprit.status == {"dies": "died", "aborts": "died", "hangs": "hung", "raises": "error"}[way], culprit.text
    assert survivor.status == "error", survivor.text
    if (place, way) == ("backward", "raises"):  # the ranks meet at the end of the backward, where the error is known to all
        assert "broke off with an error on another rank (ValueError('rank 1 has a bug of its own'))" in survivor.text, survivor.text
        return
    assert "CollectiveError" in survivor.text, survivor.text
    units = ("root", "blocks.0", "blocks.1", "blocks.2", "grad_norm", "norm")
    phases = ("gather", "reduce", "norm", "step")
    message = survivor.text[survivor.text.rindex("CollectiveError") :]
    assert any(unit in message for unit in units), message
    assert any(phase in message for phase in phases), message
    assert f"rank 1 on {platform.node()} did not answer within" in message, message


# Rank 0 neither notices nor ends by itself, as a host does that waits for its GPU; on nccl rank 1 would be ended by its watchdog.
ABORTING = """
import os, pathlib, sys, time
import torch.distributed as dist
from tests.support.checkpoints import start, steps

dist.init_process_group("gloo")
engine = start(3, "bf16")
steps(engine, 0, 1, "bf16")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
if dist.get_rank() == 1:
    os.abort()
time.sleep(1000)
"""
LAUNCHERS = {
    "hf-zero launch": ["-m", "hf_zero", "launch", "--num_gpus", "2", "--master_port", "{port}"],
    "accelerate launch": ["-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--main_process_port", "{port}"],
}


@pytest.mark.slow  # `test_checkpoint_restarts.py` has torchrun
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_ends_the_others_when_a_rank_aborts(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ABORTING)
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPO), env.get("PYTHONPATH"))))
    words = [word.replace("{port}", str(ranks._free_port())) for word in LAUNCHERS[launcher]]
    done = subprocess.run(
        [sys.executable, *words, str(script), str(tmp_path)],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,  # rank 0 would sleep on
    )
    assert done.returncode != 0
    assert "SIGABRT" in done.stderr and "local_rank: 1" in done.stderr, done.stderr[-3000:]
    assert not Path("/proc", (tmp_path / "0").read_text()).exists(), "rank 0 runs on"
