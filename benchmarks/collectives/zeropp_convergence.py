"""Loss curves of ZeRO stage 3 with exact and with quantized collectives on the same tokens: a GPT-2 and a Llama, bytes of docstrings.

    python -m benchmarks.collectives.zeropp_convergence --json benchmarks/results/zeropp_convergence.json --plot docs/zeropp-convergence.png
    python -m benchmarks.collectives.zeropp_convergence --size large --seeds 0 --models llama --runs exact loco
        --json benchmarks/results/zeropp_convergence_large.json --plot docs/zeropp-convergence-large.png
    python -m benchmarks.collectives.zeropp_convergence --models llama --size small --seeds 0 1 --steps 20        # quick check

A seed determines the model and the tokens; all runs of one seed have the same. Two runs also differ by chance. So several seeds are
compared, run by run, and one more run is stage 3 itself with slightly changed weights at the start, which shows the effect of chance
alone. The file keeps every run, and these are not repeated. Runs have a loopback interface of their own (a network namespace, so this
needs root), whose counter gives the bytes sent per step; without root that column is empty. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.collectives.onebit_convergence import LENGTH, corpus
from benchmarks.common import figures
from benchmarks.common.processes import REPOSITORY
from benchmarks.common.tables import ResultTable

_W, _G = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("stage 3", {}),
    "nudged": ("stage 3, one weight in a thousand nudged", {}),
    "weights": ("quantized weights", _W),
    "gradients": ("quantized gradients", _G),
    "both": ("quantized weights and gradients", _W | _G),
    "loco": ("quantized weights and gradients, with LoCo", _W | _G | {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}),
}
BATCH, LAST = 4, 30
LIMIT = 1.005  # largest allowed ratio to stage 3's loss, for the runs with LoCo
Runs = dict[str, dict[str, Any]]  # name -> measurements
SIZES = {"small": (128, 4), "medium": (256, 6), "large": (512, 8)}  # width, layers


def build_model(kind: str, size: str, seed: int) -> Any:
    """Return a causal model over bytes."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    width, layers = SIZES[size]
    if kind == "gpt2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=4, use_cache=False, **drop)
        )
    shape: Any = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **shape))


def nudge(module: Any) -> None:
    """Make every thousandth weight 1 % larger: a meaningless change that has affected every weight after a few hundred steps."""
    import torch

    with torch.no_grad():
        for param in module.parameters():
            param.view(-1)[::1000] *= 1.01


def interface_bytes() -> int:
    """Return the bytes that the loopback interface of this namespace has carried, headers and acknowledgements included."""
    with open("/proc/net/dev", encoding="ascii") as table:
        line = next(line for line in table if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def train(kind: str, model: str, size: str, seed: int, steps: int) -> dict[str, Any]:
    """Train as one rank of one run; return the mean loss of every step over all ranks, and the bytes sent in the last steps."""
    import torch
    import torch.distributed as dist

    import hf_zero

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
    module = build_model(model, size, seed).train()
    if kind == "nudged":
        nudge(module)
    numel = sum(param.numel() for param in module.parameters())
    engine = hf_zero.initialize(model=module, config=config)[0]
    rows, losses, before = corpus(), [], 0
    for step in range(steps):
        if step == steps - LAST:
            dist.barrier()
            before = interface_bytes()
        generator = torch.Generator().manual_seed(10_000_000 * seed + 1000 * step + dist.get_rank())
        batch = rows[torch.randint(0, len(rows), (BATCH,), generator=generator)]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"{model} {size}, {kind}, seed {seed}, step {step + 1} of {steps}: loss {losses[-1].item():.4f}", file=sys.stderr)
    dist.barrier()
    sent = (interface_bytes() - before) / LAST / dist.get_world_size()
    means = torch.stack(losses)
    dist.all_reduce(means)
    engine.destroy()
    rounded = [round(loss, 5) for loss in (means / dist.get_world_size()).tolist()]
    return {"losses": rounded, "bytes": sent if has_namespaces() else None, "numel": numel}


def train_all(kinds: list[str], arguments: argparse.Namespace) -> None:
    """Train once per entry of ``kinds``, with one model and seed, as one rank; rank 0 appends each result as a line to the output file."""
    import torch
    import torch.distributed as dist

    import hf_zero

    torch.set_num_threads(1)
    hf_zero.init_distributed()
    for kind in kinds:
        found = train(kind, arguments.models[0], arguments.size, arguments.seeds[0], arguments.steps)
        if dist.get_rank() == 0:
            with arguments.out.open("a") as lines:
                lines.write(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def has_namespaces() -> bool:
    """Return whether a run can have a network interface of its own."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "ip"))


def run(kinds: list[str], model: str, seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results of some runs of one model and seed: losses, bytes per rank and step, and parameters of the model."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "runs.jsonl")
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(arguments.ranks), "--master_addr", "127.0.0.1"]
        words += [
            "-m",
            "benchmarks.collectives.zeropp_convergence",
            "--train",
            *kinds,
            "--models",
            model,
            "--size",
            arguments.size,
            "--seeds",
            str(seed),
        ]
        words += ["--steps", str(arguments.steps), "--out", str(out)]
        if has_namespaces():
            words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *words]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(words, check=True, env=environment)
        return [json.loads(line) for line in out.read_text().splitlines()]


def key(model: str, kind: str, seed: int, arguments: argparse.Namespace) -> str:
    """Return the name of a run in the file."""
    return f"{model} {arguments.size} {arguments.ranks}x{arguments.steps} {kind} {seed}"


def measure(arguments: argparse.Namespace, known: Runs) -> None:
    """Measure all runs that ``known`` lacks, and add them; write the file after each seed of a model, so that it can be continued."""
    for seed in arguments.seeds:
        for model in arguments.models:
            missing = [kind for kind in arguments.runs if key(model, kind, seed, arguments) not in known]
            if missing:
                found = run(missing, model, seed, arguments)
                known.update({key(model, kind, seed, arguments): one for kind, one in zip(missing, found, strict=True)})
                if arguments.json:
                    write(known, arguments)


def end(found: dict[str, Any]) -> float:
    """Return the mean loss of the last steps."""
    return sum(found["losses"][-LAST:]) / LAST


def ratios(model: str, kind: str, known: Runs, arguments: argparse.Namespace) -> list[float]:
    """Return the loss at the end relative to stage 3's, seed by seed."""
    pairs = [[known.get(key(model, which, seed, arguments)) for which in (kind, "exact")] for seed in arguments.seeds]
    return [end(mine) / end(exact) for mine, exact in pairs if mine and exact]


def spread(values: list[float]) -> float:
    """Return the standard deviation between seeds; NaN for one seed."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def row_of(model: str, kind: str, known: Runs, arguments: argparse.Namespace) -> list[str]:
    """Return one line of the table."""
    found = [one for seed in arguments.seeds if (one := known.get(key(model, kind, seed, arguments)))]
    ends, beside = [end(one) for one in found], ratios(model, kind, known, arguments)
    sent = [one["bytes"] / one["numel"] for one in found if one["bytes"] is not None]
    several = len(found) > 1
    return [
        f"{model}, {RUNS[kind][0]}",
        f"{statistics.mean(ends):.4f}",
        f"{spread(ends) / statistics.mean(ends):.2%}" if several else "",
        ""
        if kind == "exact"
        else f"{statistics.mean(beside):.4f} x" + (f" ± {spread(beside) / math.sqrt(len(beside)):.4f}" if several else ""),
        "" if kind == "exact" or not several else f"{min(beside):.4f} to {max(beside):.4f} ({len(beside)})",
        f"{statistics.mean(sent):.2f}" if sent else "",
    ]


def table(known: Runs, arguments: argparse.Namespace) -> ResultTable:
    """Return a table with a row per model and run."""
    made = [(model, kind) for model in arguments.models for kind in arguments.runs if ratios(model, kind, known, arguments)]
    rows = [row_of(model, kind, known, arguments) for model, kind in made]
    columns: tuple[str, ...] = (
        "model and collectives",
        f"loss, mean of the last {LAST} steps",
        "between seeds",
        "beside stage 3 of the same seed",
    )
    columns += ("from and to (seeds)", "bytes a rank sends per step and parameter")
    width, layers = SIZES[arguments.size]
    numel = {
        model: found["numel"]
        for model in arguments.models
        for name, found in known.items()
        if name.startswith(f"{model} {arguments.size} ")
    }
    sizes = " and ".join(f"{model} ({count / 1e6:.1f} M parameters)" for model, count in numel.items())
    text = (
        f"`benchmarks/collectives/zeropp_convergence.py` trains {sizes}, {layers} layers of width {width}, on bytes of docstrings "
        f"in bf16 at stage 3, {arguments.ranks} ranks, {arguments.steps} steps, all parameters sharded. {_seeds(arguments)} "
        f"Bytes are those of the last {LAST} steps, counted by the loopback interface."
    )
    name = "zeropp_convergence" + ("" if arguments.size == parse([]).size else f"_{arguments.size}")
    given = "" if arguments.size == parse([]).size else f" --size {arguments.size}"
    given += "" if arguments.seeds == parse([]).seeds else f" --seeds {' '.join(map(str, arguments.seeds))}"
    given += "".join(
        f" --{option} {' '.join(chosen)}"
        for option, chosen in (("models", arguments.models), ("runs", arguments.runs))
        if chosen != getattr(parse([]), option)
    )
    command = f"python -m benchmarks.collectives.zeropp_convergence{given} --json benchmarks/results/{name}.json"
    figure = arguments.plot.name if arguments.plot else ""
    command += f" --plot docs/{figure}" if figure else ""
    size = "" if arguments.size == parse([]).size else f", {arguments.size} models"
    return ResultTable(f"Quantized collectives: loss beside stage 3's{size}", command, text, columns, rows, figure)


def _seeds(arguments: argparse.Namespace) -> str:
    if len(arguments.seeds) == 1:
        return "One seed: every run sees the same model and tokens."
    return (
        f"Up to {len(arguments.seeds)} seeds, each another model and other tokens, the same for every run of it. **Between seeds**: "
        "standard deviation of that loss. **Beside stage 3**: mean of the seeds' ratios ± its standard error."
    )


def write(known: Runs, arguments: argparse.Namespace) -> None:
    """Write the table, and every run beside it."""
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({**asdict(table(known, arguments)), "cases": known}) + "\n")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama"], default=["gpt2", "llama"])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), help='"exact" must be among them')
    parser.add_argument("--size", choices=list(SIZES), default="small", help="width and layers: " + str(SIZES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="keep the runs in this file; those that it holds are not made again")
    parser.add_argument("--plot", type=Path, help="draw the curves (needs matplotlib)")
    parser.add_argument("--train", nargs="+", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> int:
    arguments = parse()
    if arguments.train:
        train_all(arguments.train, arguments)
        return 0
    known: Runs = json.loads(arguments.json.read_text()).get("cases", {}) if arguments.json and arguments.json.exists() else {}
    measure(arguments, known)
    table(known, arguments).print()
    if arguments.json:
        write(known, arguments)
    if arguments.plot:
        figures.zeropp_convergence({**asdict(table(known, arguments)), "cases": known}, arguments.plot)
    found = [ratios(model, "loco", known, arguments) for model in arguments.models]
    return 0 if all(statistics.mean(beside) <= LIMIT for beside in found if beside) else 1


if __name__ == "__main__":
    sys.exit(main())
