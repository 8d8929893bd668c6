"""Identify a process in a file, so that another process can find out whether it still runs; and call functions of Linux's C library."""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_HIGHEST_PID = 1 << 22  # limit on Linux; lower elsewhere


@dataclass(frozen=True)
class Process:
    """A process by its place, number and start time; numbers are reused, after a restart of a container even in the same order.

    Attributes:
        place: Host name and name space of process numbers: two containers with one host name count differently.
        pid: Number of the process.
        started: Boot id of the machine and the clock ticks from boot to the start of the process; empty if unknown.
    """

    place: str
    pid: int
    started: str = ""

    @staticmethod
    def own() -> Process:
        """Return this process."""
        return Process(_place(), os.getpid(), _started(os.getpid()))

    @staticmethod
    def launcher() -> Process | None:
        """Return the process of torch's elastic agent (torchrun, accelerate launch) that started this rank and would start it again; None
        if no such agent did.

        A shell or another program between the agent and the rank has the rank's variables, unlike the agent.
        """
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        mark, pid = f"TORCHELASTIC_ERROR_FILE={os.environ.get('TORCHELASTIC_ERROR_FILE')}", os.getppid()
        with suppress(OSError, IndexError, ValueError):
            while pid > 1 and mark in Path(f"/proc/{pid}/environ").read_text(encoding="utf-8", errors="replace").split("\0"):
                pid = int(_stat(pid)[1])
        return Process(_place(), pid, _started(pid))

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object for a file or a message."""
        return {"place": self.place, "pid": self.pid, "started": self.started}

    @staticmethod
    def of_json(data: Any) -> Process | None:
        """Return the process of an ``as_json`` result; None if ``data`` is no such result."""
        if not isinstance(data, Mapping):
            return None
        place, pid, started = data.get("place"), data.get("pid"), data.get("started", "")
        if not (isinstance(place, str) and isinstance(started, str) and isinstance(pid, int)) or not 0 < pid < _HIGHEST_PID:
            return None
        return Process(place, pid, started)

    @property
    def code(self) -> str:
        """Return the process as letters, digits and hyphens, for a file name."""
        return f"{_digest(self.place)}-{self.pid}-{self.started or 'x'}"

    @staticmethod
    def of_code(code: str) -> Process | None:
        """Return the process of a ``code`` result, or None for another text; ``place`` of another machine stays a digest."""
        place, _, rest = code.partition("-")
        pid, _, started = rest.partition("-")
        own = _place()
        data = {"place": own if place == _digest(own) else place, "pid": int(pid) if pid.isdecimal() else 0}
        return Process.of_json({**data, "started": "" if started == "x" else started})

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if this cannot be determined from here."""
        if self.place != _place():
            return None
        try:
            with suppress(PermissionError):  # another user's process: it exists
                os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        try:
            state = _stat(self.pid)[0]
        except OSError:  # no /proc, or no permission
            return True
        return state not in ("Z", "X") and (not self.started or self.started == _started(self.pid))


def leads_node() -> bool:
    """Return whether this rank does its node's common tasks: it has the local rank 0, or no launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _place() -> str:
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space}"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process' name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _started(pid: int) -> str:
    try:
        return f"{_boot()}{int(_stat(pid)[19]):x}"
    except (OSError, IndexError, ValueError):
        return ""


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]


def linux_function(name: str, *argument_types: Any) -> Any:
    """Return the C function ``name``; None on other systems, or if the library has no such function."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = list(argument_types)
    return function
