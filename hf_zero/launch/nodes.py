"""Run all nodes of a job over ssh: check every host, start them together, show their output, and end them together.

[Note: the cause over nodes] A rank that dies takes its peers on other hosts with it, and those may end sooner than the launcher of its own
host has noticed. So after the first failure that only follows from another (``FOLLOWS``), the other hosts get a moment to end
by themselves; any other failure ends them at once. The cause is the first failure that does not follow from another.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import shlex
import shutil
import signal
import subprocess  # nosec B404
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero import __version__
from hf_zero.errors import ConfigError, printable
from hf_zero.launch import agent, ssh
from hf_zero.system.failure import FOLLOWS, INTERRUPTED, describe
from hf_zero.system.text_file import LIMIT_BYTES, read_bytes

_CHECK_SECONDS = 120.0
_ALIVE_SECONDS = 10.0  # between two signs of life
_SILENCE_SECONDS = 120.0  # without one, an agent ends its node
_GRACE_SECONDS = 10.0  # see [Note: the cause over nodes]
_REPEATED_SECONDS = 1.0  # signals that come together count once, as in ``system.signals``
_LATE_SECONDS = 30.0  # what an agent may take beyond the time of torchrun, and after it was asked to kill
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Node:
    """torchrun on one host.

    Attributes:
        host: Name of the host.
        words: The command line of torchrun.
        first_rank: Its first rank.
        slots: Number of its ranks.
        variables: Variables of this host alone.
    """

    host: str
    words: list[str]
    first_rank: int
    slots: int
    variables: dict[str, str]

    def is_this_machine(self) -> bool:
        """Return whether the host is the one of this process."""
        return is_this_machine(self.host)


def is_this_machine(host: str) -> bool:
    """Return whether ``host`` is a name or an address of this machine."""
    own = platform.node()
    return host in ("localhost", own, own.partition(".")[0]) or agent.is_here(host)


@dataclass(frozen=True)
class Job:
    """The nodes of one job.

    Attributes:
        nodes: Nodes, that of rank 0 first.
        ssh: First words of the ssh command.
        variables: Variables that are passed on; their values never appear in a command line.
        script: Script, module or program.
        kind: Which of these it is.
        address: Host of rank 0.
        port: Its port.
        is_address_given: The user has named the address.
        checks: Compare versions, and look for the script.
        always_ssh: This machine is reached over ssh, too.
        stop_s: Seconds that torchrun has to end after a signal.
    """

    nodes: list[Node]
    ssh: list[str]
    variables: dict[str, str] = field(repr=False)
    script: str
    kind: str
    address: str
    port: int
    is_address_given: bool
    checks: bool
    always_ssh: bool
    stop_s: float

    def start_words(self, node: Node) -> list[str]:
        """Return the command that starts the agent of a node."""
        return ssh.agent_here() if not self.always_ssh and node.is_this_machine() else ssh.agent_on(node.host, self.ssh)

    def settings_of(self, number: int) -> dict[str, Any]:
        """Return the settings of a node for its agent."""
        node = self.nodes[number]
        return {
            "node": number,
            "command": node.words,
            "variables": {**self.variables, **node.variables},
            "first_rank": node.first_rank,
            "slots": node.slots,
            "folder": str(Path.cwd()),
            "script": self.script,
            "kind": self.kind,
            "python": sys.executable,
            "address": self.address,
            "port": self.port,
            "chosen": self.is_address_given,
            "checks": self.checks,
            "silence_s": _SILENCE_SECONDS,
            "stop_s": self.stop_s,
        }

    def __str__(self) -> str:
        """Return the command of each host as shell lines, and the names of the variables whose values are not shown."""
        lines = []
        for node in self.nodes:
            how = "here" if self.start_words(node)[0] == sys.executable else f"{shlex.join(self.ssh)} -- {node.host}"
            words = [*(f"{name}={value}" for name, value in node.variables.items()), *node.words]
            lines.append(f"# {node.host}: {how}\n{shlex.join(words)}")
        return "\n".join([*lines, f"# with these variables: {', '.join(sorted(self.variables))}"])

    def run(self) -> int:
        """Run the job and return its exit status: that of the first failure, 128 and the number of a signal, or 0.

        Raises:
            ConfigError: Hosts are not ready; the message names all of them, with the reasons.
        """
        if shutil.which("ssh") is None and any(self.start_words(node)[0] == "ssh" for node in self.nodes):
            raise ConfigError("ssh is not on PATH, so other hosts cannot be reached; install it (Debian: openssh-client)")
        sys.stdout.flush()
        return _Run(self).run()


class _Screen:
    """Standard output and error of this process, for whole lines of several threads.

    Args:
        events: Gets ``("signal", None, SIGPIPE)``, once, if nobody reads the output: that ends the job as it ends a program.
    """

    def __init__(self, events: queue.SimpleQueue[Any]) -> None:
        self._events, self._lock, self._is_gone = events, threading.Lock(), False

    def show(self, stream: int, line: bytes) -> None:
        """Write a line to the descriptor ``stream``."""
        with self._lock:
            try:
                while line and not self._is_gone:
                    line = line[os.write(stream, line) :]
            except OSError:
                self._is_gone = True
                self._events.put(("signal", None, int(signal.SIGPIPE)))


class _Connection:
    """The connection to the agent of one node.

    Args:
        node: The node.
        words: The command that starts its agent.
        settings: Settings for the agent.
        events: Gets ``("report", connection, report)``, ``("end", connection, report)`` and ``("closed", connection, status)``.
        screen: Gets the output of the node.
    """

    def __init__(self, node: Node, words: list[str], settings: dict[str, Any], events: queue.SimpleQueue[Any], screen: _Screen) -> None:
        self.host, self.is_checked, self.is_closed = node.host, False, False
        self.end: dict[str, Any] | None = None  # the report of the end
        self.errors: deque[str] = deque(maxlen=30)  # until the report
        self._events, self._screen, self._lock = events, screen, threading.Lock()
        self._process = subprocess.Popen(  # nosec B603 - in a session of its own: Ctrl-C is for this process alone
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        program = read_bytes(agent.__file__, LIMIT_BYTES)
        self._first = b"%d\n%s%s\n" % (len(program), program, json.dumps(settings).encode())
        self._errors_reader = threading.Thread(target=self._read_errors, daemon=True)
        self._errors_reader.start()  # before the reader of the output, which waits for it
        for task in (self._introduce, self._read):
            threading.Thread(target=task, daemon=True).start()

    def send(self, line: bytes) -> None:
        """Send a line to the agent, unless it is gone."""
        pipe = self._process.stdin
        with self._lock, contextlib.suppress(OSError, ValueError):
            if pipe is not None:
                pipe.write(line + b"\n")
                pipe.flush()

    def close(self) -> None:
        """Close the connection, so that the agent ends its node."""
        pipe = self._process.stdin
        if not self._lock.acquire(timeout=1.0):  # ssh has not taken the settings yet
            self.kill()
            return
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
        self._lock.release()

    def kill(self) -> None:
        """End the ssh process."""
        self._process.kill()

    def wait(self, seconds: float) -> None:
        """Wait until the ssh process has ended; after ``seconds`` end it."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def _introduce(self) -> None:
        pipe = self._process.stdin
        with self._lock, contextlib.suppress(OSError, ValueError):
            if pipe is not None:
                pipe.write(self._first)
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._take(line)
            except ValueError:  # the connection has ended inside a line
                self._screen.show(1, f"[{self.host}] ".encode() + line.rstrip(b"\n") + b"\n")
        self._errors_reader.join()
        self._events.put(("closed", self, self._process.wait()))

    def _take(self, line: bytes) -> None:
        """Show a line of output, or put a report among the events."""
        if not line.startswith(agent.MARK):
            if line.strip():  # a start-up file of the login shell prints
                self._screen.show(1, f"[{self.host}] ".encode() + line)
            return
        kind, _, rest = line[len(agent.MARK) :].partition(b" ")
        if kind == b"!":
            report = json.loads(rest)
            self.is_checked = True
            self._events.put(("end" if "end" in report else "report", self, report))
            return
        rank, _, text = rest.partition(b" ")
        head = f"[{self.host}] " if rank == b"-" else f"[{self.host} rank {rank.decode()}] "
        self._screen.show(2 if kind == b"2" else 1, head.encode() + text)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if self.is_checked:
                self._screen.show(2, f"[{self.host}] ".encode() + line)
            else:
                self.errors.append(line.decode(errors="replace").rstrip())


@dataclass(frozen=True)
class _Failure:
    """A node that ended with an error: its host, exit status, and report of the rank that failed; ``late`` if it was asked to end."""

    host: str
    status: int
    report: dict[str, Any] | None
    late: bool

    @property
    def kind(self) -> str:
        return str((self.report or {}).get("kind", ""))


class _Run:
    """One run of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._screen = _Screen(self._events)
        self._connections: list[_Connection] = []
        self._failures: list[_Failure] = []
        self._lost: list[str] = []
        self._signal, self._signal_at = 0, 0.0
        self._steps = 0  # of ending: 1 asked to stop, 2 asked to kill, 3 connections killed
        self._deadline = float("inf")
        self._over = threading.Event()

    def run(self) -> int:
        """Run the job; see ``Job.run``."""
        with self._signals():
            try:
                for number, node in enumerate(self._job.nodes):
                    words = self._job.start_words(node)
                    self._connections.append(_Connection(node, words, self._job.settings_of(number), self._events, self._screen))
                threading.Thread(target=self._show_life, daemon=True).start()
                if self._check():
                    for connection in self._connections:
                        connection.send(b"go")
                    self._watch()
            finally:
                self._over.set()
                self._close()
        return self._status()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        former = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, handler in former.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, frame: self._events.put(("signal", None, number)))
        try:
            yield
        finally:
            for number, handler in former.items():
                if handler is not None:  # of another language
                    signal.signal(number, handler)

    def _show_life(self) -> None:
        while not self._over.wait(_ALIVE_SECONDS):
            for connection in self._connections:
                if connection.is_checked:
                    connection.send(b"")

    def _next(self) -> tuple[str, Any, Any] | None:
        """Return the next event; None at the deadline."""
        try:
            left = self._deadline - time.monotonic()
            return self._events.get(timeout=None if left == float("inf") else max(0.0, left))  # type: ignore[no-any-return]
        except queue.Empty:
            return None

    # -- before the start

    def _check(self) -> bool:
        """Wait for the report of every node; return False after a signal.

        Raises:
            ConfigError: Nodes are not ready.
        """
        reports: dict[_Connection, dict[str, Any]] = {}
        found: dict[_Connection, list[str]] = {}
        self._deadline = time.monotonic() + _CHECK_SECONDS
        while len(reports) + len(found) < len(self._connections):
            event = self._next()
            if event is None:
                for connection in self._connections:
                    if connection not in reports and connection not in found:
                        found[connection] = [f"it has not reported within {_CHECK_SECONDS:.0f} s"]
                break
            name, connection, value = event
            if name == "signal":
                self._signal = value
                return False
            if name == "report":
                reports[connection] = value
            else:  # it has closed, maybe after its report
                reports.pop(connection, None)
                found[connection] = [ssh.explain(connection.host, value, list(connection.errors))]
        self._deadline = float("inf")
        for connection, report in reports.items():
            found.setdefault(connection, []).extend([*report["problems"], *self._differences(report["versions"], reports)])
        wrong = [f"- {connection.host}: {text}" for connection in self._connections for text in found.get(connection, ())]
        if wrong:
            count = sum(bool(texts) for texts in found.values())
            raise ConfigError(f"{count} of {len(self._connections)} hosts cannot start, so none has started:\n" + "\n".join(wrong))
        return True

    def _differences(self, versions: dict[str, Any], reports: dict[_Connection, dict[str, Any]]) -> Iterator[str]:
        """Yield sentences about versions of a host that are not those of this machine (hf_zero) or of the first host that has reported."""
        first = next((connection for connection in self._connections if reports.get(connection, {}).get("versions")), None)
        if first is None or not versions:
            return
        for name in ("python", "hf_zero", "torch"):
            if name not in versions:
                continue
            host, expected = (first.host, reports[first]["versions"].get(name)) if name != "hf_zero" else ("this machine", __version__)
            if versions[name] != expected:
                yield (
                    f"it has {name} {versions[name]}, but {host} has {expected}; install the same version on all hosts"
                    if versions[name]
                    else f"{name} is not installed for {sys.executable} there"
                )

    # -- after the start

    def _watch(self) -> None:
        """Wait until all nodes have ended; end all of them when one fails, or on a signal."""
        running = set(self._connections)
        while running:
            event = self._next()
            if event is None:
                self._end_all()
                continue
            name, connection, value = event
            if name == "signal":
                if not self._signal or time.monotonic() - self._signal_at > _REPEATED_SECONDS:
                    self._end_all(value)
                if not self._signal:
                    self._signal, self._signal_at = value, time.monotonic()
            elif name == "end":
                connection.end = value
                if value["end"]:
                    self._fail(_Failure(connection.host, value["end"], value["failure"], self._steps > 0))
            elif name == "closed":
                running.discard(connection)
                connection.is_closed = True
                if connection.end is None:
                    self._lost.append(connection.host)
                    self._fail(_Failure(connection.host, 255, None, self._steps > 0))

    def _fail(self, failure: _Failure) -> None:
        self._failures.append(failure)
        if not self._steps and failure.kind == FOLLOWS:
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)
        elif not self._steps:
            self._end_all()

    def _end_all(self, number: int = signal.SIGTERM) -> None:
        """Ask all nodes to end; at the next call to kill their processes; after that, end the connections."""
        self._steps += 1
        wait = self._job.stop_s + _LATE_SECONDS if self._steps == 1 else _LATE_SECONDS
        self._deadline = time.monotonic() + wait
        for connection in self._connections:
            if connection.is_closed:
                continue
            if self._steps == 1:
                connection.send(b"stop %d" % (signal.SIGTERM if number == signal.SIGPIPE else number))
            elif self._steps == 2:
                connection.send(b"kill")
            else:
                connection.kill()

    def _close(self) -> None:
        """Close all connections, and end those that do not end by themselves."""
        for connection in self._connections:
            if connection.is_checked:
                connection.close()
            else:  # ssh may wait for its host
                connection.kill()
        deadline = time.monotonic() + _LATE_SECONDS
        for connection in self._connections:
            connection.wait(deadline - time.monotonic())

    # -- the end

    def _status(self) -> int:
        """Print why the job has ended, and return its exit status."""
        for host in self._lost:
            _say(
                f"the connection to {host} was lost; if the host still runs, its processes end within "
                f"{_SILENCE_SECONDS + self._job.stop_s:.0f} s"
            )
        if self._signal:
            name = signal.Signals(self._signal).name
            if not self._lost:
                _say(f"ended by {name}; no process is left on any of {len(self._job.nodes)} hosts")
            return 128 + self._signal if self._failures or self._steps == 0 else 0
        if not self._failures:
            return 0
        cause = self._cause()
        if cause.report is not None and "rank" in cause.report:
            print(printable(describe(cause.report, cause.host)), file=sys.stderr, flush=True)
        elif cause.host not in self._lost:
            _say(f"{cause.host} ended first, with exit status {cause.status}: see its output above")
        return cause.status

    def _cause(self) -> _Failure:
        """Return the failure that the others follow from; see [Note: the cause over nodes]."""
        ranked = [
            *(failure for failure in self._failures if not failure.late and failure.kind != FOLLOWS),
            *(failure for failure in self._failures if failure.late and failure.kind not in ("", FOLLOWS, INTERRUPTED)),
        ]
        return ranked[0] if ranked else self._failures[0]


def _say(text: str) -> None:
    print(f"[hf_zero] {printable(text)}", file=sys.stderr, flush=True)
