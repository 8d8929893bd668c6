"""Everything that waits for a GPU, in turn, each part under its own time limit: tests, the offload experiment, the largest model.

    python -m benchmarks.gpu --out results/gpu                    # all parts, most telling first
    python -m benchmarks.gpu --out results/gpu --budget 560       # only what fits into this many seconds; the next call goes on
    python -m benchmarks.gpu --out results/gpu --only jobs xl-bf16
    python -m benchmarks.gpu --out results/gpu --toy --device pretend   # the same parts at toy size, on a pretend accelerator

A part that fails, hangs or runs out of time does not stop the others. ``summary.json`` in the output folder is written after each part, the
output of a part to a file of its name, tables to ``*.json`` as ``benchmarks.render`` takes them. Parts that have passed are not run again
(``--again`` does). Nothing is fetched from the network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
TAIL = 2000  # characters of output that a failing part shows


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: Of the part and of its output.
        command: Words; ``{out}`` is the output folder.
        seconds: Its time limit.
        env: Variables.
        needs_gpu: Means nothing on another device.
    """

    name: str
    command: list[str]
    seconds: int
    env: dict[str, str] = field(default_factory=dict)
    needs_gpu: bool = False


def parts(device: str, toy: bool) -> list[Part]:
    """What is run, in this order."""
    python, quiet = sys.executable, ["-q", "-p", "no:cacheprovider"]
    offload = [python, "-m", "benchmarks.offload_gpu", "--device", device, *(["--toy"] if toy else [])]
    ours = [*offload, "--limit", "400", "--contenders", "hf_zero", "--dtypes"]
    peers = [*offload, "--limit", "180", "--contenders", "pytorch", "fsdp2", "--dtypes", "bf16"]
    lightning = ["--n_layer", "4", "--n_head", "4", "--n_embd", "64"] if toy else ["--n_layer", "24", "--n_head", "16", "--n_embd", "2048"]
    lightning_command = [
        python,
        "-m",
        "benchmarks.mingpt_lightning",
        "--gpus",
        "1",
        "--strategy",
        "zero3",
        "--cpu_offload",
        "--precision",
        "bf16",
        *lightning,
    ]
    return [
        Part("facts", [python, "-m", "hf_zero", "report"], 60),
        Part("kernels", [python, "build_backend/native_library.py"], 120),
        Part("jobs", [python, "-m", "tests.gpu", "--device", device], 500),
        Part(
            "toy",
            [*offload, "--toy", "--limit", "90", "--dtypes", "bf16", "--json", "{out}/toy.json", "--trace", "{out}/toy-trace.json"],
            300,
        ),
        Part("xl-bf16", [*ours, "bf16", "--json", "{out}/xl-bf16.json", "--trace", "{out}/timeline.json"], 560),
        Part("xl-peers", [*peers, "--json", "{out}/xl-peers.json"], 560),
        Part("xl-fp16", [*ours, "fp16", "--json", "{out}/xl-fp16.json"], 560),
        Part("tests", [python, "-m", "pytest", *quiet, "-m", "gpu", "tests"], 560, needs_gpu=True),
        Part("triton", [python, "-m", "tests.gpu", "--device", device, "--jobs", "parity"], 300, {"HF_ZERO_TRITON": "1"}, needs_gpu=True),
        Part("xl-no-overlap", [*ours, "bf16", "--overlap", "none", "--json", "{out}/xl-no-overlap.json"], 560),
        Part("lightning", lightning_command, 560, needs_gpu=True),
        Part(
            "largest",
            [*ours, "bf16", "--largest", "--host-gib", "100", "--steps", "1", "--json", "{out}/largest.json"],
            580,
            needs_gpu=True,
        ),
    ]


def run(part: Part, out: Path) -> dict[str, Any]:
    """Runs one part and ends all that it has started; what it did."""
    words = [word.replace("{out}", str(out)) for word in part.command]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", **part.env}
    log = out / f"{part.name}.txt"
    start = time.monotonic()
    with log.open("w") as text:
        process = subprocess.Popen(words, cwd=REPOSITORY, env=env, stdout=text, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | str = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            status = f"still running after {part.seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # ranks of its own, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    tail = log.read_text(errors="replace")[-TAIL:]  # a progress bar may have been cut
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "command": " ".join(words), "tail": tail}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results-gpu"), help="folder of the results")
    parser.add_argument("--only", nargs="+", default=[], help="names of parts")
    parser.add_argument("--skip", nargs="+", default=[], help="names of parts")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds that the whole may take; 0 for no limit")
    parser.add_argument("--device", choices=["cuda", "cpu", "pretend"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="small models")
    parser.add_argument("--again", action="store_true", help="run parts that have passed before as well")
    parser.add_argument("--list", action="store_true", help="print the parts and run none")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    chosen = [part for part in parts(arguments.device, arguments.toy) if part.name not in arguments.skip]
    unknown = set(arguments.only) - {part.name for part in chosen}
    if unknown:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(part.name for part in chosen)}")
    chosen = [part for part in chosen if not arguments.only or part.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{part.name:14} {part.seconds:4} s  {' '.join(part.command)}" for part in chosen))
        return 0
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary = out / "summary.json"
    found: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    start = time.monotonic()
    for part in chosen:
        left = arguments.budget - (time.monotonic() - start) if arguments.budget else float("inf")
        if part.needs_gpu and arguments.device != "cuda":
            print(f"{part.name}: left out, needs a GPU", flush=True)
        elif found.get(part.name, {}).get("status") == 0 and not arguments.again:
            print(f"{part.name}: has passed", flush=True)
        elif left < min(part.seconds, 30):
            print(f"{part.name}: no time left", flush=True)
        else:
            limited = Part(part.name, part.command, int(min(part.seconds, left)), part.env)
            found[part.name] = result = run(limited, out)
            summary.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{part.name}: {result['status']} in {result['seconds']} s", flush=True)
            if result["status"] != 0:
                print(result["tail"], flush=True)
    return int(any(result["status"] != 0 for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
