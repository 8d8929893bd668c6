"""The rank processes of one contender: started together, answering requests in lines of JSON, ended together."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("run_worker.py")
SECONDS_TO_END = 20.0  # time for ranks to remove their files
SECONDS_TO_ANSWER = 600.0


class RankProcesses:
    """Processes that answer one JSON object per line, one process per rank; the constructor returns when each has answered once.

    The worker is a script that ``run_worker.py`` runs. Its process reads requests from standard input and writes answers to the file that
    ``open_answers`` returns.

    Args:
        name: Name of the contender, for errors.
        worker: Path of the worker script.
        arguments: Arguments of the script; values other than text are passed as JSON.
        world: Number of ranks, all on this machine.
        python: The Python interpreter. The Python of another venv does not get this process's PYTHONPATH.
        place: Function that returns the command which runs another command in a rank's place (a network namespace); None runs all ranks
            here.
        **variables: Environment of every rank, over the launcher's variables.

    Attributes:
        first: Answers of the ranks when they were ready.

    Raises:
        RuntimeError: A rank ended or does not answer; the message has the last lines that the ranks printed.
    """

    def __init__(
        self,
        name: str,
        worker: Path,
        arguments: list[Any],
        world: int,
        python: str = sys.executable,
        place: Callable[[int, list[str]], list[str]] | None = None,
        **variables: object,
    ) -> None:
        self.name = name
        self._log: IO[str] = tempfile.TemporaryFile("w+", prefix="ranks_")  # noqa: SIM115 - closed by stop
        self._processes: list[subprocess.Popen[str]] = []
        words = [python, str(RUNNER), str(worker), *(word if isinstance(word, str) else json.dumps(word) for word in arguments)]
        shared = _environment(world, python) | variables
        try:
            for rank in range(world):
                values = {**shared, "RANK": rank, "LOCAL_RANK": rank % int(str(shared["LOCAL_WORLD_SIZE"]))}
                env = {**os.environ, **{key: str(value) for key, value in values.items()}}
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
                self._processes.append(subprocess.Popen(place(rank, words) if place else words, env=env, text=True, **pipes))
            self.first = self.answers()
        except BaseException:
            self.stop(0.0)
            raise

    def ask(self, seconds: float = SECONDS_TO_ANSWER, **request: Any) -> list[dict[str, Any]]:
        """Send a request to every rank; return the ranks' answers."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # the rank has ended: reading its answer raises the error
                process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        return self.answers(seconds)

    def answers(self, seconds: float = SECONDS_TO_ANSWER) -> list[dict[str, Any]]:
        """Return the next line of every rank, parsed."""
        deadline = time.monotonic() + seconds
        return [json.loads(self._line(process, deadline)) for process in self._processes]

    def stop(self, seconds: float = SECONDS_TO_END) -> None:
        """Ask the ranks to end, so that they remove their files, and kill hanging ones."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def _line(self, process: subprocess.Popen[str], deadline: float) -> str:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        line = process.stdout.readline() if ready else ""  # type: ignore[union-attr]
        if line:
            return line
        what = f"a rank ended with code {process.wait(SECONDS_TO_ANSWER)}" if ready else "a rank does not answer"
        self._log.seek(0)
        raise RuntimeError(f"{self.name}: {what}\n{self._log.read()[-3000:]}")


def _environment(world: int, python: str) -> dict[str, object]:
    return {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
        "DS_ACCELERATOR": "cpu",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": python_path(python, *([str(REPOSITORY)] if python == sys.executable else [])),
        "PATH": os.pathsep.join((str(Path(python).parent), os.environ["PATH"])),  # a peer compiles with its venv's ninja
    }


def python_path(python: str, *first: str) -> str:
    """Return the PYTHONPATH of a process: ``first``, then this process's, unless ``python`` belongs to another venv."""
    own = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
    return os.pathsep.join(filter(None, (*first, own)))


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_answers() -> IO[str]:
    """Return, in a worker, the file for answers; from then on standard output, which libraries print to, goes to the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve_ranks(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests, in a worker that is one gloo rank with one thread, until standard input ends."""
    import torch
    import torch.distributed as dist

    answers = open_answers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
