"""Fresh Python processes for tests of start-up behaviour: what a user's shell would start, with the alias active."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
# No test may depend on how fast the machine is: limits that end only what hangs are this many times what a quiet machine with two cores
# needs at most. `tools/mutants.py`, which plants faults that hang, sets 1.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "5"))
MOST_SECONDS = 600.0  # for an event that is certain to come
PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
# What a launcher or another test may have set, and what would change what a fresh process does.
DROPPED_PREFIXES = ("ACCELERATE_", "DEEPSPEED_", "HF_ZERO", "MASTER_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONPATH")

# One interpreter imports what takes seconds; each piece of code goes on from there in a process of its own, and ends as a whole one would.
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
    print(json.dumps({{name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}}))
    sys.exit()
for number in (1, 2):
    os.dup2(os.open(f"{{folder}}/{{number}}", os.O_WRONLY | os.O_CREAT), number)
sys.argv = ["-c", folder]
exec(compile(code, "<script>", "exec"))
"""


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Works in ``folder``; contextlib's own came with Python 3.11."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def until(event: Callable[[], object], name: str = "", pause: float = 0.01) -> None:
    """Wait until ``event()`` is true. A test waits for what happens, never for a time in which it should have happened.

    Args:
        event: Condition, asked again and again.
        name: Of the event, for the error.
        pause: Seconds between two questions.

    Raises:
        AssertionError: The event has not come after ``MOST_SECONDS``.
    """
    deadline = time.monotonic() + MOST_SECONDS
    while not event():
        if time.monotonic() > deadline:
            raise AssertionError(f"{name or event} has not come in {MOST_SECONDS:g} s")
        time.sleep(pause)


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its status, what it printed, and the folder that it had."""

    status: int
    out: str
    err: str
    folder: Path


@functools.cache
def hook_folder() -> str | None:
    """A folder that switches the alias on by PYTHONPATH, or None where hf_zero is installed and its hook does."""
    bare = subprocess.run([sys.executable, "-c", PROBE], cwd="/", env=_clean_environment(), capture_output=True)
    if bare.returncode == 0:
        return None
    folder = tempfile.mkdtemp(prefix="hf_zero_hook_")
    Path(folder, "sitecustomize.py").write_text("import _hf_zero_startup\n")
    return folder


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a fresh process: this one's without launcher variables, hf_zero importable, the alias active, GPUs hidden.

    Two ranks need two GPUs under nccl; on the CPU they are the same everywhere.
    """
    env = _clean_environment()
    hook = hook_folder()
    if hook is not None:
        env["PYTHONPATH"] = os.pathsep.join((hook, str(REPO)))
    env.update(
        {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PATH": _path()}
    )
    env.update(changes or {})
    return env


def run_python(
    code: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None, options: Sequence[str] = (), timeout: float = 120.0
) -> str:
    """Runs ``code`` in a fresh interpreter and returns what it printed; fails with its output if it fails."""
    return run([sys.executable, *options, "-c", textwrap.dedent(code)], cwd=cwd, env=env, timeout=timeout)


def run_forked(codes: Mapping[str, str], folder: Path, imports: str = "import torch._dynamo", timeout: float = 120.0) -> dict[str, Ended]:
    """Runs pieces of code at the same time, as run_python would, with imports that they share; they find their folder in sys.argv[1]."""
    (folder / "codes.json").write_text(json.dumps({name: textwrap.dedent(code) for name, code in codes.items()}))
    statuses = json.loads(run([sys.executable, "-c", FORKING.format(imports=imports), str(folder)], cwd=REPO, timeout=timeout))
    printed = {name: [(folder / name / number).read_text() for number in "12"] for name in codes}
    return {name: Ended(statuses[name], *printed[name], folder / name) for name in codes}


def run(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120.0) -> str:
    """Runs a command like a user would and returns its standard output; fails with all output if it fails."""
    done = subprocess.run(list(command), cwd=cwd or "/", env=environment(env), capture_output=True, text=True, timeout=PATIENCE * timeout)
    assert done.returncode == 0, f"{' '.join(command)[:400]}\nexit status {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES) and name not in DROPPED}


def _path() -> str:
    """PATH with this interpreter's commands (accelerate, torchrun) first."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
