"""Loss curves of ZeRO stage 3 with exact and with quantized collectives on the same tokens: a GPT-2 and a Llama, bytes of docstrings.

python benchmarks/zeropp_convergence.py --json benchmarks/results/zeropp_convergence.json --plot docs/zeropp-convergence.png

Every run has a loopback interface of its own (a network namespace, so it needs root), whose counter says how many bytes a step sends;
without root that column is empty. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.onebit_convergence import LENGTH, corpus  # noqa: E402
from benchmarks.tables import ResultTable  # noqa: E402

_W, _G = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("stage 3", {}),
    "weights": ("+ quantized weights", _W),
    "both": ("+ quantized weights and gradients", _W | _G),
    "loco": ("+ LoCo", _W | _G | {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}),
}
BATCH, LAST = 4, 30
LIMIT = 1.005  # of stage 3's loss, for the run with LoCo
SIZES = {"small": (128, 4), "medium": (256, 6), "large": (512, 8)}  # width, layers


def build_model(kind: str, size: str) -> Any:
    """A causal model over bytes."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width, layers = SIZES[size]
    if kind == "gpt2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=4, use_cache=False, **drop)
        )
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **shape))


def interface_bytes() -> int:
    """Bytes that the loopback interface of this namespace has carried, headers and acknowledgements included."""
    with open("/proc/net/dev", encoding="ascii") as table:
        line = next(line for line in table if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def train(kind: str, model: str, size: str, steps: int, out: Path) -> None:
    """One rank of one run; rank 0 writes the mean loss of every step and what the last steps sent."""
    import torch
    import torch.distributed as dist

    import hf_zero

    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, **RUNS[kind][1]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 10), "cos_min_ratio": 0.1},
        },
        "gradient_clipping": 1.0,
    }
    module = build_model(model, size).train()
    numel = sum(param.numel() for param in module.parameters())
    engine = hf_zero.initialize(model=module, config=config)[0]
    rows, losses, before = corpus(), [], 0
    for step in range(steps):
        if step == steps - LAST:
            dist.barrier()
            before = interface_bytes()
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        batch = rows[torch.randint(0, len(rows), (BATCH,), generator=generator)]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    dist.barrier()
    sent = (interface_bytes() - before) / LAST / dist.get_world_size()
    means = torch.stack(losses)
    dist.all_reduce(means)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"losses": (means / dist.get_world_size()).tolist(), "bytes": sent, "numel": numel}))
    dist.barrier()
    dist.destroy_process_group()


def has_namespaces() -> bool:
    """Whether a run can have an interface of its own."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "ip"))


def run(kind: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run: its losses, and bytes per rank and step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run.json")
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(arguments.ranks), "--master_addr", "127.0.0.1"]
        words += [
            __file__,
            "--train",
            kind,
            "--models",
            model,
            "--size",
            arguments.size,
            "--steps",
            str(arguments.steps),
            "--out",
            str(out),
        ]
        if has_namespaces():
            words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(words, check=True, env=environment)
        found: dict[str, Any] = json.loads(out.read_text())
        if not has_namespaces():
            found["bytes"] = None
        return found


def draw(curves: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """One picture per model: all runs, smoothed a little."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(6.5 * len(curves), 4), squeeze=False)
    for axis, (model, runs) in zip(axes[0], curves.items(), strict=True):
        for kind, found in runs.items():
            losses = found["losses"]
            smooth = [sum(losses[max(0, step - 19) : step + 1]) / min(20, step + 1) for step in range(len(losses))]
            axis.plot(range(1, len(losses) + 1), smooth, label=RUNS[kind][0], linewidth=1.1)
        numel = next(iter(runs.values()))["numel"]
        axis.set(xlabel="step", ylabel="training loss (mean of 20 steps)", title=f"{model}, {numel / 1e6:.1f} M parameters, bf16")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def row_of(model: str, kind: str, runs: dict[str, dict[str, Any]]) -> list[str]:
    """One line of the table."""
    found = runs[kind]
    end, exact = (sum(runs[name]["losses"][-LAST:]) / LAST for name in (kind, "exact"))
    sent = "" if found["bytes"] is None else f"{found['bytes'] / found['numel']:.2f}"
    return [model, RUNS[kind][0], f"{found['losses'][0]:.4f}", f"{end:.4f}", f"{end / exact:.4f} x", sent]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama"], default=["gpt2", "llama"])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), help='"exact" must be among them')
    parser.add_argument("--size", choices=list(SIZES), default="medium")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result table")
    parser.add_argument("--plot", type=Path, help="draw the curves (needs matplotlib)")
    parser.add_argument("--train", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.models[0], arguments.size, arguments.steps, arguments.out)
        return 0
    curves = {model: {kind: run(kind, model, arguments) for kind in arguments.runs} for model in arguments.models}
    rows = [row_of(model, kind, runs) for model, runs in curves.items() for kind in runs]
    columns = (
        "model",
        "collectives",
        "first step",
        f"mean of the last {LAST}",
        "to stage 3's",
        "bytes a rank sends per step and parameter",
    )
    width, layers = SIZES[arguments.size]
    sizes = " and ".join(f"{model} ({next(iter(runs.values()))['numel'] / 1e6:.1f} M parameters)" for model, runs in curves.items())
    text = (
        f"`benchmarks/zeropp_convergence.py` trains {sizes}, {layers} layers of width {width}, on bytes of docstrings in bf16 at stage 3, "
        f"{arguments.ranks} ranks, {arguments.steps} steps, all parameters sharded; every run sees the same tokens. Bytes are what the "
        f"loopback interface counted in the last {LAST} steps, headers included."
    )
    size = "" if arguments.size == "medium" else f" --size {arguments.size}"
    command = f"python benchmarks/zeropp_convergence.py{size}"
    command += " --json benchmarks/results/zeropp_convergence.json --plot docs/zeropp-convergence.png"
    figure = arguments.plot.name if arguments.plot else ""
    table = ResultTable("Quantized collectives: loss beside stage 3's", command, text, columns, rows, figure)
    table.print()
    if arguments.json:
        table.save(arguments.json)
    if arguments.plot:
        draw(curves, arguments.plot)
    ends = {model: {kind: sum(found["losses"][-LAST:]) for kind, found in runs.items()} for model, runs in curves.items()}
    return 0 if all(found.get("loco", 0.0) <= LIMIT * found["exact"] for found in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
