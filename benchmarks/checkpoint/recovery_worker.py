"""One rank of the recovery benchmark. Started by ``recovery.py`` under torchrun, with the plan as JSON."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.time()

import torch  # noqa: E402  - the imports are part of the time that is measured
import torch.distributed as dist  # noqa: E402

import hf_zero  # noqa: E402
from benchmarks.common.training import ADAMW, build_model, make_batch  # noqa: E402


def build(plan: dict[str, Any], size: dict[str, int]) -> Any:
    """Return the engine."""
    model = build_model("gpt2", size)
    config = {
        "train_micro_batch_size_per_gpu": size["batch"],
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "hf_zero": {"snapshot_steps": plan["every"]} if plan["snapshots"] else {},
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, plan: dict[str, Any], size: dict[str, int], last: int) -> dict[str, list[float]]:
    """Train up to step ``last``; return seconds of steps alone and beside a thread that writes, and of the calls that took a snapshot, with
    the main thread's CPU time in them.
    """
    seen: dict[str, list[float]] = {"alone": [], "beside": [], "stalls": [], "cpu": []}
    snapshots = engine.checkpoints.snapshots
    for step in range(engine.global_steps, last):
        dist.barrier()
        writes, begin = snapshots is not None and snapshots._background.busy, time.perf_counter()
        engine.backward(engine(**make_batch(step, dist.get_rank(), size)).loss)
        engine.step()
        seen["beside" if writes else "alone"].append(time.perf_counter() - begin)
        begin, used = time.perf_counter(), time.thread_time()
        if engine.snapshot():
            seen["stalls"].append(time.perf_counter() - begin)
            seen["cpu"].append(time.thread_time() - used)
        if not plan["snapshots"] and engine.global_steps % plan["save_every"] == 0:
            engine.save_checkpoint(Path(plan["folder"], "run"))
    return seen


def main() -> None:
    plan = json.loads(sys.argv[1])
    size = {name: plan[name] for name in ("layers", "width", "batch", "length", "heads", "vocab")}
    folder, report = Path(plan["folder"]), Path(plan["folder"], "report.json")
    dist.init_process_group("gloo")
    engine = build(plan, size)
    built = time.time()
    engine.load_checkpoint(folder / "run")
    loaded = time.time()
    interval = plan["every"] if plan["snapshots"] else plan["save_every"]
    died_at = (plan["snapshots"] or 1) * interval + interval // 2
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        seen = train(engine, plan, size, died_at)
        states = sum(unit.master.nbytes * 3 for unit in engine.units if unit.master is not None)
        if dist.get_rank() == 0:
            step = statistics.median(seen["alone"][1:] or seen["beside"])
            known = {"step": step, "stalls": seen["stalls"], "cpu": seen["cpu"], "beside": seen["beside"] or [step], "nbytes": states}
            report.write_text(json.dumps({**known, "died": time.time(), "died_at": died_at, "every": plan["every"]}))
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    began = engine.global_steps
    train(engine, plan, size, began + 1)
    if dist.get_rank() == 0:
        found = {**json.loads(report.read_text()), "started": STARTED, "built": built, "loaded": loaded, "began": began}
        report.write_text(json.dumps(found))
    engine.destroy()


if __name__ == "__main__":
    main()
