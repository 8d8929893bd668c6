"""New Python processes for tests of start-up behaviour, like a user's shell starts them, with the alias active."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
START = str(Path(__file__).with_name("start"))  # has ``sitecustomize.py``
# No test may depend on the speed of the machine. So limits that end hanging processes are this many times the longest time on a quiet
# machine with two cores. `tools/mutants.py`, which plants faults that hang, sets 1.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "5"))
MOST_SECONDS = 600.0  # limit for an event that is certain to come
PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
# Variables that a launcher or another test may have set and that would change a new process.
DROPPED_PREFIXES = ("ACCELERATE_", "DEEPSPEED_", "HF_ZERO", "MASTER_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONPATH")

# One interpreter does the imports, which take seconds; each piece of code continues in a fork of its own, and ends like a whole process.
FORKING = """
import gc, json, os, sys
{imports}
gc.freeze()  # or each child copies what the collector looks at
children = {{}}
for name, code in json.load(open(sys.argv[1] + "/codes.json")).items():
    folder = f"{{sys.argv[1]}}/{{name}}"
    os.mkdir(folder)
    children[name] = os.fork()
    if not children[name]:
        break
else:
    statuses = {{name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}}
    with open(sys.argv[1] + "/statuses.json", "w") as file:
        json.dump(statuses, file)
    sys.exit()
for number in (1, 2):
    os.dup2(os.open(f"{{folder}}/{{number}}", os.O_WRONLY | os.O_CREAT), number)
sys.argv = ["-c", folder]
{run}
"""
RUN = 'exec(compile(code, "<script>", "exec"))'
# Destroying the modules takes longer than most codes.
RUN_AND_END = f"""
import atexit, threading
status = 0
try:
    {RUN}
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
    if status and not isinstance(end.code, int):
        print(end.code, file=sys.stderr)
except BaseException as error:
    sys.excepthook(type(error), error, error.__traceback__)
    status = 1
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status & 255)
"""


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in ``folder`` inside the context; contextlib has this only from Python 3.11 on."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def until(event: Callable[[], object], name: str = "", pause: float = 0.01) -> None:
    """Wait until ``event()`` is true. A test waits for an event, never for a time in which it should have happened.

    Args:
        event: Condition, called repeatedly.
        name: Name of the event, for the error.
        pause: Seconds between two calls.

    Raises:
        AssertionError: The condition is still false after ``MOST_SECONDS``.
    """
    deadline = time.monotonic() + MOST_SECONDS
    while not event():
        if time.monotonic() > deadline:
            raise AssertionError(f"{name or event} has not come in {MOST_SECONDS:g} s")
        time.sleep(pause)


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its status, its output, and its folder."""

    status: int
    out: str
    err: str
    folder: Path


@functools.cache
def python_path() -> str:
    """Return PYTHONPATH of new processes: the start-up code of tests, and this repository unless hf_zero is installed."""
    bare = subprocess.run([sys.executable, "-c", PROBE], cwd="/", env=_clean_environment(), capture_output=True)
    return START if bare.returncode == 0 else os.pathsep.join((START, str(REPO)))


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a new process: this one's without launcher variables, hf_zero importable, the alias active, GPUs hidden.

    GPUs are hidden because two ranks need two GPUs under nccl; on the CPU all machines are equal.
    """
    env = _clean_environment()
    env["PYTHONPATH"] = python_path()
    env.update(
        {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PATH": _path()}
    )
    env.update(changes or {})
    return env


def run_python(
    code: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None, options: Sequence[str] = (), timeout: float = 120.0
) -> str:
    """Run ``code`` in a new interpreter and return its output; fail with the output if it fails."""
    return run([sys.executable, *options, "-c", textwrap.dedent(code)], cwd=cwd, env=env, timeout=timeout)


def run_forked(
    codes: Mapping[str, str], folder: Path, imports: str = "import torch._dynamo", timeout: float = 120.0, whole_end: bool = True
) -> dict[str, Ended]:
    """Run pieces of code at the same time, like ``run_python``, with shared imports; each finds its folder in sys.argv[1].

    ``whole_end`` False leaves out the end of an interpreter behind its exit handlers: modules and open files are not destroyed.
    """
    program = forking_program(codes, folder, imports, whole_end)
    run([sys.executable, "-c", program, str(folder)], cwd=REPO, timeout=timeout)
    return ended_in(folder)


def forking_program(codes: Mapping[str, str], folder: Path, imports: str, whole_end: bool) -> str:
    """Return the program that forks for each code; its first argument is ``folder``, where it finds them."""
    (folder / "codes.json").write_text(json.dumps({name: textwrap.dedent(code) for name, code in codes.items()}))
    return FORKING.format(imports=imports, run=RUN if whole_end else RUN_AND_END)


def ended_in(folder: Path) -> dict[str, Ended]:
    """Return how the codes of the program in ``folder`` have ended."""
    statuses: dict[str, int] = json.loads((folder / "statuses.json").read_text())
    printed = {name: [(folder / name / number).read_text() for number in "12"] for name in statuses}
    return {name: Ended(status, *printed[name], folder / name) for name, status in statuses.items()}


def run(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120.0) -> str:
    """Run a command like a user would and return its standard output; fail with all output if it fails."""
    done = subprocess.run(list(command), cwd=cwd or "/", env=environment(env), capture_output=True, text=True, timeout=PATIENCE * timeout)
    assert done.returncode == 0, f"{' '.join(command)[:400]}\nexit status {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES) and name not in DROPPED}


def _path() -> str:
    """Return PATH with this interpreter's commands (accelerate, torchrun) first."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
