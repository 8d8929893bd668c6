"""Results that are one table: printed, kept as JSON in benchmarks/results/, rendered by ``python -m benchmarks.render``."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ResultTable:
    """One table of a benchmark.

    Attributes:
        title: Heading.
        command: What reproduces it.
        text: What was measured and how, in Markdown.
        columns: Heads of the columns; the first names the contender.
        rows: Cells, as they are to be printed.
        figure: PNG file beside the page (in docs/), if there is one.
        machine: Where it was measured.
    """

    title: str
    command: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    figure: str = ""
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    def print(self) -> None:
        """Prints the table to the terminal."""
        from rich.console import Console
        from rich.table import Table

        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        Console().print(table)

    def save(self, path: Path) -> None:
        """Writes the JSON file that the page is made of."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPUs"
    return {"device": device, "torch": torch.__version__, "python": platform.python_version(), "when": time.strftime("%Y-%m-%d")}


def markdown(result: dict[str, Any]) -> str:
    """One result file as a section of the page."""
    where = result["machine"]
    lines = [f"# {result['title']}", "", result["text"], "", f"```bash\n{result['command']}\n```", ""]
    lines += ["| " + " | ".join(result["columns"]) + " |", "|---" + "|---:" * (len(result["columns"]) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in result["rows"]]
    lines += ["", f"{where['device']}, torch {where['torch']}, Python {where['python']}, {where['when']}."]
    if result["figure"]:
        lines += ["", f"![{result['title']}]({result['figure']})"]
    return "\n".join(lines) + "\n"
