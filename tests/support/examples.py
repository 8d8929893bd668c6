"""The examples for tests: their modules imported as the scripts import them, and whole runs on two ranks of this machine's CPU."""

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
RUN_SECONDS = 600  # a limit for hangs: some ten times of what a loaded machine takes
TEST_SECONDS = 4 * RUN_SECONDS  # above all commands of a test: reaching it ends the process of tests and leaves the command running
# What the folders of the examples call their own; forgotten after use, since the next folder has modules of the same names.
LOCAL_NAMES = (
    "arguments",
    "bleu",
    "chat",
    "data",
    "demo",
    "f1_accuracy",
    "flags",
    "model",
    "offline",
    "policy",
    "run_clm",
    "run_mlm_no_trainer",
    "run_sft",
    "senders",
    "server",
    "sft_data",
    "task",
    "train",
    "weight_group",
)


@contextmanager
def modules(folder: str, *names: str) -> Iterator[SimpleNamespace]:
    """Modules of ``examples/<folder>``, imported as its scripts import them.

    Args:
        folder: Of the example.
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
    """Run a command in the root of the repository, as two ranks of this machine's CPU would be started.

    Args:
        command: Words after the interpreter.
        cache: Folder for what `datasets` caches.
        seconds: Time limit.
        on_cpu: Tell Accelerate to leave GPUs alone, which DDP needs; with a DeepSpeed configuration it would switch ZeRO off.

    Returns:
        What it printed. Fails with all of it when the run fails or lasts too long.
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
    port = str(ranks._free_port())  # 0 means a free one to newer accelerate only
    words = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config), "--main_process_port", port]
    return run([*words, str(script), *flags], cache=cache, on_cpu="MULTI_GPU" in config.read_text())


def launch_on_ranks(config: Path, script: Path, *flags: str, cache: Path) -> str:
    """As `launch`, without its processes: on ranks of the pool."""
    return launches.launch_on_ranks(config, script, *flags, NETRC=os.devnull, HF_DATASETS_CACHE=str(cache))


@contextmanager
def small_library(offline: ModuleType, root: Path) -> Iterator[None]:
    """Let the offline data come from a part of the standard library: parsing all of it takes seconds.

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
    """Folder with copies of some packages of the standard library."""
    folder, root = Path(tempfile.mkdtemp(prefix="library_part_")), Path(argparse.__file__).parent
    for name in ("asyncio", "email", "json", "logging"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def results_of(folder: Path) -> dict[str, Any]:
    """What a script without Trainer measured."""
    return json.loads((folder / "results.json").read_text())


def losses_of(folder: Path) -> dict[int, float]:
    """Its training losses, by optimizer step."""
    return {entry["step"]: entry["train_loss"] for entry in results_of(folder)["log"]}
