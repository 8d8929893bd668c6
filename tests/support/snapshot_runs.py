"""A run that takes snapshots and is killed according to a plan: a script for torchrun, and the same run without a death."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_zero.checkpoint.commit.folders import is_complete
from hf_zero.checkpoint.snapshots import Snapshots
from hf_zero.checkpoint.state.beside import generator_states, restore_generators
from tests.support import ranks, trainers
from tests.support.checkpoints import full_state, start
from tests.support.models import CLASSES, LENGTH, Batch, class_loss
from tests.support.parity import DTYPES, mean_over_ranks
from tests.support.processes import REPO, environment

EVERY = 2  # steps between two snapshots
# What a kill of one attempt waits for: a step that is complete ("step"), a label inside the snapshot of a step ("label"), or a time
# ("seconds") after the engine is there.
Kill = dict[str, Any]


def train(engine: Any, total: int, dtype: str, seen: list[list[Any]], at_step: Any = lambda step: None, waits: bool = False) -> None:
    """Train up to step ``total``; append step, batch and loss to ``seen``, which the snapshots hold. Every batch draws random numbers.

    ``waits``: wait for each snapshot two steps later, so that none is left out and a kill finds what the plan expects.
    """
    for step in range(engine.global_steps, total):
        generator = torch.Generator().manual_seed(1000 * step + ranks.rank())
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        batch: Batch = {
            "inputs": (torch.randn(2, LENGTH, generator=generator) * drawn).to(DTYPES[dtype]),
            "labels": torch.randint(0, CLASSES, (2,), generator=generator),
        }
        loss = class_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        seen.append([step, drawn, mean_over_ranks([loss.item()]), float(engine.get_global_grad_norm())])
        taken = engine.snapshot({"seen": seen, "rank": ranks.rank()})
        assert not waits or taken == ((step + 1) % EVERY == 0)
        if waits and not taken and step + 1 > EVERY:
            _wait_for(engine.checkpoints.snapshots, f"global_step{step // EVERY * EVERY}")
        at_step(step + 1)


def _wait_for(snapshots: Snapshots, tag: str) -> None:
    while snapshots._background.busy or not is_complete(snapshots.folder / tag):
        time.sleep(0.01)


def digest(engine: Any) -> str:
    """Return a digest of everything that a checkpoint holds; collective."""
    found = hashlib.sha256()
    for name, value in sorted(full_state(engine).items()):
        found.update(name.encode())
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()


def train_trainer(folder: Path, models: Path, kill: Kill | None) -> tuple[Any, dict[str, Any]]:
    """Train with Trainer, which takes snapshots by itself; return its logs and a report: where it began, its final state."""
    from transformers import Trainer, TrainerCallback

    settings = {"snapshot_steps": EVERY, "snapshot_folder": str(folder / "memory")}
    began: list[int] = []

    class Dying(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.append(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            snapshots = trainer.model_wrapped.checkpoints.snapshots
            if snapshots is not None and state.global_step % EVERY and state.global_step > 1:
                _wait_for(snapshots, f"global_step{state.global_step - 1}")
            if kill is not None and ranks.rank() == kill["rank"] and state.global_step == kill["step"]:
                sys.exit(3) if kill.get("exits") else _die()

    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
    with trainers.clean_state():
        args = trainers.arguments(folder / "trainer", trainers.zero_config(3, hf_zero=settings), **options)
        model = trainers.load(models, "gpt2", resid_pdrop=0.1)
        trainer = Trainer(model=model, args=args, train_dataset=trainers.rows(24, 1), callbacks=[Dying()])
        trainer.train()
        return trainers.logs_of(trainer), {"began": began[0], "end": digest(trainer.model_wrapped), "flos": trainer.state.total_flos}


def seed() -> None:
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(17 + ranks.rank())


def undisturbed(total: int, stage: int, dtype: str, extra: dict[str, Any]) -> tuple[list[list[Any]], str]:
    """Return steps and final state of the run that nothing happens to."""
    seed()
    engine = start(stage, dtype, **extra)
    engine.snapshot = lambda client_state=None: False
    assert engine.checkpoints.snapshot_folder is None
    seen: list[list[Any]] = []
    train(engine, total, dtype, seen)
    found = digest(engine)
    engine.destroy()
    return json.loads(json.dumps(seen)), found


def launch(folder: Path, plan: dict[str, Any], *flags: str, world: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the plan under torchrun to its end; return what it left."""
    (folder / "plan.json").write_text(json.dumps(plan))
    words = [sys.executable, "-m", "torch.distributed.run", *(flags or ("--standalone",)), "--nproc_per_node", str(world)]
    words += ["--max-restarts", str(len(plan["kills"])), "-m", "tests.support.snapshot_runs", str(folder)]
    env = environment({"PYTHONPATH": str(REPO), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", **variables})
    return subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=900)


def start_agent(folder: Path, port: int, restarts: int) -> subprocess.Popen[str]:
    """Start torchrun for one of two nodes with a rank each, in a session of its own."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "snapshots", "--max-restarts", str(restarts)]
    words += ["-m", "tests.support.snapshot_runs", str(folder)]
    env = environment({"PYTHONPATH": str(REPO), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"})
    err = (folder / f"agent_{time.monotonic_ns()}.log").open("w")
    return subprocess.Popen(words, cwd=REPO, env=env, stdout=err, stderr=err, text=True, start_new_session=True)


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Return what rank 0 wrote about each attempt: where it began, from which folder, and at the end steps and state."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("attempt_*.json"))]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(kill: Kill) -> Any:
    """Arrange the death of this rank; return a function to call after each step."""
    from hf_zero import observe

    if ranks.rank() != kill["rank"]:
        return lambda step: None
    if "seconds" in kill:
        timer = threading.Timer(kill["seconds"], _die)
        timer.daemon = True
        timer.start()
    if "label" in kill:
        wanted = f"hf_zero::{kill['label']} (global_step{kill['of']}"
        observe._listeners.append(lambda text: _die() if text.startswith(wanted) else None)
    return lambda step: _die() if step == kill.get("step") else None


def _hold(folder: Path) -> None:
    """Wait until the test has done what it wants to do at this step."""
    (folder / f"held_{ranks.rank()}").write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.05)


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    torch.distributed.init_process_group("gloo")
    attempt = len(attempts(folder))
    torch.distributed.barrier()
    seed()
    settings = {"snapshot_steps": EVERY, "snapshot_folder": plan.get("memory", str(folder / "memory"))}
    engine = start(plan["stage"], plan["dtype"], hf_zero=settings, **plan["extra"])
    path, client_state = engine.load_checkpoint(folder / "disk")
    seen = [] if client_state is None else client_state["seen"]
    if client_state is not None and "random" in client_state:  # from the disk, where a script saves them itself
        restore_generators(client_state["random"], torch.device("cpu"))
    assert client_state is None or client_state["rank"] == ranks.rank()
    report = {"began": engine.global_steps, "from": path, "begin": digest(engine)}

    def write() -> None:
        if ranks.rank() == 0:
            (folder / f"attempt_{attempt:02d}.json").write_text(json.dumps(report))
        torch.distributed.barrier()

    write()
    kills = plan["kills"]
    at_step = _arm(kills[attempt]) if attempt < len(kills) and not kills[attempt].get("trainer") else lambda step: None

    def after(step: int) -> None:
        at_step(step)
        if step == plan.get("hold_at"):
            _hold(folder)
        if step == plan.get("disk_at"):
            drawn = generator_states(torch.device("cpu"))
            engine.save_checkpoint(folder / "disk", client_state={"seen": seen, "rank": ranks.rank(), "random": drawn})

    train(engine, plan["total"], plan["dtype"], seen, after, plan.get("waits", False))
    report |= {"seen": seen, "end": digest(engine)}
    write()
    engine.destroy()
    if "models" in plan:
        kill = kills[attempt] if attempt < len(kills) and kills[attempt].get("trainer") else None
        report["logs"], report["trainer"] = train_trainer(folder, Path(plan["models"]), kill)
        write()


if __name__ == "__main__":
    main()
