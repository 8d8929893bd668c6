"""Signals at random moments to one rank, some, or all, up to 5 s apart: each ends a run with one checkpoint, and all runs are one run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks, trainers
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps
from tests.support.processes import until

WORLD, SIGNALS, LIMIT_SECONDS = 3, 50, 600.0


def _enter(rank: int, store: str) -> None:
    """Makes this process a rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)


def _say(folder: Path, name: str, value: Any) -> None:
    (folder / f"{name}.new").write_text(json.dumps(value))
    (folder / f"{name}.new").rename(folder / name)


def _script(folder: Path, rank: int, store: str, total: int) -> dict[str, Any]:
    """A loop that asks, at stage 3, with checkpoints in the background every few steps; until ``total`` or a signal."""
    import hf_zero

    _enter(rank, store)
    engine = start(3, "bf16", **IN_BACKGROUND)
    engine.load_checkpoint(folder / "saved")
    if hf_zero.utils.preempted():
        raise RuntimeError("nobody has sent a signal")
    _say(folder, f"ready{rank}", engine.global_steps)
    for step in range(engine.global_steps, total):
        steps(engine, step, 1, "bf16")
        if hf_zero.utils.preempted():
            engine.save_checkpoint(folder / "saved")
            hf_zero.utils.end_preempted()
        if step % 7 == 0:
            engine.save_checkpoint(folder / "saved")
        time.sleep(0.01)
    engine.wait_for_checkpoint()
    return full_state(engine)


def _trainer(folder: Path, rank: int, store: str, total: int) -> dict[str, Any]:
    """transformers' Trainer with its own answer to signals switched on, two epochs' worth of micro-steps between saves."""
    from transformers import Trainer, TrainerCallback

    import hf_zero

    class Ready(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not (folder / f"ready{rank}").exists():
                _say(folder, f"ready{rank}", state.global_step)

    _enter(rank, store)
    options = {"save_strategy": "steps", "save_steps": 11, "save_total_limit": 2, "enable_jit_checkpoint": True, "max_steps": total}
    options |= {"lr_scheduler_type": "constant", "logging_strategy": "no"}
    args = trainers.arguments(folder / "saved", trainers.zero_config(2), **options)
    model = trainers.load(folder.parent / "models", "gpt2", resid_pdrop=0.1)
    trainer = Trainer(model=model, args=args, train_dataset=trainers.rows(48, 1), callbacks=[Ready()])
    trainer.train(resume_from_checkpoint=hf_zero.utils.newest_trainer_checkpoint(folder / "saved"))
    if trainer.state.global_step != trainer.model_wrapped.global_steps:
        raise RuntimeError(f"Trainer has counted {trainer.state.global_step} steps, the engine {trainer.model_wrapped.global_steps}")
    return trainers.weights_of(trainer.model)


def _process(kind: str, folder: Path, rank: int, store: str, total: int) -> None:
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    state = {"script": _script, "trainer": _trainer}[kind](folder, rank, store, total)
    torch.save(state, folder / f"state{rank}")


def _start(kind: str, folder: Path, number: int, total: int = 10**6) -> list[Any]:
    for rank in range(WORLD):
        (folder / f"ready{rank}").unlink(missing_ok=True)
    found = [
        ranks._context().Process(target=_process, args=(kind, folder, rank, str(folder / f"store{number}"), total)) for rank in range(WORLD)
    ]
    for process in found:
        process.start()
    return found


def _end(processes: list[Any], folder: Path) -> list[int]:
    deadline = time.monotonic() + LIMIT_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    logs = "\n".join((folder / f"log{rank}").read_text(errors="replace")[-3000:] for rank in range(WORLD))
    assert None not in statuses, f"a hang: {statuses}\n{logs}"
    return [*statuses] if set(statuses) <= {0, 75} else pytest.fail(f"{statuses}\n{logs}")


def _send(processes: list[Any], draw: random.Random) -> str:
    """Signals to some ranks that run; returns a description."""
    to = draw.sample(range(WORLD), draw.choice((1, 2, WORLD)))
    apart = [0.0, *(draw.choice((0.0, 0.01, 0.2, 5.0)) * draw.random() for _ in to[1:])]
    for rank, seconds in zip(to, apart, strict=True):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            time.sleep(0.001)
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGTERM)
    return f"to ranks {to}, {apart} s apart"


def _newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 where there is none."""
    found = [index.parent.name for index in (folder / "saved").rglob("complete")]
    return max((int(name.removeprefix("global_step")) for name in found if not name.startswith(".")), default=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # each of the hangs that it looks for ends after LIMIT_SECONDS
@pytest.mark.parametrize("kind", ["script", "trainer"])
def test_signals_at_random_moments(kind: str, tmp_path: Path) -> None:
    draw, folder = random.Random(f"preempted {kind}"), tmp_path / "run"
    folder.mkdir()
    trainers.save_models(tmp_path / "models")
    last = 0
    for number in range(SIGNALS):
        processes = _start(kind, folder, number)
        ready = [folder / f"ready{rank}" for rank in range(WORLD)]
        until(lambda: all(mark.exists() for mark in ready) or not all(process.is_alive() for process in processes), "the first step")  # noqa: B023
        assert all(process.is_alive() for process in processes), _end(processes, folder)
        began = json.loads((folder / "ready0").read_text())
        assert began == last, f"run {number} began at step {began}, the checkpoint is of step {last}"
        time.sleep(draw.random() * draw.choice((0.01, 0.1, 1.0)))
        sent = _send(processes, draw)
        assert _end(processes, folder) == [75] * WORLD, f"signal {number}, {sent}"
        saved = _newest(folder)
        assert saved > last, f"signal {number}, {sent}: no checkpoint after step {last}"
        last = saved
    whole = tmp_path / "whole"
    whole.mkdir()
    for place in (folder, whole):
        assert _end(_start(kind, place, SIGNALS, last + 3), place) == [0] * WORLD
    for rank in range(WORLD):
        found, expected = (torch.load(place / f"state{rank}", weights_only=False) for place in (folder, whole))
        assert not differences(found, expected)
