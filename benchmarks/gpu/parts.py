"""Run everything that needs a GPU, in turn, each part under its own time limit: exactness, step time, offload, the largest model.

    make gpu                                                      # all parts, most important first, into results-gpu/
    make gpu GPU_ARGS="--out DIR --budget-s 560"                  # only parts that fit into this many seconds; the next call continues
    python -m benchmarks.gpu --only step-time xl-bf16
    python -m benchmarks.gpu --toy --device pretend               # the same parts at toy size, on a pretend accelerator
    python -m benchmarks.gpu --list

One line per part. Parts that compare values run side by side, parts that measure time run alone. A part that fails, hangs or runs out of
time does not stop the others. The output folder is written after each part
(``benchmarks/gpu/results.py`` describes it). Parts that have ended are not run again (``--again`` does; parts that the budget cut short
are), except parts that depend on the machine, on another machine. Nothing is fetched from the network: packages that this Python lacks
are taken from ``.gpu-bundle``, if ``benchmarks/gpu/gpu_bundle.sh`` has made it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.processes import REPOSITORY, python_path
from benchmarks.gpu.results import TABLE, TRACE, Results, append, now, said

TAIL = 2000  # characters of output that the summary keeps
LEAST = 60.0  # least remaining seconds to begin a part
BUNDLE = REPOSITORY / ".gpu-bundle"
VERSION = f"cp{sys.version_info.major}{sys.version_info.minor}"  # the bundle has a folder for each Python
LIBRARY = REPOSITORY / "hf_zero" / "native" / "libhf_zero_kernels.so"
TEST_PROCESSES = 4  # each test has up to four ranks
GPU_TESTS = (
    "native/test_native_triton.py",
    "offload/test_offload_budget.py",
    "parity/test_parity_matrix.py",
    "lightning/test_lightning.py",
)
NEEDED = ("torch", "transformers", "accelerate", "safetensors", "numpy", "packaging", "pydantic", "rich", "tqdm")
LOCK = threading.Lock()  # of the results, and of the next two
RUNNING: set[subprocess.Popen[bytes]] = set()
STOPPED = threading.Event()
# The other tests of that file are parts of tests/support/gpu.py.
ELSEWHERE = "benchmarks/test_gpu_engine.py::test_checkpoints_travel_between_device_and_host"


@dataclass(frozen=True)
class Part:
    """One command to run.

    Attributes:
        name: Name of the part and of its results.
        command: Words; ``{scratch}``, here and in ``env``, is replaced by a folder of its own, for ``table.json`` and ``trace.json``.
        seconds: Time limit.
        env: Environment variables.
        needs_gpu: The part is meaningless on another device, where it runs only if it is named.
        of_machine: The part must run again on another machine.
        alone: The part measures time, so no other part runs beside it.
    """

    name: str
    command: list[str]
    seconds: int
    env: dict[str, str] = field(default_factory=dict)
    needs_gpu: bool = False
    of_machine: bool = False
    alone: bool = True


# ------------------------------------------------------------------------------------------------ parts


def parts(device: str, toy: bool, gpus: int = 1) -> list[Part]:
    """Return all parts in order: the most important within the first ten minutes, ranks that share a GPU last."""
    python, small, json_file = sys.executable, ["--toy"] if toy else [], ["--json", "{scratch}/" + TABLE]
    where = ["--device", device]
    peer = ["--peer-path", str(BUNDLE / VERSION / "peer")] if (BUNDLE / VERSION / "peer").is_dir() else []
    jobs = [python, "-m", "tests.support.gpu", *where]
    steps = [python, "-m", "benchmarks.steps.step_time_gpu", *where, *small, "--limit", "90", *peer, *json_file, "--table"]
    offload = [python, "-m", "benchmarks.offload.offload_gpu", *where, *small, *json_file]
    ours = [*offload, "--limit", "400", "--contenders", "hf_zero", "--dtypes"]
    peers = [*offload, "--limit", "180", *peer, "--contenders", "deepspeed", "fsdp2", "pytorch", "--dtypes", "bf16"]
    largest = [python, "-m", "benchmarks.experiments.largest_batch", *where, *small]
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers(), "-m", "gpu"]
    tests += [f"tests/{name}" for name in (*GPU_TESTS, ELSEWHERE)]
    own = {"TMPDIR": "{scratch}"}  # a test that counts the files it leaves must not see another part's
    several = Part("ranks", [*jobs, "--worlds", "2"], 560, own, alone=False)
    # Its first run compiles the peer's optimizer, which would count in a measurement.
    builds = [*offload, "--toy", "--limit", "200", *peer, "--contenders", "deepspeed", "--dtypes", "bf16"]
    return [
        Part("facts", [python, "-m", "benchmarks.gpu.facts", *where, *json_file], 90, of_machine=True),
        Part("kernels", [python, "packaging/native_library.py"], 120, of_machine=True),
        Part("parity", [*jobs, "--worlds", "1", "--jobs", "parity"], 240, own, alone=False),
        Part("compiled-values", [*jobs, "--worlds", "1", "--jobs", "compiled", "float8"], 240, own, alone=False),
        *([Part("peer-builds", builds, 240, needs_gpu=True, alone=False)] if peer else []),
        Part("jobs", [*jobs, "--worlds", "1", "--skip", "parity", "compiled", "float8"], 300, own, alone=False),
        Part("tests", tests, 560, own, needs_gpu=True, alone=False),
        Part("triton", [*jobs, "--worlds", "1", "--jobs", "parity"], 300, {**own, "HF_ZERO_TRITON": "1"}, needs_gpu=True, alone=False),
        *([replace(several, command=[*jobs, "--worlds", *(str(world) for world in (2, 4) if world <= gpus)])] if gpus > 1 else [several]),
        Part("compiled", [*steps, "compiled"], 560),
        Part("wide", [*steps, "wide"], 400),
        Part("lora", [*steps, "lora"], 400),
        Part("xl-bf16", [*ours, "bf16", "--trace", "{scratch}/" + TRACE], 450),
        Part("xl-peers", peers, 560),
        Part("step-time", [*steps, "eager"], 400),
        Part("xl-fp16", [*ours, "fp16"], 450),
        Part("xl-no-overlap", [*ours, "bf16", "--overlap", "none"], 450),
        Part("experiments", [*largest, "--limit", "90", *json_file], 580, needs_gpu=True),
        Part("lightning", lightning(toy), 450, needs_gpu=True),
        Part("largest", [*ours, "bf16", "--largest", "--host-gib", "100", "--steps", "1"], 580, needs_gpu=True),
    ]


def workers() -> list[str]:
    """Return pytest's options for several processes that share the tests, where its plug-in for it is there."""
    there = importlib.util.find_spec("xdist") is not None or (BUNDLE / VERSION / "pytest-xdist").is_dir()
    return ["-n", str(TEST_PROCESSES)] if there else []


def lightning(toy: bool) -> list[str]:
    """Return the command of minGPT under Lightning with hf_zero's strategy, a billion parameters."""
    size = {"--n_layer": "4", "--n_head": "4", "--n_embd": "64"} if toy else {"--n_layer": "24", "--n_head": "16", "--n_embd": "2048"}
    command = [sys.executable, "-m", "benchmarks.steps.mingpt_lightning", "--gpus", "1", "--strategy", "zero3", "--cpu_offload"]
    return [*command, "--precision", "bf16", *(word for pair in size.items() for word in pair)]


# ------------------------------------------------------------------------------------------------ machine

PROBE = """
import json, torch
there = torch.cuda.is_available()
properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if there else 0)]
print(json.dumps({"torch": torch.__version__, "gpus": [[one.name, str(getattr(one, "uuid", ""))] for one in properties]}))
"""


def machine(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts that results depend on: host, Python, PyTorch and GPUs; only a separate process opens the GPUs."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=dict(env), timeout=120)
    if done.returncode:
        raise SystemExit(f"{sys.executable} cannot import torch; say which Python can: make gpu GPU_PYTHON=...\n{done.stderr[-TAIL:]}")
    return {"host": platform.node(), "python": f"{platform.python_version()} {sys.executable}", **json.loads(done.stdout.splitlines()[-1])}


def carried(bundle: Path = BUNDLE / VERSION) -> list[str]:
    """Return the bundle's folders with a module that this Python lacks; other folders are left out in any version."""
    folders = sorted(path for path in bundle.glob("*") if path.is_dir() and path.name != "peer")
    return [str(path) for path in folders if any(importlib.util.find_spec(name) is None for name in _modules(path))]


def _modules(folder: Path) -> Iterator[str]:
    """Yield the names that can be imported from a folder."""
    for path in folder.iterdir():
        if (path / "__init__.py").is_file():
            yield path.name
        elif path.suffix == ".py" or path.suffix == ".so":
            yield path.name.split(".")[0]


def environment() -> dict[str, str]:
    """Return the variables of all parts: repository and bundle before the present PYTHONPATH, this Python's tools (cmake, ninja) in PATH.

    Raises:
        SystemExit: A package that all parts need is missing.
    """
    folders = carried()
    there = {name for folder in folders for name in _modules(Path(folder))}
    lacking = [name for name in NEEDED if name not in there and importlib.util.find_spec(name) is None]
    if lacking:
        raise SystemExit(
            f"{sys.executable} lacks {', '.join(lacking)}, and so does {BUNDLE / VERSION}. Run benchmarks/gpu/gpu_bundle.sh "
            f"(PYTHON_VERSION={sys.version_info.major}.{sys.version_info.minor}) where there is a network and carry that folder here"
        )
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return {**os.environ, "PYTHONPATH": python_path(sys.executable, str(REPOSITORY), *folders), "PATH": path, "HF_HUB_OFFLINE": "1"}


# ------------------------------------------------------------------------------------------------ running


def run(part: Part, log: Path, env: Mapping[str, str], scratch: Path) -> dict[str, Any]:
    """Run one part, end every process it has started, append its output to ``log``, and return its result."""
    words = [word.replace("{scratch}", str(scratch)) for word in part.command]
    more = {name: value.replace("{scratch}", str(scratch)) for name, value in part.env.items()}
    start = time.monotonic()
    output = scratch / "output.txt"
    with output.open("wb") as text:
        options: dict[str, Any] = {"cwd": REPOSITORY, "env": {**env, **more}, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with LOCK:
            if STOPPED.is_set():
                raise SystemExit(1)
            process = subprocess.Popen(words, stdout=text, stderr=subprocess.STDOUT, **options)
            RUNNING.add(process)
        try:
            status: int | str = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            status = f"still running after {part.seconds} s"
        finally:
            _kill(process)
            process.wait()
            with LOCK:
                RUNNING.discard(process)
    seconds = round(time.monotonic() - start, 1)
    with LOCK:
        tail = append(log, f"\n=== {part.name}, {now()}: {' '.join(part.command)}\n", output, TAIL)
    return {"status": status, "seconds": seconds, "limit": part.seconds, "when": now(), "command": " ".join(part.command), "tail": tail}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # ends the part's own ranks, too
        os.killpg(process.pid, signal.SIGKILL)


def stop() -> None:
    """End every running part, and start no other: the program is about to end."""
    with LOCK:
        STOPPED.set()
        for process in RUNNING:
            _kill(process)


def failure_line(text: str) -> str:
    """Return the last line that names a failure, or else the last line."""
    lines = text.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if "FAILED" in line or "Error" in line), lines[-1])[:200]


def due(part: Part, earlier: Mapping[str, Any] | None, here: Mapping[str, Any], again: list[str] | None) -> bool:
    """Return whether a part must be run.

    Args:
        part: The part.
        earlier: Its earlier result; None if it never ran.
        here: Facts of the machine.
        again: Value of ``--again``: names, or none for all failed parts; None without the option.
    """
    if earlier is None or (again is not None and (part.name in again if again else earlier["status"] != 0)):
        return True
    if part.of_machine and earlier["machine"] != here:
        return True
    if part.name == "kernels" and earlier["status"] == 0 and not LIBRARY.exists():
        return True
    return earlier["status"] != 0 and earlier["limit"] < part.seconds  # cut short by the budget


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results-gpu"), help="folder of the results: at most 8 files of 16 MiB")
    parser.add_argument("--only", nargs="+", default=[], help="names of parts")
    parser.add_argument("--skip", nargs="+", default=[], help="names of parts")
    parser.add_argument("--budget-s", type=float, default=0.0, help="seconds that the whole may take; 0 for no limit")
    parser.add_argument("--device", choices=["cuda", "cpu", "pretend"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="small models")
    parser.add_argument("--again", nargs="*", help="run these parts again; without names those that have failed")
    parser.add_argument("--list", action="store_true", help="print the parts and run none")
    return parser.parse_args()


def choose(arguments: argparse.Namespace, everything: list[Part]) -> list[Part]:
    """Return the parts that the command line selects."""
    names = {part.name for part in everything}
    unknown = {*arguments.only, *arguments.skip, *(arguments.again or ())} - names
    if unknown:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(part.name for part in everything)}")
    return [part for part in everything if part.name not in arguments.skip and (not arguments.only or part.name in arguments.only)]


def main() -> int:
    arguments = parse()
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes of a part are ended
    if arguments.list:
        for part in choose(arguments, parts(arguments.device, arguments.toy)):
            print(f"{part.name:14} {part.seconds:4} s  {' '.join(part.command)}")
        return 0
    env = environment()
    here = machine(env)
    chosen = choose(arguments, parts(arguments.device, arguments.toy, len(here["gpus"]) if arguments.device == "cuda" else 1))
    results = Results(arguments.out.resolve())
    print(f"{here['host']}, {here['gpus'] or 'no GPU'}, torch {here['torch']}, {here['python']}", flush=True)
    runner = Runner(arguments, env, here, results, len(chosen), start)
    for group in groups(chosen):
        with ThreadPoolExecutor(len(group)) as pool:
            try:
                list(pool.map(runner.take, group))
            except BaseException:  # a signal; the pool waits for its threads, and they wait for their processes
                stop()
                raise
    return int(any(results.parts.get(part.name, {"status": 0})["status"] != 0 for part in chosen))


def groups(chosen: list[Part]) -> list[list[Part]]:
    """Return the parts in order: each that runs alone in a list of its own, adjacent others together."""
    found: list[list[Part]] = []
    for part in chosen:
        if found and not part.alone and not found[-1][0].alone:
            found[-1].append(part)
        else:
            found.append([part])
    return found


@dataclass
class Runner:
    """Run parts, each if it is due and fits into the budget.

    Attributes:
        arguments: Options of the command line.
        env: Environment variables of all parts.
        here: Facts of the machine.
        results: Results so far.
        parts: Number of parts.
        start: Time at which the program began, by ``time.monotonic``.
        ended: Number of parts that have ended.
    """

    arguments: argparse.Namespace
    env: Mapping[str, str]
    here: dict[str, Any]
    results: Results
    parts: int
    start: float
    ended: int = 0

    def take(self, part: Part) -> None:
        """Run a part if it is due and there is time, add its result, and print one line."""
        text = self._outcome(part)
        with LOCK:
            self.ended += 1
            print(f"[{self.ended}/{self.parts}] {part.name}: {text}", flush=True)

    def _outcome(self, part: Part) -> str:
        given, earlier = self.arguments, self.results.parts.get(part.name)
        left = given.budget_s - (time.monotonic() - self.start) if given.budget_s else float("inf")
        if part.needs_gpu and given.device != "cuda" and part.name not in given.only:
            return "left out, needs a GPU"
        if not due(part, earlier, self.here, given.again):
            assert earlier is not None
            return f"{said(earlier)} before"
        if left < min(part.seconds, LEAST):
            return "no time left"
        with tempfile.TemporaryDirectory(prefix="hf_zero_gpu_") as scratch:
            result = run(replace(part, seconds=int(min(part.seconds, left))), self.results.log, self.env, Path(scratch))
            with LOCK:
                self.results.add(part.name, {**result, "machine": self.here}, Path(scratch))
        reason = "" if result["status"] == 0 else f": {failure_line(result['tail'])}"
        return f"{said(result)} in {result['seconds']:g} s{reason}"
