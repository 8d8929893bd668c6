"""Loss curves of Adam and 1-bit Adam on the same tokens: GPT-2 at toy size, bytes of Python's docstrings, two ranks.

python -m benchmarks.collectives.onebit_convergence --json benchmarks/results/onebit_convergence.json --plot docs/onebit-convergence.png
python -m benchmarks.collectives.onebit_convergence --steps 10        # quick check

A fifth of the steps are warm-up; both runs are equal up to there. Needs no network and no root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.processes import REPOSITORY
from benchmarks.common.tables import ResultTable

RUNS = {"adam": "Adam", "onebit": "1-bit Adam"}
LENGTH, BATCH, LAST = 128, 8, 20
LIMIT = 1.02  # largest allowed ratio to Adam's loss


def corpus() -> Any:
    """Return docstrings as rows of ``LENGTH`` bytes, (rows, LENGTH) int64."""
    import torch

    sys.path.insert(0, str(REPOSITORY / "examples"))  # the scripts there import their neighbours from it
    from offline import standard_library_text

    text = "".join(standard_library_text()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH).long()


def build_model() -> Any:
    """Return a GPT-2 over bytes, 4 layers of width 128."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False, **drop))


def train(kind: str, steps: int, out: Path) -> None:
    """Train as one rank of one run; rank 0 writes the mean loss of every step."""
    import torch
    import torch.distributed as dist

    import hf_zero

    torch.set_num_threads(1)
    params: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.01}
    optimizer = {"type": "AdamW", "params": params}
    if kind == "onebit":
        optimizer = {"type": "OneBitAdam", "params": {**params, "freeze_step": steps // 5}}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": optimizer,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 10), "cos_min_ratio": 0.1},
        },
        "gradient_clipping": 1.0,
    }
    engine = hf_zero.initialize(model=build_model().train(), config=config)[0]
    rows, losses = corpus(), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        batch = rows[torch.randint(0, len(rows), (BATCH,), generator=generator)]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        out.write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def run(kind: str, steps: int, ranks: int) -> list[float]:
    """Return the losses of one run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "losses.json")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        words += ["-m", "benchmarks.collectives.onebit_convergence", "--train", kind, "--steps", str(steps), "--out", str(out)]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
        losses: list[float] = json.loads(out.read_text())
        return losses


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draw both curves, slightly smoothed, with the end of the warm-up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for kind, losses in curves.items():
        smooth = [sum(losses[max(0, step - 9) : step + 1]) / min(10, step + 1) for step in range(len(losses))]
        axis.plot(range(1, len(losses) + 1), smooth, label=RUNS[kind], linewidth=1.3)
    axis.axvline(len(curves["adam"]) // 5, color="grey", linestyle=":", label="end of the warm-up")
    axis.set(xlabel="step", ylabel="training loss (mean of 10 steps)", title="GPT-2, 0.8 M parameters, bytes of docstrings")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result table")
    parser.add_argument("--plot", type=Path, help="draw both curves (needs matplotlib)")
    parser.add_argument("--train", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.steps, arguments.out)
        return 0
    curves = {kind: run(kind, arguments.steps, arguments.ranks) for kind in RUNS}
    ends = {kind: sum(losses[-LAST:]) / LAST for kind, losses in curves.items()}
    middle = arguments.steps // 5
    rows = [
        [RUNS[kind], f"{losses[0]:.4f}", f"{losses[middle - 1]:.4f}", f"{ends[kind]:.4f}", f"{ends[kind] / ends['adam']:.4f} x"]
        for kind, losses in curves.items()
    ]
    columns = ("optimizer", "first step", f"step {middle}", f"mean of the last {LAST}", "to Adam's")
    text = (
        f"GPT-2 (4 layers of width 128, bytes of docstrings) on "
        f"{arguments.ranks} ranks for {arguments.steps} steps with Adam and with 1-bit Adam, {middle} steps "
        "of warm-up; both see the same tokens."
    )
    command = "python -m benchmarks.collectives.onebit_convergence --json benchmarks/results/onebit_convergence.json"
    command += " --plot docs/onebit-convergence.png"
    figure = arguments.plot.name if arguments.plot else ""
    table = ResultTable("1-bit Adam's loss beside Adam's", command, text, columns, rows, figure)
    table.publish(arguments.json)
    if arguments.plot:
        draw(curves, arguments.plot)
    return 0 if ends["onebit"] <= LIMIT * ends["adam"] else 1


if __name__ == "__main__":
    sys.exit(main())
