"""Run the same job under DDP and ZeRO stages 1, 2 and 3, one launch after the other; write a table and a drawing of all four.

    python -m benchmarks.experiments.compare examples/text_classification/run_cls_no_trainer.py --output_dir runs/cls_compare ...

The flags after the script are the script's own; --output_dir is required. Uses all GPUs, or two CPU ranks, unless RANKS is set.
"""

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
from rich.console import Console
from rich.table import Table

from benchmarks.common.processes import REPOSITORY
from benchmarks.experiments.chart import Panel, draw_bars

MIB = 2**20
STAGES: dict[str, int | None] = {"ddp": None, "zero1": 1, "zero2": 2, "zero3": 3}
CPU_RANKS = 2
RESULTS_FILE = "results.json"
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "Cannot allocate memory", "can't allocate memory")
# Variables of a launcher around this process, which would change the launches below.
LAUNCHER_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "DEEPSPEED_", "MASTER_", "FSDP_", "LOCAL_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")


NO_METRICS = ("steps", "train_seconds", "eval_seconds", "epoch_train_loss")  # entries of an epoch in results.json that are no metrics


@dataclass(frozen=True)
class Comparison:
    """One method's row: its results.json, or None where it ran out of memory."""

    name: str
    run: dict[str, Any] | None

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the task after training."""
        return {} if self.run is None else {name: v for name, v in self.run["epochs"][-1].items() if name not in NO_METRICS}

    def seconds_per_epoch(self, what: str) -> float:
        """Return the seconds of one whole epoch at the mean speed of all steps, or of one evaluation; ``what`` is train or eval."""
        assert self.run is not None
        epochs = self.run["epochs"]
        seconds = sum(epoch[f"{what}_seconds"] for epoch in epochs)
        return seconds / len(epochs) if what == "eval" else seconds / sum(epoch["steps"] for epoch in epochs) * self.run["steps_per_epoch"]


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return its options, and the script's flags without --output_dir."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("script", type=Path, help="run_cls_no_trainer.py, run_seq2seq_no_trainer.py, run_clm_no_trainer.py")
    parser.add_argument("--output_dir", type=Path, required=True, help="where the runs, comparison.md and comparison.png go")
    args, flags = parser.parse_known_args(argv)
    known = argparse.ArgumentParser(add_help=False)
    known.add_argument("--gradient_accumulation_steps", type=int, default=1)
    known.add_argument("--max_grad_norm", type=float, default=1.0)
    known.add_argument("--per_device_train_batch_size", type=int, default=8)
    known.add_argument("--per_device_eval_batch_size", type=int, default=8)
    known.add_argument("--model_name_or_path")
    return known.parse_known_args(flags, namespace=args)[0], flags


def compare(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run the job under each method; write ``comparison.md`` and ``comparison.png`` into the output folder.

    Args:
        args: Result of `parse_arguments`.
        flags: Flags of the script.

    Returns:
        Exit code: 0, or the code of a run that failed for another reason than memory.
    """
    ranks = int(os.environ.get("RANKS") or torch.accelerator.device_count() or CPU_RANKS)
    rows = []
    for name, stage in STAGES.items():
        folder = args.output_dir / name
        print(f"\n=== {method_name(stage)}: {folder}", flush=True)
        config = write_launcher_files(folder, stage, ranks, args)
        script = [str(REPOSITORY / "benchmarks/experiments/measured.py"), str(args.script), *flags, "--output_dir", str(folder)]
        code = launch([*launch_command(config, ranks), *script], folder / "log.txt", whole_init=args.model_name_or_path is None)
        if code != 0 and not ran_out_of_memory(folder / "log.txt"):
            print(f"{method_name(stage)} failed with exit code {code}; all it printed stands in {folder / 'log.txt'}.", flush=True)
            return code
        run = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8")) if code == 0 else None
        rows.append(Comparison(method_name(stage), run))
    write_comparison(args, rows)
    return 0


def method_name(stage: int | None) -> str:
    """Return the name of a method in tables."""
    return "DDP" if stage is None else f"ZeRO stage {stage}"


def write_launcher_files(folder: Path, stage: int | None, ranks: int, args: argparse.Namespace) -> Path:
    """Write the files of one launch: ``accelerate.yaml``, and ``ds.json`` for a ZeRO stage. They can be used again by hand.

    The script's flags set optimizer and schedule, so that every method does the same steps.

    Args:
        folder: Folder of the files.
        stage: ZeRO stage; None for DDP.
        ranks: Number of processes.
        args: Options with ``gradient_accumulation_steps`` and ``max_grad_norm``.

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
    """Return a port on which no process listens; only newer versions of Accelerate choose one themselves, for port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch_command(config: Path, ranks: int) -> list[str]:
    """Return the first words of a launch command, with the surrounding launch's precision, else bf16 on accelerators and fp32 on CPUs."""
    on_accelerator = torch.accelerator.is_available()
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION") or ("bf16" if on_accelerator else "no")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    return [*command, "--num_processes", str(ranks), "--main_process_port", free_port(), "--mixed_precision", precision]


def launch(command: Sequence[str], log: Path, *, whole_init: bool) -> int:
    """Run a command; print its output and write it to a file.

    Args:
        command: Words of the command.
        log: File for the output.
        whole_init: Draw the same random weights for all methods; pretrained weights stay in shards at stage 3.

    Returns:
        Its exit code.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment["WHOLE_INIT"] = str(int(whole_init))
    if not torch.accelerator.is_available() and not (log.parent / "ds.json").exists():
        environment["ACCELERATE_USE_CPU"] = "true"  # with a DeepSpeed configuration the variable would switch ZeRO off
    with log.open("w", encoding="utf-8") as file:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, env=environment, **options) as process:
            for line in process.stdout or ():
                sys.stdout.write(line)
                sys.stdout.flush()
                file.write(line)
        return process.returncode


def ran_out_of_memory(log: Path) -> bool:
    """Return whether the output of a failed run shows that it ran out of memory."""
    text = log.read_text(encoding="utf-8")
    return any(mark in text for mark in OUT_OF_MEMORY)


def write_comparison(args: argparse.Namespace, rows: Sequence[Comparison]) -> None:
    """Print the table, write it as Markdown, and draw it.

    Args:
        args: Result of `parse_arguments`; ``comparison.md`` and ``comparison.png`` go into its ``output_dir``.
        rows: One row per method.
    """
    headings, cells = comparison_cells(args, rows)
    table, folder = Table(title="Comparison"), args.output_dir
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in cells:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *cells]
    (folder / "comparison.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")
    runs = [row.run for row in rows if row.run is not None]
    if not runs:
        return
    facts = runs[0]["measured"]
    name = args.script.stem.removeprefix("run_").removesuffix("_no_trainer")
    title = f"{name}, {facts['parameters']:,} parameters, {facts['ranks']} ranks, {facts['device']}, {facts['precision']}"
    draw_bars(folder / "comparison.png", title, comparison_panels(rows))
    console.print(f"Table: {folder / 'comparison.md'}; drawing: {folder / 'comparison.png'}", soft_wrap=True)


def comparison_cells(args: argparse.Namespace, rows: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the table: the columns of the published experiments, and two for memory."""
    names = metric_names(rows)
    headings = ["Method", "Batch size per rank", "Eval size per rank", "Train time per epoch (s)", "Eval time per epoch (s)"]
    headings += ["Peak memory (MiB)", "State per rank (MiB)", *map(metric_heading, names)]
    cells = []
    for row in rows:
        if row.run is None:
            cells.append([row.name, "-", "-", "out of memory", *["-"] * (len(headings) - 4)])
            continue
        sizes = [str(args.per_device_train_batch_size), str(args.per_device_eval_batch_size)]
        times = [f"{row.seconds_per_epoch(what):,.2f}" for what in ("train", "eval")]
        memory = [f"{row.run['measured'][name] / MIB:,.1f}" for name in ("peak_memory_bytes", "state_bytes")]
        cells.append([row.name, *sizes, *times, *memory, *(metric_text(row.metrics[name]) for name in names)])
    return headings, cells


def comparison_panels(rows: Sequence[Comparison]) -> list[Panel]:
    """Return the groups of bars: times, memory, metrics."""

    def panel(title: str, value: Any, digits: int = 1) -> Panel:
        return Panel(title, {row.name: None if row.run is None else value(row) for row in rows}, digits)

    panels = [
        panel("training, s per epoch", lambda row: row.seconds_per_epoch("train")),
        panel("evaluation, s per epoch", lambda row: row.seconds_per_epoch("eval")),
        panel("peak memory per rank, MiB", lambda row: row.run["measured"]["peak_memory_bytes"] / MIB, digits=0),
        panel("model state per rank, MiB", lambda row: row.run["measured"]["state_bytes"] / MIB),
    ]
    for name in metric_names(rows):
        largest = max(row.metrics[name] for row in rows if row.run is not None)
        panels.append(panel(metric_heading(name), lambda row, name=name: row.metrics[name], digits=1 if largest >= 10 else 3))
    return panels


def metric_names(rows: Sequence[Comparison]) -> list[str]:
    """Return the names of the runs' metrics, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def metric_text(value: float) -> str:
    """Return a metric as text: three decimals for fractions, one for values above 10."""
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def metric_heading(name: str) -> str:
    """Return the heading of a metric's column."""
    return name.upper() if name in ("f1", "bleu") else name.replace("_", " ").capitalize()


def main() -> None:
    """Compare the methods that the command line names; exit with the status of the comparison."""
    sys.exit(compare(*parse_arguments()))


if __name__ == "__main__":
    main()
