"""Run one node of a job that `hf-zero launch` starts over ssh: check the host, start torchrun, pass its output on, and end it.

[Note: one connection] The launcher sends this file and the node's settings through the standard input of ssh, so no value of a variable is
in a command line. The same connection is the life of the node: its output, framed by rank, flows back through standard output, and when
standard input ends, or is silent for ``settings["silence_s"]``, the launcher is gone and all processes of the node are ended. A rank cannot
leave them: on Linux this process adopts descendants whose parent has died.

This file imports only the standard library and nothing of hf_zero, because the host may have another version, or none: it reports that.

Lines to the launcher begin with ``MARK``: ``MARK 1 RANK TEXT`` is a line of a rank's output, ``MARK 2`` of its errors (RANK is ``-`` for
torchrun itself), and ``MARK ! JSON`` is a report. Lines from the launcher are ``go``, ``stop SIGNAL``, ``kill``, and empty ones, which only
tell that it is alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess  # nosec B404
import sys
import time
from typing import Any

MARK = b"\x1ehf_zero "
OUTPUTS = "HF_ZERO_OUTPUTS"  # for each local rank: the number of the agent's process, and of its pipes for output and errors
REPORT = "HF_ZERO_REPORT"  # the file into which torchrun writes which rank failed first
# Prints the versions that must be equal on all hosts, and whether the module in the first argument is there.
PROBE = """
import importlib.metadata, importlib.util, json, platform, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
try:
    from hf_zero import __version__ as own
except ImportError:
    own = None
try:
    found = not sys.argv[1] or importlib.util.find_spec(sys.argv[1]) is not None
except (ImportError, ValueError):
    found = False
python = ".".join(platform.python_version_tuple()[:2])
print("\\n" + json.dumps({"python": python, "hf_zero": own, "torch": version("torch"), "module": found}))
"""
_LONGEST_LINE = 1 << 16
_MOST_WAITING = 1 << 20  # bytes that wait for a slow connection before output of the ranks is left in their pipes
_MOST_SLOTS = 200  # ranks with pipes of their own; each needs four descriptors, and 1024 are a usual limit
_PROGRESS_SECONDS = 1.0
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1


class Output:
    """The lines of one stream of one rank.

    A progress bar rewrites its line with carriage returns. Of such a line the newest text is shown once a second, and the last one.

    Args:
        stream: 1 for output, 2 for errors.
        rank: Rank, or "-" for torchrun.
    """

    def __init__(self, stream: int, rank: str) -> None:
        self._head = b"%s%d %s " % (MARK, stream, rank.encode())
        self._rest = b""
        self._shown, self._shown_at = b"", -_PROGRESS_SECONDS

    def lines(self, data: bytes, now: float) -> bytes:
        """Return the framed lines that ``data`` completes; ``now`` is the time in seconds."""
        *whole, rest = (self._rest + data).split(b"\n")
        framed = [self._framed(line) for line in whole]
        if len(rest) > _LONGEST_LINE and b"\r" not in rest:
            framed.append(self._framed(rest))
            rest = b""
        if b"\r" in rest:
            newest = _newest(rest)
            rest = b"\r" + newest
            if newest and now - self._shown_at >= _PROGRESS_SECONDS:
                framed.append(self._framed(newest))
                self._shown, self._shown_at = newest, now
        self._rest = rest
        return b"".join(framed)

    def end(self) -> bytes:
        """Return the text after the last line's end, as a line."""
        rest, self._rest = self._rest, b""
        return self._framed(rest) if rest.strip(b"\r") else b""

    def _framed(self, line: bytes) -> bytes:
        text, shown = _newest(line), self._shown
        self._shown = b""
        return b"" if text and text == shown and b"\r" in line else self._head + text + b"\n"


def _newest(line: bytes) -> bytes:
    """Return the text that a terminal shows of a line with carriage returns."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


# -- checks -------------------------------------------------------------------------------------------------------------


def find_problems(settings: dict[str, Any], environment: dict[str, str]) -> tuple[list[str], dict[str, Any]]:
    """Return the reasons why the node cannot start, and its versions; change to the folder of the job.

    Args:
        settings: Settings of the node: ``folder``, ``script`` and its ``kind`` (script, module or program), ``python``, ``checks`` (False
            checks the folder alone), ``node``, ``address`` and ``port`` of rank 0, and whether the user has ``chosen`` the address.
        environment: Variables of the ranks.
    """
    try:
        os.chdir(settings["folder"])
    except OSError as error:
        return [f"the folder {settings['folder']} cannot be entered there: {error.strerror}"], {}
    if not settings["checks"]:
        return [], {}
    problems = []
    script, kind = settings["script"], settings["kind"]
    if kind == "script" and not os.path.isfile(script):
        problems.append(f"the script {script} does not exist there (folder {settings['folder']})")
    if kind == "program" and shutil.which(script, path=environment.get("PATH")) is None:
        problems.append(f"the program {script} does not exist there, or cannot be run (folder {settings['folder']})")
    problems += _address_problems(settings)
    versions = probe(settings["python"], script if kind == "module" else "", environment)
    if "error" in versions:
        problems.append(versions.pop("error"))
    if versions.get("module") is False:
        problems.append(f"the module {script} is not found there (folder {settings['folder']})")
    return problems, versions


def probe(python: str, module: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return the versions of Python, hf_zero and torch that ``python`` finds, and whether it finds ``module``."""
    done = subprocess.run([python, "-c", PROBE, module], env=environment, capture_output=True, text=True)  # nosec B603
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        lines = done.stderr.splitlines() or ["it printed nothing"]
        return {"error": f"{python} does not work there: {lines[-1]}"}


def _address_problems(settings: dict[str, Any]) -> list[str]:
    """Return problems with the address where the ranks meet: unknown there, of the wrong host, or in use."""
    address, port = settings["address"], settings["port"]
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = error.strerror or str(error)
        return [f"the address of rank 0, {address}, is unknown there ({reason}); give an address that all hosts know with --master_addr"]
    first, here = settings["node"] == 0, is_here(address)
    if not settings["chosen"] and first and not here:
        return [f"rank 0 would run there, but {address} is not an address of that host; give its address with --master_addr"]
    if not settings["chosen"] and not first and here:
        return [f"{address}, the host of rank 0, is an address of that host itself; give the address of rank 0 with --master_addr"]
    if first:
        with socket.socket() as probing:
            probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probing.bind(("", port))
            except OSError as error:
                return [f"port {port}, where the ranks would meet, cannot be used there: {error.strerror}; give another --master_port"]
    return []


def is_here(address: str) -> bool:
    """Return whether ``address``, a name or a number, belongs to this host."""
    try:
        with socket.socket() as probing:
            probing.bind((address, 0))
    except OSError:
        return False
    return True


# -- the node -----------------------------------------------------------------------------------------------------------


class Node:
    """torchrun on this host, and the pipes between its ranks and the launcher.

    Args:
        settings: Settings of the node: ``command`` (words of torchrun), ``first_rank`` and ``slots`` (number of ranks), ``silence_s``, and
            ``stop_s``, the time that torchrun has to end after a signal.
        environment: Variables of the ranks.
    """

    def __init__(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        self._settings, self._environment = settings, environment
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[int, Output] = {}
        self._waiting = bytearray()  # framed lines that the connection has not taken yet
        self._commands = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = time.monotonic()
        self._end_at = float("inf")  # when what remains is killed
        self._report = -1  # end for reading of the pipe with torchrun's report
        self._connected, self._stopped, self._status = True, False, 0

    def run(self) -> int:
        """Run the node until torchrun has ended and all processes of a failed node are gone; return the exit status."""
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._selector.register(0, selectors.EVENT_READ)
        while self._process is None or self._process.poll() is None:
            self._turn(0.1)
            if self._process is None and self._stopped:
                return 0
        status = self._process.returncode
        self._status = status if status >= 0 else 128 - status
        if self._status or self._stopped:
            self._kill_all()
        self._pass_on_rest()
        return self._status

    def _turn(self, seconds: float) -> None:
        """Wait up to ``seconds`` for something to happen, and handle it."""
        full = len(self._waiting) > _MOST_WAITING
        for key, _ in self._selector.select(seconds):
            if key.fd == 0:
                self._listen()
            elif not full:
                self._read(key.fd)
        if full:
            time.sleep(0.01)
        now = time.monotonic()
        if self._connected and now - self._heard > self._settings["silence_s"]:
            self._lose()
        if now > self._end_at:
            self._end_at = float("inf")
            self._kill_all()
        self._write()

    def _listen(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        self._heard = time.monotonic()
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"go" and self._process is None:
                self._start()
            elif word == b"stop":
                self._stop(int(number))
            elif word == b"kill":
                self._stop(signal.SIGTERM)
                self._kill_all()

    def _lose(self) -> None:
        """End the node: the launcher is gone."""
        if self._connected:
            self._connected = False
            with contextlib.suppress(KeyError):
                self._selector.unregister(0)
            self._waiting.clear()
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        """Pass a signal on to torchrun, which ends its ranks; kill all processes that are left after a time."""
        first, self._stopped = not self._stopped, True
        if first:
            self._end_at = time.monotonic() + self._settings["stop_s"]
        if first and self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _start(self) -> None:
        function = _prctl()
        if function is not None:
            function(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

        def before() -> None:
            if function is not None:
                function(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

        environment = {**self._environment, **self._pipes_of_ranks()}
        self._process = subprocess.Popen(  # nosec B603
            self._settings["command"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            preexec_fn=before,  # noqa: PLW1509 - this process has one thread
        )
        for stream, pipe in enumerate((self._process.stdout, self._process.stderr), start=1):
            if pipe is not None:
                self._add(pipe.fileno(), Output(stream, "-"))

    def _pipes_of_ranks(self) -> dict[str, str]:
        """Make two pipes per rank and one for the report; return variables that tell their place.

        torchrun closes inherited descriptors, so its children open the pipes of this process by their names in /proc.
        """
        if not os.path.isdir(f"/proc/{os.getpid()}/fd") or self._settings["slots"] > _MOST_SLOTS:
            return {}
        numbers = [str(os.getpid())]
        for local in range(self._settings["slots"]):
            rank = str(self._settings["first_rank"] + local)
            for stream in (1, 2):
                reading, writing = os.pipe()
                self._add(reading, Output(stream, rank))
                numbers.append(str(writing))
        self._report, report = os.pipe()
        os.set_blocking(self._report, False)
        return {OUTPUTS: ",".join(numbers), REPORT: f"/proc/{os.getpid()}/fd/{report}"}

    def _add(self, fd: int, output: Output) -> None:
        os.set_blocking(fd, False)
        self._outputs[fd] = output
        self._selector.register(fd, selectors.EVENT_READ)

    def _read(self, fd: int) -> bool:
        """Read from a pipe; return whether there was something."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._send(self._outputs[fd].lines(data, time.monotonic()))
            return True
        self._selector.unregister(fd)
        self._send(self._outputs.pop(fd).end())
        return False

    def _send(self, data: bytes) -> None:
        if self._connected:
            self._waiting += data

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(1, self._waiting[: 1 << 16])]
        except BlockingIOError:
            return  # the connection takes no more now; the rest waits for the next turn
        except OSError:
            self._lose()

    def _pass_on_rest(self) -> None:
        """Send all output that is left, and which rank failed first."""
        for fd in list(self._outputs):
            while self._read(fd):
                self._wait_for_room(_MOST_WAITING)
            if fd in self._outputs:
                self._send(self._outputs[fd].end())
        self._send(framed_report({"end": self._status, "failure": self._failure()}))
        self._wait_for_room(0)

    def _wait_for_room(self, most: int) -> None:
        self._write()
        while len(self._waiting) > most:
            if 0 in self._selector.get_map():
                with contextlib.suppress(BlockingIOError):
                    if not os.read(0, 1 << 16):
                        self._lose()
            time.sleep(0.01)
            self._write()

    def _failure(self) -> Any:
        try:
            return json.loads(os.read(self._report, 1 << 16))
        except (OSError, ValueError):
            return None

    def _kill_all(self) -> None:
        """Kill all descendants of this process, and wait until they are gone."""
        while descendants := _descendants(os.getpid()):
            for number in descendants:
                with contextlib.suppress(OSError):
                    os.kill(number, signal.SIGKILL)
            if self._process is None or self._process.poll() is not None:  # or its exit status would be lost
                with contextlib.suppress(OSError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
            time.sleep(0.02)


def _prctl() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).prctl
    function.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return function


def _descendants(ancestor: int) -> list[int]:
    """Return the numbers of all processes below ``ancestor`` that have not ended; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    ended = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        children.setdefault(int(parent), []).append(int(name))
        if state in b"ZX":
            ended.add(int(name))
    found, new = [], [ancestor]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found += [number for number in new if number not in ended]
    return found


def framed_report(report: dict[str, Any]) -> bytes:
    """Return the line that brings ``report`` to the launcher."""
    return MARK + b"! " + json.dumps(report).encode() + b"\n"


def main() -> None:
    """Run the node whose settings are the next line of standard input."""
    settings = json.loads(sys.stdin.buffer.readline())
    environment = {**os.environ, **settings["variables"]}
    problems, versions = find_problems(settings, environment)
    # A start-up file of the login shell may have printed something without a line's end.
    os.write(1, b"\n" + framed_report({"problems": problems, "versions": versions}))
    sys.stdout.flush()
    sys.exit(Node(settings, environment).run())


if __name__ == "__main__":
    main()
