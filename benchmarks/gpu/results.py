"""The output folder of ``benchmarks.gpu.parts``: few files of limited size, written again after each part.

``summary.json`` has the result and the machine of each part; ``tables.json`` the tables of all parts; ``report.md`` shows both;
``log.txt`` has the parts' output; ``<part>-timeline.json.gz`` is a trace for Perfetto.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.processes import REPOSITORY
from benchmarks.common.tables import markdown

MOST_BYTES = 16 << 20  # largest size of a file
MOST_FILES = 8
LOG_BYTES = 512 << 10  # largest size of one part's output
KEPT_LOG_BYTES = 12 << 20
TABLE, TRACE = "table.json", "trace.json"  # files that a part writes into its own folder


class Results:
    """The results so far, and their files.

    Attributes:
        out: The output folder.
        parts: Results by name of the part: status (0, another exit status, or text), seconds, limit, when, machine, command, tail.
        tables: Tables by name of the part, in the form of ``benchmarks.common.tables.ResultTable``.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.parts: dict[str, dict[str, Any]] = self._read("summary.json").get("parts", {})
        self.tables: dict[str, dict[str, Any]] = self._read("tables.json")

    @property
    def log(self) -> Path:
        """Return the path of the file to which parts print."""
        return self.out / "log.txt"

    def add(self, name: str, result: Mapping[str, Any], scratch: Path) -> None:
        """Add the files of a part in ``scratch``, and write all output files."""
        self.parts[name] = dict(result)
        table, trace = scratch / TABLE, scratch / TRACE
        if table.exists():
            self.tables[name] = json.loads(table.read_text())
        if trace.exists():
            self._pack(trace, self.out / f"{name}-timeline.json.gz")
        self.write()

    def write(self) -> None:
        """Write each file in one step, so that an interrupted run leaves complete files."""
        self._replace("summary.json", json.dumps({"commit": commit(), "parts": self.parts}, indent=1) + "\n")
        self._replace("tables.json", json.dumps(self.tables, indent=1) + "\n")
        self._replace("report.md", self.report())
        _shorten(self.log, 0, KEPT_LOG_BYTES)

    def report(self) -> str:
        """Return the list of parts and all tables as Markdown."""
        lines = ["# On this machine", "", f"Commit {commit()}.", "", "| part | how it ended | seconds | when |", "|---|---|---:|---|"]
        for name, part in self.parts.items():
            lines.append(f"| {name} | {said(part)} | {part['seconds']:g} | {part['when']} |")
        return "\n".join([*lines, "", *(markdown(table) for table in self.tables.values())])

    def _read(self, name: str) -> dict[str, Any]:
        path = self.out / name
        return json.loads(path.read_text()) if path.exists() else {}

    def _replace(self, name: str, text: str) -> None:
        fresh = self.out / f".{name}"
        fresh.write_text(text)
        os.replace(fresh, self.out / name)

    def _pack(self, trace: Path, into: Path) -> None:
        packed = gzip.compress(trace.read_bytes())
        if len(packed) <= MOST_BYTES and (into.exists() or len(list(self.out.iterdir())) < MOST_FILES):
            into.write_bytes(packed)


def said(part: Mapping[str, Any]) -> str:
    """Return how a part ended, as text: "passed", "failed" with its exit status, or another status."""
    status = part["status"]
    return "passed" if status == 0 else status if isinstance(status, str) else f"failed ({status})"


def append(log: Path, heading: str, output: Path, characters: int) -> str:
    """Append a part's output, shortened to ``LOG_BYTES``, to the log; return its last ``characters``."""
    _shorten(output, 0, LOG_BYTES)
    text = output.read_bytes()
    with log.open("ab") as file:
        file.write(heading.encode() + text)
    return text.decode(errors="replace")[-characters:]  # a progress bar may be cut in the middle of a character


def _shorten(path: Path, start: int, most: int) -> None:
    """Cut the middle out of the content after the first ``start`` bytes of a file, down to ``most`` bytes."""
    if not path.exists() or path.stat().st_size - start <= most:
        return
    with path.open("r+b") as file:
        file.seek(start)
        text = file.read()
        file.seek(start)
        file.write(text[: most // 2] + b"\n[...]\n" + text[-(most // 2) :])
        file.truncate()


def commit() -> str:
    """Return the commit of the sources; "unknown" outside a repository."""
    try:
        done = subprocess.run(  # nosec B607
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=REPOSITORY, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M")
