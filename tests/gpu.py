"""Most jobs of ``test_gpu_engine.py`` without pytest, each in turn whatever happens to the others:

    python -m tests.gpu --device cuda        # or pretend

Prints one line per job, and the text of those that fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests import device_jobs, ranks
from tests.parity import Run
from tests.pretend import network

DTYPES = ("fp32", "bf16", "fp16")
TAIL = 3000  # characters of a failure


def jobs(folder: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Name, function and arguments."""
    for dtype in DTYPES:
        runs = [Run(stage=stage, dtype=dtype, accumulation=2, clip=0.5) for stage in range(4)]
        yield f"parity {dtype}", device_jobs.parity, (["mlp", "gpt2", "llama"], runs)
        runs = [Run(stage=3, dtype=dtype), Run(stage=2, dtype=dtype, accumulation=2, clip=0.1)]
        yield f"offload {dtype}", device_jobs.offload, ("gpt2", runs, [])
    for name in ("offload_param_alone", "cpu_checkpointing", "interface"):
        yield name, getattr(device_jobs, name), ()
    yield "saves", device_jobs.save, (folder, device_jobs.IN_BACKGROUND)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", nargs="+", default=[], help="only those whose name begins so")
    arguments = parser.parse_args()
    own = {"cuda": "nccl", "pretend": network.NAME}.get(arguments.device, "gloo")
    failed = 0
    for world, backend in ((1, own), (2, "gloo")):
        env = {"HF_ZERO_TEST_DEVICE": arguments.device, "HF_ZERO_TEST_BACKEND": backend}
        for name, function, given in jobs(tempfile.mkdtemp(prefix="hf_zero_gpu_")):
            if arguments.jobs and not name.startswith(tuple(arguments.jobs)):
                continue
            start, text = time.monotonic(), ""
            try:
                ranks.run_ranks(function, world, *given, env=env, timeout=120.0)
            except Exception as error:  # the next one may say more
                text, failed = str(error)[-TAIL:], failed + 1
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
