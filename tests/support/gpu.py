"""Run most jobs of ``test_gpu_engine.py`` without pytest, one after the other, even if some fail:

    python -m tests.support.gpu --device cuda        # or pretend
    python -m tests.support.gpu --worlds 2 --jobs skipped

Two and more ranks use nccl if there are as many GPUs, else they share one GPU over gloo. It prints one line per job, and the text of
failures.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support import context_attention, deep_skips, device_axes, device_jobs, late_skips, ranks
from tests.support.checkpoints import IN_BACKGROUND
from tests.support.device_jobs import backend_of
from tests.support.parity import Run

DTYPES = ("fp32", "bf16", "fp16")
TAIL = 3000  # characters of a failure to print


def jobs(folder: str, world: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield the name, function and arguments of each job."""
    for dtype in DTYPES:
        runs = [Run(stage=stage, dtype=dtype, accumulation=2, clip=0.5) for stage in range(4)]
        yield f"parity {dtype}", device_jobs.parity, (["mlp", "gpt2", "llama"], runs)
    if world > 1:
        yield "skipped blocks", deep_skips.skipped_blocks, ()
        yield "images on some ranks", deep_skips.images_on_some_ranks, ()
        yield "ring", context_attention.ring_of, (torch.bfloat16,)
        yield from ((f"{name} parallel", job, ()) for name, job in device_axes.AXES.items())
    for dtype in DTYPES:
        runs = [Run(stage=3, dtype=dtype), Run(stage=2, dtype=dtype, accumulation=2, clip=0.1)]
        yield f"offload {dtype}", device_jobs.offload, ("gpt2", runs, [])
    stages = [Run(stage=stage, dtype="bf16", accumulation=2, clip=0.5) for stage in range(4)]
    yield "compiled", device_jobs.compiled, ([*stages, Run(stage=3, dtype="fp32")],)
    if importlib.util.find_spec("torchao"):
        yield "float8", device_jobs.float8, (stages,)
    if world == 1:
        for dtype, clip_inside in late_skips.STEPS:
            yield f"late skips {dtype}{' clipped' * clip_inside}", late_skips.same_steps, (dtype, clip_inside)
        yield "heads in turn", context_attention.heads_in_turn, ()
    for name in ("offload_param_alone", "checkpointing", "cpu_checkpointing", "interface"):
        yield name, getattr(device_jobs, name), ()
    yield "save", device_jobs.save, (folder, IN_BACKGROUND)
    yield "saves", device_jobs.saves, (folder,)


def text_of(error: Exception) -> str:
    """Return the end of the failure's text: of the ranks that failed themselves, or the stacks of hanging ones."""
    if not isinstance(error, ranks.RankError):
        return str(error)[-TAIL:]
    failed = [outcome for outcome in error.outcomes if not outcome.ok]
    first = [outcome for outcome in failed if outcome.status != "hung"] or failed
    return "\n".join(f"--- rank {outcome.rank}: {outcome.status}\n{outcome.text.split('output of rank')[0][-TAIL:]}" for outcome in first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2], help="numbers of ranks")
    parser.add_argument("--jobs", nargs="+", default=[], help="only those whose name begins so")
    parser.add_argument("--skip", nargs="+", default=[], help="not those whose name begins so")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a job may take")
    arguments = parser.parse_args()
    failed = 0
    for world in arguments.worlds:
        backend = backend_of(arguments.device, world)
        env = {"HF_ZERO_TEST_DEVICE": arguments.device, "HF_ZERO_TEST_BACKEND": backend}
        for name, function, given in jobs(tempfile.mkdtemp(prefix="hf_zero_gpu_"), world):
            if (arguments.jobs and not name.startswith(tuple(arguments.jobs))) or name.startswith(tuple(arguments.skip)):
                continue
            start, text = time.monotonic(), ""
            try:
                ranks.run_ranks(function, world, *given, env=env, timeout=arguments.limit)
            except Exception as error:  # a later job may show more
                text, failed = text_of(error), failed + 1
            verdict = "FAILED" if text else "passed"
            print(
                f"{verdict} {name}, {world} rank(s) on {backend}, {time.monotonic() - start:.1f} s",
                text,
                sep="\n" if text else "",
                flush=True,
            )
    ranks.close_pools()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
