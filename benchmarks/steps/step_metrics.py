"""Cost of `hf_zero.step_metrics`: steps with and without it, and the time inside its own calls as a fraction of a step.

    python -m benchmarks.steps.step_metrics [--json benchmarks/results/step_metrics.json]
    python -m benchmarks.steps.step_metrics --steps 3        # quick check

Two gloo ranks train GPT-2 at stage 3. Engines with and without the metrics take steps in turn, so that a slow minute of the machine affects
both. The ratio is the ratio of the medians; its noise, the ratio of one engine without metrics to another, is printed beside it. The
target is smaller than that noise, so the calls are timed too: the number of calls per step times the seconds of each alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

from benchmarks.common.tables import ResultTable

SIZE = {"vocab_size": 8192, "n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
EVERY = 10
LIMIT = 0.002  # largest allowed fraction of a step


def _engine(own: dict[str, Any], batch: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    import hf_zero

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0},
        "hf_zero": own,
    }
    return hf_zero.initialize(model=GPT2LMHeadModel(GPT2Config(**SIZE)), config=config)[0]


def _seconds(engine: Any, batch: torch.Tensor) -> float:
    begin = time.perf_counter()
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    return time.perf_counter() - begin


def _calls(engine: Any, batch: torch.Tensor) -> dict[str, int]:
    """Return how often a step enters a wait, a phase, and the forward in which tokens are counted."""
    from hf_zero.profiling.step_metrics import StepMetrics
    from hf_zero.profiling.waits import WaitTimes

    counts = dict.fromkeys(("wait", "phase", "_see", "measure"), 0)
    undo = []
    for owner, names in ((WaitTimes, ("wait",)), (StepMetrics, ("_see",))):
        for name in names:
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, _counted(counts, name, getattr(owner, name)))
    metrics = _metrics(engine)
    hook = engine.module._forward_pre_hooks[metrics._handle.id]
    engine.module._forward_pre_hooks[metrics._handle.id] = _counted(counts, "_see", hook)
    watchers, engine.clock.watchers = engine.clock.watchers, [_counted(counts, "phase", engine.clock.watchers[0])]
    _seconds(engine, batch)
    for owner, name, function in undo:
        setattr(owner, name, function)
    engine.module._forward_pre_hooks[metrics._handle.id] = hook
    engine.clock.watchers = watchers
    return {**counts, "measure": 1}


def _metrics(engine: Any) -> Any:
    return next(measure.__self__ for measure in engine.reports.measures)


def _counted(counts: dict[str, int], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return call


def _each(engine: Any, batch: torch.Tensor) -> dict[str, float]:
    """Return the seconds of one call of each kind, including its context manager."""
    from hf_zero.observe import waiting

    metrics = _metrics(engine)

    def wait() -> None:
        with waiting("gathers", "hf_zero::all_gather (transformer.h.0)", on_stream=True):
            pass

    def phase() -> None:
        with metrics.phase("backward"):
            pass

    engine.module.train()
    with metrics._waits.counted(streams=True):
        inside = _time(wait)
    free = _time(wait)
    steps = metrics._every
    return {
        "wait": inside - free,
        "phase": _time(phase),
        "_see": _time(lambda: metrics._see(engine.module, (), {"input_ids": batch, "labels": batch})),
        "measure": _time(lambda: metrics.measure(steps), 200) / steps,
    }


def _time(call: Callable[[], Any], count: int = 5000) -> float:
    """Return the seconds of a call: the best of some rounds."""
    rounds = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - begin) / count)
    return min(rounds)


def _rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HF_ZERO_LOG_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    batch = torch.randint(0, SIZE["vocab_size"], (options.batch, SIZE["n_positions"]), generator=torch.Generator().manual_seed(rank))
    engines = {name: _engine(own, options.batch) for name, own in (("off", {}), ("off again", {}), ("on", {"step_metrics": EVERY}))}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.steps + 3):
        names = list(engines)
        for name in names[turn % 3 :] + names[: turn % 3]:
            took = _seconds(engines[name], batch)
            if turn >= 3:
                seconds[name].append(took)
    found = {"seconds": seconds, "calls": _calls(engines["on"], batch), "each": _each(engines["on"], batch)}  # on all ranks: they vote
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", type=Path, help="keep the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (folder, options), nprocs=2)
        found = json.loads(Path(folder, "found.json").read_text())
    median = {name: statistics.median(values) for name, values in found["seconds"].items()}
    own = {name: found["calls"][name] * found["each"][name] for name in found["each"]}
    share = sum(own.values()) / min(found["seconds"]["off"])
    names, calls, each = {"_see": "count tokens"}, found["calls"], found["each"]
    verdict = "kept" if share <= LIMIT else "BROKEN"
    rows = [
        ["steps with / without", f"{median['on'] / median['off']:.4f}", f"medians of {options.steps} steps, {median['off']:.3f} s without"],
        ["without / without", f"{median['off again'] / median['off']:.4f}", "the noise of this machine"],
        *([names.get(name, name), f"{1e6 * took:.1f} us", f"{calls[name]} x {1e6 * each[name]:.2f} us"] for name, took in own.items()),
        ["own calls / shortest step", f"{100 * share:.4f} %", f"at most {100 * LIMIT:.1f} % is wanted: {verdict}"],
    ]
    table = ResultTable(
        title="What step_metrics costs",
        command="python -m benchmarks.steps.step_metrics --json benchmarks/results/step_metrics.json",
        text=f"GPT-2 of {SIZE['n_layer']} layers of width {SIZE['n_embd']}, {options.batch} x {SIZE['n_positions']} tokens per rank, "
        f"stage 3 with every block gathered twice, 2 gloo ranks, one thread each; a record every {EVERY} steps.",
        columns=["what", "value", "of"],
        rows=rows,
    )
    table.publish(options.json)


if __name__ == "__main__":
    main()
