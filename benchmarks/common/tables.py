"""Results that are one table: printed, stored as JSON in benchmarks/results/, rendered by ``python -m tools.render``."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ResultTable:
    """One table of results of a benchmark.

    Attributes:
        title: Heading of the table.
        command: Command that reproduces it.
        text: Text on the measurement, in Markdown.
        columns: Headings of the columns; the first column names the contender.
        rows: Cells, as text.
        figure: PNG file beside the page (in docs/); "" for none.
        machine: Description of the machine.
    """

    title: str
    command: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    figure: str = ""
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    def print(self) -> None:
        """Print the table to the terminal."""
        from rich.console import Console
        from rich.table import Table

        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        Console().print(table)

    def publish(self, path: Path | None) -> None:
        """Print the table, and save it at ``path`` unless that is None."""
        self.print()
        if path is not None:
            self.save(path)

    def save(self, path: Path) -> None:
        """Write the JSON file from which the page is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return facts that the numbers depend on; ``minutes``: since this program began, ``others``: the fraction of CPU time of other
    programs.
    """
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPUs"
    found = {"device": device, "torch": torch.__version__, "python": platform.python_version(), "when": time.strftime("%Y-%m-%d")}
    if _BEGAN is None:
        return found
    return {**found, "minutes": round((time.monotonic() - _BEGAN.wall) / 60, 1), "others": round(_others(_BEGAN), 2)}


@dataclass(frozen=True)
class _Clocks:
    """Seconds of the wall clock, of all CPUs at work, and of this process and its ended children."""

    wall: float
    busy: float
    own: float


def _clocks() -> _Clocks | None:
    """Return the present clocks; None where the kernel does not report them."""
    if not _STAT.is_file():
        return None
    user, nice, system, _idle, _wait, *interrupts = map(int, _STAT.read_text().partition("\n")[0].split()[1:8])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return _Clocks(time.monotonic(), busy, sum(usage.ru_utime + usage.ru_stime for usage in used))


def _others(began: _Clocks) -> float:
    now = _clocks()
    assert now is not None
    return max(0.0, now.busy - began.busy - now.own + began.own) / ((os.cpu_count() or 1) * max(now.wall - began.wall, 1e-3))


_STAT = Path("/proc/stat")
_BEGAN = _clocks()
_QUIET = 0.1  # fraction of the CPUs


def markdown(result: dict[str, Any], usual: str = "") -> str:
    """Return one result file as a section of a page; ``usual`` describes the machine that is not named again."""
    where = result["machine"]
    command = re.sub(r" --(?:json|plot) (?:benchmarks/results|docs)/\S+| --save\b", "", result["command"])  # to print the table is enough
    lines = [f"## {result['title']}", "", result["text"], "", f"```bash\n{command}\n```", ""]
    lines += ["| " + " | ".join(result["columns"]) + " |", "|---" + "|---:" * (len(result["columns"]) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in result["rows"]]
    beside = where.get("others", 0.0)
    busy = f" Other programs took {100 * beside:.0f} % of the CPUs." if beside > _QUIET else ""
    took = f", in {where['minutes']:g} minutes" if "minutes" in where else ""
    device = described(where)
    lines += ["", f"{'' if device == usual else device + ', '}{where['when']}{took}.{busy}"]
    if result["figure"]:
        lines += ["", f"![{result['title']}]({result['figure']})"]
    return "\n".join(lines) + "\n"


def described(where: dict[str, Any]) -> str:
    """Return a machine, as ``machine`` found it, in words."""
    return f"{where.get('device') or str(where['cpus']) + ' CPUs'}, torch {where['torch']}, Python {where['python']}"
