"""Fine-tune the same model in six ways on four ranks, and resume two of them: the loss curves must coincide; one PNG shows them.

    python -m benchmarks.experiments.compare_sft --output_dir runs/sft_curves

The six ways: ZeRO-3, tensor parallelism, ZeRO-1, ZeRO-1 with it, ZeRO-2, ZeRO-2 with it; global batch 32, the same initial weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.processes import REPOSITORY
from benchmarks.experiments.chart import Curve, draw_curves

FOLDER = REPOSITORY / "examples" / "clm"

GLOBAL_BATCH = 32
BASE = "base"  # folder of the initial model


@dataclass(frozen=True)
class Setup:
    """One way to train, named like its file in ``sft/``."""

    name: str
    title: str
    tensor_parallel: int = 1

    @property
    def config(self) -> Path:
        """Return the path of the DeepSpeed JSON file of this setup."""
        return FOLDER / "sft" / f"{self.name}.json"


SETUPS = (
    Setup("zero3", "ZeRO-3"),
    Setup("tp", "TP 4", 4),
    Setup("zero1", "ZeRO-1"),
    Setup("zero1_tp", "ZeRO-1 + TP 2", 2),
    Setup("zero2", "ZeRO-2"),
    Setup("zero2_tp", "ZeRO-2 + TP 2", 2),
)
RESUMED = ("zero1_tp", "zero2_tp")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ``argv`` None reads ``sys.argv``."""
    names = [setup.name for setup in SETUPS]
    parser = argparse.ArgumentParser(description="Compare loss curves of supervised fine-tuning under ZeRO, tensor parallelism and both.")
    parser.add_argument("--output_dir", required=True, help="Where runs, curves.png and curves.json go.")
    parser.add_argument("--setups", nargs="+", choices=names, default=names, metavar="NAME", help=f"Which to run: {', '.join(names)}.")
    parser.add_argument("--ranks", type=int, default=4, help="Processes (default 4).")
    parser.add_argument("--max_steps", type=int, default=40, help="Optimizer steps (default 40).")
    parser.add_argument("--resume_step", type=int, help="Step to resume from (default: half of --max_steps).")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="Largest relative difference of two losses (default 1e-4).")
    parser.add_argument("--train_file", help="Instructions in Alpaca's format (.json); by default made from Python's docstrings.")
    args = parser.parse_args(argv)
    for flag in ("ranks", "max_steps"):
        if getattr(args, flag) < 2:
            parser.error(f"--{flag} {getattr(args, flag)}: must be at least 2.")
    args.resume_step = args.resume_step or args.max_steps // 2
    if not 0 < args.resume_step < args.max_steps:
        parser.error(f"--resume_step {args.resume_step}: must lie between 1 and --max_steps {args.max_steps}.")
    for setup in SETUPS:
        if setup.name in args.setups and args.ranks % setup.tensor_parallel:
            parser.error(f"--ranks {args.ranks}: {setup.title} needs a multiple of {setup.tensor_parallel}.")
    return args


def make_base(folder: Path, train_file: str | None) -> None:
    """Save the model and the tokenizer with which every run starts."""
    import transformers

    sys.path.insert(0, str(FOLDER))  # run_sft.py imports its modules from it
    from arguments import add_data_flags, add_model_flags
    from model import build_model, finish_config
    from offline import DECODER_TOKENS, train_tokenizer
    from sft_data import load_instructions, prompt_of

    parser = argparse.ArgumentParser()
    add_data_flags(parser)
    add_model_flags(parser, model_type="llama")
    shape = ["--n_layer", "2", "--n_embd", "64", "--n_head", "4", "--block_size", "64"]
    args = parser.parse_args(shape + (["--train_file", train_file] if train_file else []))
    texts = [prompt_of(sample) + sample["output"] for sample in load_instructions(args)["train"]]
    tokenizer = train_tokenizer(texts, 1024, DECODER_TOKENS)
    transformers.utils.logging.disable_progress_bar()
    transformers.set_seed(42)
    build_model(finish_config(None, tokenizer, args), tokenizer, args).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(setup: Setup, folder: Path, args: argparse.Namespace, checkpoint: Path | None = None) -> dict[int, float]:
    """Launch one run.

    Args:
        setup: The way to train.
        folder: Folder for the run's files.
        args: The command line.
        checkpoint: Folder to resume from; None starts a new run.

    Returns:
        Loss by optimizer step.

    Raises:
        SystemExit: The run failed; its output is kept.
    """
    copies = args.ranks // setup.tensor_parallel
    flags = {
        "--deepspeed": setup.config,
        "--model_name_or_path": Path(args.output_dir) / BASE,
        "--output_dir": folder,
        "--block_size": 64,
        "--per_device_train_batch_size": GLOBAL_BATCH // copies,
        "--per_device_eval_batch_size": GLOBAL_BATCH // copies,
        "--max_eval_samples": 64,
        "--max_steps": args.max_steps,
        "--save_steps": args.resume_step,
        "--learning_rate": 2e-3,
        "--logging_steps": 1,
        "--report_to": "none",
    }
    if args.train_file:
        flags["--train_file"] = args.train_file
    if checkpoint is not None:
        flags["--resume_from_checkpoint"] = checkpoint
    words = [str(word) for flag in flags.items() for word in flag]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(os.environ)
    command = [*launcher, str(FOLDER / "run_sft.py"), *words, "--disable_tqdm", "True"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / "log.txt"
        log_file.write_text(done.stdout + done.stderr, encoding="utf-8")
        last = next((line for line in reversed(done.stderr.splitlines()) if "Error: " in line and "ChildFailed" not in line), "")
        sys.exit(f"{setup.title} failed with exit code {done.returncode}; all it printed stands in {log_file}. {last}")
    log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return {entry["step"]: entry["loss"] for entry in log if "loss" in entry}


def resume(setup: Setup, whole: Path, folder: Path, args: argparse.Namespace) -> dict[int, float]:
    """Resume ``setup`` from the middle of its run in ``whole``; return the losses of the later steps."""
    name = f"checkpoint-{args.resume_step}"
    shutil.copytree(whole / name, folder / name)
    losses = train(setup, folder, args, folder / name)
    return {step: loss for step, loss in losses.items() if step > args.resume_step}


def largest_difference(losses: dict[int, float], reference: dict[int, float]) -> float:
    """Return the largest relative difference over the steps of ``losses``."""
    return max(abs(loss - reference[step]) / abs(reference[step]) for step, loss in losses.items())


def write_curves(folder: Path, curves: dict[str, dict[int, float]], resumed: dict[str, dict[int, float]]) -> None:
    """Write ``curves.json`` and draw ``curves.png``: all runs beside the resumed ones."""
    (folder / "curves.json").write_text(json.dumps({"whole": curves, "resumed": resumed}, indent=1) + "\n", encoding="utf-8")
    titles = {setup.name: setup.title for setup in SETUPS}
    whole = {name: Curve(titles[name], list(losses), list(losses.values())) for name, losses in curves.items()}
    groups = {"whole runs": list(whole.values())}
    if resumed:
        parts = [Curve(f"{titles[name]}, resumed", list(losses), list(losses.values()), dashed=True) for name, losses in resumed.items()]
        groups["resumed runs"] = [*(whole[name] for name in resumed), *parts]
    draw_curves(folder / "curves.png", f"supervised fine-tuning, global batch {GLOBAL_BATCH}", groups, "training loss")


def main() -> None:
    """Run all set-ups, draw, and compare."""
    args = parse_arguments()
    folder = Path(args.output_dir)
    setups = [setup for setup in SETUPS if setup.name in args.setups]
    for name in (BASE, *(setup.name for setup in setups), *(f"{name}_resumed" for name in RESUMED)):
        shutil.rmtree(folder / name, ignore_errors=True)  # left by an earlier comparison
    make_base(folder / BASE, args.train_file)
    curves: dict[str, dict[int, float]] = {}
    resumed: dict[str, dict[int, float]] = {}
    for setup in setups:
        curves[setup.name] = train(setup, folder / setup.name, args)
        print(f"{setup.title}: loss {curves[setup.name][1]:.4f} -> {curves[setup.name][args.max_steps]:.4f}", flush=True)
    for setup in setups:
        if setup.name in RESUMED:
            resumed[setup.name] = resume(setup, folder / setup.name, folder / f"{setup.name}_resumed", args)
            print(f"{setup.title}: resumed from step {args.resume_step}", flush=True)
    write_curves(folder, curves, resumed)

    reference = curves[setups[0].name]
    table = Table(title=f"Largest relative difference of the loss in {args.max_steps} steps (allowed: {args.tolerance:g})")
    for heading in ("Run", "Compared with", "Difference"):
        table.add_column(heading, justify="right" if heading == "Difference" else "left")
    worst = 0.0
    for title, other, losses, expected in [
        *((setup.title, setups[0].title, curves[setup.name], reference) for setup in setups[1:]),
        *((f"{setup.title}, resumed", setup.title, resumed[setup.name], curves[setup.name]) for setup in setups if setup.name in resumed),
    ]:
        difference = largest_difference(losses, expected)
        worst = max(worst, difference)
        table.add_row(title, other, f"{difference:.2e}")
    Console(width=160).print(table)
    print(f"Drawing: {folder / 'curves.png'}")
    if worst > args.tolerance:
        sys.exit(f"The curves differ by {worst:.2e}.")


if __name__ == "__main__":
    main()
