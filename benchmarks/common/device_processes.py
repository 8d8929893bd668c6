"""Run the ranks of one contender, processes of ``device_worker.py``, under a time limit; return rank 0's answer, or the failure."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.common.processes import REPOSITORY, RUNNER, free_port, python_path

WORKER = Path(__file__).with_name("device_worker.py")
OURS = ("limit", "world", "peer_path")  # keys of a job that are not passed to the worker
SECONDS_AFTER_FAILURE = 5.0  # time for the other ranks to report after one has failed
TAIL = 2000  # characters


@dataclass(frozen=True)
class Outcome:
    """Answer of a contender, or the reason why there is none, and what the failed rank wrote to its standard error."""

    answer: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    errors: str = ""


class Started:
    """The ranks of one contender: they import their packages at once, and train when ``finish`` is called.

    Args:
        job: The fields of ``contenders.Job``, and ``limit`` (seconds after the start of training, 0 for none), ``world`` (number of ranks,
            1) and ``peer_path`` (a folder with DeepSpeed).
        python: The Python interpreter.
    """

    def __init__(self, job: Mapping[str, Any], python: str) -> None:
        self.job = job
        words = [python, str(RUNNER), str(WORKER), json.dumps({name: value for name, value in job.items() if name not in OURS})]
        shared = _environment(job, python)
        self._files: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(job.get("world", 1)):
            out, err = (tempfile.TemporaryFile("w+b", prefix=f"rank{rank}_") for _ in range(2))  # noqa: SIM115 - closed by finish
            self._files += [out, err]
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.append(subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=out, stderr=err))

    def finish(self) -> Outcome:
        """Let the ranks train, and return the answer of rank 0 or the reason why there is none."""
        try:
            for process in self._processes:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # a rank that could not import its packages
                    process.stdin.write(b"go\n")
                    process.stdin.close()
            late = _wait(self._processes, self.job.get("limit") or float("inf"))
        finally:
            codes = self.stop()
        texts = [_text(file) for file in self._files]
        for file in self._files:
            file.close()
        return _outcome(self.job, codes, texts[::2], texts[1::2], late)

    def stop(self) -> list[int]:
        """End all ranks; return their exit statuses."""
        for process in self._processes:
            process.kill()
            process.wait()
        return [process.returncode for process in self._processes]


def run(job: Mapping[str, Any], python: str) -> Outcome:
    """Run one contender; the arguments are those of ``Started``."""
    return Started(job, python).finish()


def run_all(jobs: Iterable[tuple[Mapping[str, Any], str]]) -> Iterator[Outcome]:
    """Yield the outcomes of jobs, each with its Python, in order; a job's ranks start while the job before trains."""
    waiting: Started | None = None
    try:
        for job, python in jobs:
            before, waiting = waiting, Started(job, python)
            if before is not None:
                yield before.finish()
        if waiting is not None:
            yield waiting.finish()
    finally:
        if waiting is not None:
            waiting.stop()


def add_peer(parser: argparse.ArgumentParser) -> None:
    """Add the options that locate DeepSpeed."""
    parser.add_argument("--peer-python", default="", help="Python of a venv with DeepSpeed")
    parser.add_argument("--peer-path", default="", help="folder with DeepSpeed for this Python")


def peer_of(arguments: argparse.Namespace) -> str:
    """Return the Python that runs DeepSpeed; "" without one."""
    from hf_zero.deepspeed.alias.finder import real_deepspeed_importable

    return arguments.peer_python or (sys.executable if arguments.peer_path or real_deepspeed_importable() else "")


def _environment(job: Mapping[str, Any], python: str) -> dict[str, str]:
    world = str(job.get("world", 1))
    env = {**os.environ, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env["TRANSFORMERS_VERBOSITY"] = "error"
    env["PATH"] = os.pathsep.join((str(Path(python).parent), env["PATH"]))  # the peer compiles with the ninja of its venv
    first = [job.get("peer_path", "")] if job["contender"] == "deepspeed" else [str(REPOSITORY)]
    env["PYTHONPATH"] = python_path(python, *first)
    if job["contender"] == "deepspeed":
        env["TORCH_EXTENSIONS_DIR"] = str(_extensions())
    if job["device"] == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    if job["device"] == "pretend":
        env["PRETEND_MEMORY"] = str(int((job.get("cap_gib") or 24) * 2**30))
    return env


def _extensions() -> Path:
    """Return the folder in which the peer compiles; remove locks that killed processes left there, because compilation waits for them."""
    folder = Path(tempfile.gettempdir(), "hf_zero_peer_extensions")
    for lock in folder.rglob("lock"):
        lock.unlink(missing_ok=True)
    return folder


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> bool:
    """Wait for all processes, for the limit, or shortly after the first failure; return whether the limit ran out."""
    end = deadline = time.monotonic() + limit
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            end = min(end, time.monotonic() + SECONDS_AFTER_FAILURE)
        if time.monotonic() >= end:
            return end == deadline
        time.sleep(0.05)
    return False


def _outcome(job: Mapping[str, Any], codes: list[int], outs: list[str], errors: list[str], late: bool) -> Outcome:
    lines = [line for line in outs[0].splitlines() if line.startswith("{")]
    if lines:
        return Outcome(json.loads(lines[-1]))
    # A killed rank may be a consequence of another rank's failure, which has the reason.
    failed = next((rank for rank, code in enumerate(codes) if code not in (0, -signal.SIGKILL)), 0)
    print(errors[failed][-TAIL:], file=sys.stderr)
    reason = f"not done after {job['limit']:g} s" if late else reason_of(codes[failed], errors[failed])
    return Outcome(reason=reason, errors=errors[failed])


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")  # a progress bar may be cut in the middle of a character


def reason_of(status: int, errors: str) -> str:
    """Return why a process gave no answer, in a few words."""
    if "OutOfMemoryError" in errors or "CUDA out of memory" in errors:
        return "out of GPU memory"
    if status == -9 or "HostMemoryError" in errors or "out of host memory" in errors:
        return "out of host memory"
    last = errors.strip().splitlines()[-1:] or [f"exit status {status}"]
    return f"does not run: {last[0][:80]}"
