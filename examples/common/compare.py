"""``--compare``: the same job under DDP and ZeRO stages 1, 2 and 3, one launch after the other; a table and a drawing of all four."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from common.chart import Panel, draw_bars
from common.results import MIB, RESULTS_FILE, RunFacts, RunResults, metric_heading, metric_text, read_results, wide_console

STAGES: dict[str, int | None] = {"ddp": None, "zero1": 1, "zero2": 2, "zero3": 3}
CPU_RANKS = 2
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "Cannot allocate memory", "can't allocate memory")
# What the launcher of this very process has set, and what would turn the launches below into something else.
LAUNCHER_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "DEEPSPEED_", "MASTER_", "FSDP_", "LOCAL_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")


@dataclass(frozen=True)
class Comparison:
    """One method's row: what it measured, or None where its memory did not suffice."""

    name: str
    run: tuple[RunFacts, RunResults] | None


def compare(script: str, argv: Sequence[str], args: argparse.Namespace) -> int:
    """Do the job of ``argv`` under each method and write ``comparison.md`` and ``comparison.png`` into the output folder.

    Args:
        script: The script to launch.
        argv: Its flags, ``--compare`` among them.
        args: The same, parsed.

    Returns:
        Exit code: 0, or that of the run that failed for another reason than memory.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return 0  # under a launcher the first rank does it all, with as many ranks as were launched
    ranks = int(os.environ.get("WORLD_SIZE") or os.environ.get("RANKS") or torch.accelerator.device_count() or CPU_RANKS)
    # All methods start from the same random weights; pretrained ones stay in shards at stage 3.
    flags = [word for word in argv if word != "--compare"] + ([] if args.model_name_or_path else ["--whole_init"])
    folder = Path(args.output_dir)
    rows = []
    for name, stage in STAGES.items():
        print(f"\n=== {method_name(stage)}: {folder / name}", flush=True)
        config = write_launcher_files(folder / name, stage, ranks, args)
        code = launch([*launch_command(config, ranks), script, *flags, "--output_dir", str(folder / name)], folder / name / "log.txt")
        if code != 0 and not ran_out_of_memory(folder / name / "log.txt"):
            print(f"{method_name(stage)} failed with exit code {code}; all it printed stands in {folder / name / 'log.txt'}.", flush=True)
            return code
        rows.append(Comparison(method_name(stage), read_results(folder / name / RESULTS_FILE) if code == 0 else None))
    write_comparison(folder, rows)
    return 0


def method_name(stage: int | None) -> str:
    """Name of a method in tables."""
    return "DDP" if stage is None else f"ZeRO stage {stage}"


def write_launcher_files(folder: Path, stage: int | None, ranks: int, args: argparse.Namespace) -> Path:
    """Write what one launch needs: ``accelerate.yaml``, and ``ds.json`` for a ZeRO stage. They can be used again by hand.

    Optimizer and schedule stay with the script's flags, so that every method does the same steps.

    Args:
        folder: Where to write them.
        stage: ZeRO stage; None for DDP.
        ranks: Processes.
        args: ``gradient_accumulation_steps`` and ``max_grad_norm``.

    Returns:
        The YAML file.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS_FILE).unlink(missing_ok=True)
    launcher: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if stage is not None else "MULTI_GPU" if ranks > 1 else "NO",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": 1,
        "num_processes": ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if stage is not None:
        config = {
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "gradient_clipping": args.max_grad_norm,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
        }
        (folder / "ds.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
        launcher["deepspeed_config"] = {"deepspeed_config_file": str((folder / "ds.json").resolve()), "zero3_init_flag": stage == 3}
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(launcher), encoding="utf-8")
    return path


def free_port() -> str:
    """A port that nobody listens on; asking the launcher for port 0 does this with newer versions of Accelerate only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch_command(config: Path, ranks: int) -> list[str]:
    """First words of a launch; the precision is that of the launch around it, else bf16 on accelerators and fp32 elsewhere."""
    on_accelerator = torch.accelerator.is_available()
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION") or ("bf16" if on_accelerator else "no")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    return [*command, "--num_processes", str(ranks), "--main_process_port", free_port(), "--mixed_precision", precision]


def launch(command: Sequence[str], log: Path) -> int:
    """Run a command; what it prints goes to the terminal and into a file.

    Returns:
        Its exit code.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not torch.accelerator.is_available() and not (log.parent / "ds.json").exists():
        environment["ACCELERATE_USE_CPU"] = "true"  # with a DeepSpeed configuration this would switch ZeRO off
    with log.open("w", encoding="utf-8") as file:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, env=environment, **options) as process:
            for line in process.stdout or ():
                sys.stdout.write(line)
                sys.stdout.flush()
                file.write(line)
        return process.returncode


def ran_out_of_memory(log: Path) -> bool:
    """Whether a failed run's output says that memory was the reason."""
    text = log.read_text(encoding="utf-8")
    return any(mark in text for mark in OUT_OF_MEMORY)


def write_comparison(folder: Path, rows: Sequence[Comparison]) -> None:
    """Print the table, write it as Markdown, and draw it.

    Args:
        folder: Where ``comparison.md`` and ``comparison.png`` go.
        rows: One per method.
    """
    headings, cells = comparison_cells(rows)
    table = Table(title="Comparison")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in cells:
        table.add_row(*row)
    console = wide_console()
    console.print(table)
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *cells]
    (folder / "comparison.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")
    runs = [row.run for row in rows if row.run is not None]
    if not runs:
        return
    facts = runs[0][0]
    title = f"{facts.task}, {facts.parameters:,} parameters, {facts.ranks} ranks, {facts.device}, {facts.precision}"
    draw_bars(folder / "comparison.png", title, comparison_panels(rows))
    console.print(f"Table: {folder / 'comparison.md'}; drawing: {folder / 'comparison.png'}")


def comparison_cells(rows: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table, in the columns of the published experiments and two for memory."""
    names = metric_names(rows)
    headings = ["Method", "Batch size per rank", "Eval size per rank", "Train time per epoch (s)", "Eval time per epoch (s)"]
    headings += ["Peak memory (MiB)", "State per rank (MiB)", *map(metric_heading, names)]
    cells = []
    for row in rows:
        if row.run is None:
            cells.append([row.name, "-", "-", "out of memory", *["-"] * (len(headings) - 4)])
            continue
        facts, results = row.run
        sizes = [str(facts.micro_batch_size), str(facts.eval_batch_size)]
        times = [f"{results.train_seconds_per_epoch:,.2f}", f"{results.eval_seconds_per_epoch:,.2f}"]
        memory = [f"{results.peak_memory_bytes / MIB:,.1f}", f"{results.state_bytes / MIB:,.1f}"]
        cells.append([row.name, *sizes, *times, *memory, *(metric_text(results.metrics[name]) for name in names)])
    return headings, cells


def comparison_panels(rows: Sequence[Comparison]) -> list[Panel]:
    """Groups of bars: times, memory, metrics."""

    def panel(title: str, value: Any, digits: int = 1) -> Panel:
        return Panel(title, {row.name: None if row.run is None else value(row.run[1]) for row in rows}, digits)

    panels = [
        panel("training, s per epoch", lambda results: results.train_seconds_per_epoch),
        panel("evaluation, s per epoch", lambda results: results.eval_seconds_per_epoch),
        panel("peak memory per rank, MiB", lambda results: results.peak_memory_bytes / MIB, digits=0),
        panel("model state per rank, MiB", lambda results: results.state_bytes / MIB),
    ]
    for name in metric_names(rows):
        largest = max(row.run[1].metrics[name] for row in rows if row.run is not None)
        panels.append(panel(metric_heading(name), lambda results, name=name: results.metrics[name], digits=1 if largest >= 10 else 3))
    return panels


def metric_names(rows: Sequence[Comparison]) -> list[str]:
    """Metrics of the runs, in their order."""
    return list(dict.fromkeys(name for row in rows if row.run is not None for name in row.run[1].metrics))
