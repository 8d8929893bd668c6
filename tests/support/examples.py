"""The examples for tests: their modules imported like the scripts do, and whole runs on two ranks of this machine's CPU."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support import launches, processes, ranks

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
RUN_SECONDS = 600  # limit for hangs: about ten times the time on a loaded machine
TEST_SECONDS = 4 * RUN_SECONDS  # above the limits of a test's commands: reaching it ends pytest and leaves the command running
# Names of modules in the examples' folders; removed after use, because the next folder has modules of the same names, and a script that
# stayed loaded would keep an earlier copy of its folder's modules.
LOCAL_NAMES = frozenset(path.stem for path in EXAMPLES.glob("*/*.py"))


@contextmanager
def modules(folder: str, *names: str) -> Iterator[SimpleNamespace]:
    """Yield modules of ``examples/<folder>``, imported like its scripts do.

    Args:
        folder: Name of the example's folder.
        *names: Modules of that folder.
    """
    path = str(EXAMPLES / folder)
    sys.path.insert(0, path)
    hidden: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in LOCAL_NAMES if name in sys.modules}
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(path)
        for name in [name for name in sys.modules if name in LOCAL_NAMES]:
            del sys.modules[name]
        sys.modules.update(hidden)


def run(command: Sequence[str], *, cache: Path, on_cpu: bool = False, seconds: float = RUN_SECONDS) -> str:
    """Run a command in the root of the repository, like on two ranks of this machine's CPU.

    Args:
        command: Words after the interpreter.
        cache: Folder for the caches of `datasets`.
        seconds: Time limit.
        on_cpu: Tell Accelerate to ignore GPUs, which DDP needs; with a DeepSpeed configuration it would switch ZeRO off.

    Returns:
        The command's output. Fails with the whole output when the run fails or exceeds the limit.
    """
    changes = {"NETRC": os.devnull, "HF_ZERO": "1", "HF_DATASETS_CACHE": str(cache), "HF_MODULES_CACHE": str(cache / "modules")}
    if on_cpu:
        changes["ACCELERATE_USE_CPU"] = "true"
    environment = {name: value for name, value in processes.environment(changes).items() if not name.startswith("WANDB_")}
    words = [sys.executable, *command]
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def launch(config: Path, script: Path, *flags: str, cache: Path) -> str:
    """Run a script under ``accelerate launch``; see `run`."""
    port = str(ranks._free_port())  # only newer accelerate versions choose a free port for 0
    words = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config), "--main_process_port", port]
    return run([*words, str(script), *flags], cache=cache, on_cpu="MULTI_GPU" in config.read_text())


def launch_on_ranks(config: Path, script: Path, *flags: str, cache: Path) -> str:
    """Run a script like `launch`, but on ranks of the pool instead of new processes."""
    return launches.launch_on_ranks(config, script, *flags, NETRC=os.devnull, HF_DATASETS_CACHE=str(cache))


@contextmanager
def small_library(offline: ModuleType, root: Path) -> Iterator[None]:
    """Make the offline data come from a part of the standard library, because parsing all of it takes seconds.

    Args:
        offline: The example's module ``offline``.
        root: Folder of the part.
    """
    whole = offline.library_root
    offline.library_root = lambda: root
    try:
        yield
    finally:
        offline.library_root = whole


@functools.cache
def library_part() -> Path:
    """Return a folder with copies of some packages of the standard library."""
    folder, root = Path(tempfile.mkdtemp(prefix="library_part_")), Path(argparse.__file__).parent
    for name in ("asyncio", "email", "json", "logging"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def results_of(folder: Path) -> dict[str, Any]:
    """Return the results of a script without Trainer."""
    return json.loads((folder / "results.json").read_text())


def losses_of(folder: Path) -> dict[int, float]:
    """Return the training losses of a script, by optimizer step."""
    return {entry["step"]: entry["train_loss"] for entry in results_of(folder)["log"]}
