"""The output folder of ``benchmarks.gpu.parts``: few files, each below a size, written again after each part.

``summary.json`` says how each part ended, on which machine; ``tables.json`` holds the tables of all parts; ``report.md`` shows both;
``log.txt`` what the parts printed; ``<part>-timeline.json.gz`` a trace for Perfetto.
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

MOST_BYTES = 16 << 20  # of a file
MOST_FILES = 8
LOG_BYTES = 512 << 10  # of one part's output
KEPT_LOG_BYTES = 12 << 20
TABLE, TRACE = "table.json", "trace.json"  # what a part writes, in a folder of its own


class Results:
    """What is known so far.

    Attributes:
        out: The folder.
        parts: By name: status (0, another exit status, or text), seconds, limit, when, machine, command, tail.
        tables: By name, as ``benchmarks.common.tables.ResultTable`` writes them.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.parts: dict[str, dict[str, Any]] = self._read("summary.json").get("parts", {})
        self.tables: dict[str, dict[str, Any]] = self._read("tables.json")

    @property
    def log(self) -> Path:
        """Where parts print to."""
        return self.out / "log.txt"

    def add(self, name: str, result: Mapping[str, Any], scratch: Path) -> None:
        """Takes what a part left in ``scratch``, and writes all."""
        self.parts[name] = dict(result)
        table, trace = scratch / TABLE, scratch / TRACE
        if table.exists():
            self.tables[name] = json.loads(table.read_text())
        if trace.exists():
            self._pack(trace, self.out / f"{name}-timeline.json.gz")
        self.write()

    def write(self) -> None:
        """Each file in one step, so that a run that is ended leaves the last whole one."""
        self._replace("summary.json", json.dumps({"commit": commit(), "parts": self.parts}, indent=1) + "\n")
        self._replace("tables.json", json.dumps(self.tables, indent=1) + "\n")
        self._replace("report.md", self.report())
        _shorten(self.log, 0, KEPT_LOG_BYTES)

    def report(self) -> str:
        """All tables in Markdown, beneath what ran."""
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
    """How a part ended, in words."""
    status = part["status"]
    return "passed" if status == 0 else status if isinstance(status, str) else f"failed ({status})"


def tail_of(path: Path, start: int, characters: int) -> str:
    """The end of what was appended to a file since it had ``start`` bytes, which is cut to ``LOG_BYTES`` there."""
    _shorten(path, start, LOG_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")[-characters:]  # a progress bar may have been cut


def _shorten(path: Path, start: int, most: int) -> None:
    """Cuts the middle out of what follows the first ``start`` bytes of a file."""
    if not path.exists() or path.stat().st_size - start <= most:
        return
    with path.open("r+b") as file:
        file.seek(start)
        text = file.read()
        file.seek(start)
        file.write(text[: most // 2] + b"\n[...]\n" + text[-(most // 2) :])
        file.truncate()


def commit() -> str:
    """Of the sources; "unknown" outside a repository."""
    try:
        done = subprocess.run(  # nosec B607
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=REPOSITORY, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M")
