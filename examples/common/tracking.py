"""Trackers of the examples: those of Accelerate, and a CSV file."""

from __future__ import annotations

import argparse
import csv
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process


class CsvTracker(GeneralTracker):
    """Accelerate tracker that appends every number to a CSV file, one row ``step,name,value`` each.

    One number per row keeps the columns the same whatever a run logs, so that a resumed run appends to the same file.

    Args:
        path: File to append to; its folder is created.
    """

    name = "csv"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        """What `Accelerator.get_tracker(..., unwrap=True)` hands out: the file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Create the file with its header, unless it is there."""
        self._append([])

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the numbers among the hyper-parameters as rows of step 0."""
        self.log({f"config/{name}": value for name, value in values.items() if isinstance(value, (int, float))}, step=0)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append ``values``, one row each.

        Args:
            values: Names and numbers.
            step: Optimizer step; None leaves the cell empty.
            **kwargs: What other trackers take; not used here.
        """
        self._append([("" if step is None else step, name, value) for name, value in values.items()])

    @on_main_process
    def log_table(self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Write a table as ``<name>.csv`` beside the file of the metrics; a later one of the same name replaces it.

        Args:
            table_name: Name of the file, without its ending.
            columns: Headings.
            data: Rows.
            step: Optimizer step; the first column.
            **kwargs: What other trackers take; not used here.
        """
        with self.path.with_name(f"{table_name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["step", *columns], *([step, *row] for row in data)])

    def _append(self, rows: list[tuple[Any, ...]]) -> None:
        if not self.path.exists():  # older versions of accelerate do not call start()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows = [("step", "name", "value"), *rows]
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


def make_trackers(args: argparse.Namespace) -> tuple[list[Any], str]:
    """Choose what goes to `Accelerator(log_with=...)`.

    Args:
        args: ``with_tracking``, ``report_to`` and ``output_dir``.

    Returns:
        Trackers (empty when tracking is off), and one line for the user, empty when there is nothing to say.
    """
    if not args.with_tracking:
        return [], ""
    trackers: list[Any] = []
    if args.report_to in ("csv", "all"):
        trackers.append(CsvTracker(Path(args.output_dir) / "metrics.csv"))
    if args.report_to != "csv":
        trackers.append(args.report_to)
    note = ""
    if args.report_to in ("wandb", "all") and not has_wandb_account():
        os.environ["WANDB_MODE"] = "offline"  # otherwise wandb stops and asks for a key
        note = "wandb: no account is configured here, so the run is kept offline; `wandb sync` uploads it later."
    return trackers, note


def tracker_options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Options of `Accelerator.init_trackers`: wandb keeps its files in the output folder too."""
    return {"wandb": {"dir": args.output_dir}}


def log_table(accelerator: Accelerator, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    """Send a table to every tracker that can show one: wandb and CSV as a table, tensorboard as text.

    Args:
        accelerator: With its trackers started.
        name: Name of the table.
        columns: Headings.
        rows: Cells, as text.
        step: Optimizer step.
    """
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table(name, columns=columns, data=rows, step=step)
        elif tracker.name == "tensorboard" and accelerator.is_main_process:
            lines = [columns, ["---"] * len(columns), *rows]
            text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
            tracker.writer.add_text(name, text, global_step=step)


def has_wandb_account() -> bool:
    """Whether wandb can start without asking: a mode or credentials in the environment, or a key that `wandb login` stored."""
    if {"WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host in netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False
