"""Train a small GPT-2 with ZeRO-3 on this machine, evaluate, save, reload and generate: what `make demo` runs.

Takes all GPUs, or two gloo ranks on a machine without one; RANKS in the environment decides otherwise.
Needs no network. Further flags go to the training script:

    python examples/clm/demo.py --max_train_steps 400
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CPU_RANKS = 2
# Within a minute on two cores, training, evaluation and reloading together; seconds on GPUs.
TRAINING_FLAGS = {
    "--output_dir": "runs/demo",
    "--block_size": "128",
    "--n_layer": "4",
    "--n_embd": "192",
    "--n_head": "4",
    "--vocab_size": "2048",
    "--per_device_train_batch_size": "4",
    "--per_device_eval_batch_size": "8",
    "--learning_rate": "3e-3",
    "--weight_decay": "0.1",
    "--num_warmup_steps": "10",
    "--max_train_steps": "100",
}


def count_gpus() -> int:
    """GPUs (or other accelerators) that torch sees."""
    import torch

    return torch.accelerator.device_count()


def launch_command(ranks: int, on_gpus: bool, further_flags: Sequence[str] = ()) -> list[str]:
    """Command line of the demo, to be run from the repository's root.

    Args:
        ranks: Processes to start.
        on_gpus: Whether each has a GPU: then bf16, else fp32.
        further_flags: Flags of the training script; they come last, so they win.
    """
    launcher = Path(sys.executable).with_name("accelerate")
    launch = [str(launcher), "launch", "--config_file", "examples/clm/accelerate_zero3.yaml", "--main_process_port", free_port()]
    launch += ["--num_processes", str(ranks), "--mixed_precision", "bf16" if on_gpus else "no"]
    flags = [word for flag in TRAINING_FLAGS.items() for word in flag]
    return [*launch, "examples/clm/run_clm_no_trainer.py", *flags, *further_flags]


def free_port() -> str:
    """A port that nobody listens on; asking the launcher for port 0 does this with newer versions of Accelerate only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch_environment(ranks: int, cores: int) -> dict[str, str]:
    """Environment of the demo: the cores are shared out among the ranks unless the user has decided otherwise.

    Args:
        ranks: Processes to start.
        cores: CPU cores that this process may use.
    """
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks)), "TOKENIZERS_PARALLELISM": "false"} | dict(os.environ)


def available_cores() -> int:
    """CPU cores that this process may use (containers often get fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """Run the demo and pass its exit code on."""
    gpus = count_gpus()
    ranks = int(os.environ.get("RANKS") or gpus or CPU_RANKS)
    command = launch_command(ranks, gpus > 0, sys.argv[1:])
    print("$ " + shlex.join(command), flush=True)
    sys.exit(subprocess.run(command, cwd=REPOSITORY, env=launch_environment(ranks, available_cores()), check=False).returncode)


if __name__ == "__main__":
    main()
