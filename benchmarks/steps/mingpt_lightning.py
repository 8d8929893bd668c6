"""minGPT through Lightning's Trainer: the largest model that trains, epoch time and peak memory of DDP and of ZeRO stage 3.

    python -m benchmarks.steps.mingpt_lightning --n_layer 15 --n_head 16 --n_embd 3072 --gpus 8 --precision 16 --batch_size 1 \\
        --limit_train_batches 128                                          # DDP, one run
    python -m benchmarks.steps.mingpt_lightning --strategy zero3 --n_layer 16 --n_head 16 --n_embd 8192 --gpus 8 --precision 16
    python -m benchmarks.steps.mingpt_lightning --strategy zero3 --n_layer 56 --n_head 16 --n_embd 8192 --gpus 8 --precision 16 \\
        --cpu_offload
    python -m benchmarks.steps.mingpt_lightning --table                          # all four ways, at a size that fits this machine
    python -m benchmarks.steps.mingpt_lightning --table --json benchmarks/results/mingpt_lightning.json --plot docs/mingpt_lightning.png

``--table`` trains a common model in every way, and then doubles the number of layers until training runs out of memory:
``--memory_gib`` per rank (of the GPU if there is one, else of the process). Without a GPU, ``--gpus`` is the number of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import figures
from benchmarks.common.processes import REPOSITORY
from benchmarks.common.tables import ResultTable

RESULT = "RESULT "  # prefix of a run's line of numbers
WAYS = {
    "DDP": ["--strategy", "ddp"],
    "ZeRO stage 3": ["--strategy", "zero3"],
    "ZeRO stage 3 + CPU offload": ["--strategy", "zero3", "--cpu_offload"],
    "ZeRO stage 3 + CPU offload + activation checkpointing": ["--strategy", "zero3", "--cpu_offload", "--activation_checkpointing"],
}
TEXT = """minGPT (width {n_embd}, {n_head} heads, vocabulary {vocab_size}, {block_size} tokens, batch {batch_size} per rank) through
Lightning's Trainer on {gpus} {devices}, precision {precision}, {limit_train_batches} batches per epoch. Epoch time and peak memory at
{n_layer} layers; **largest**: layers are doubled from there until a rank needs more than {memory_gib:g} GiB.{note}"""


# ------------------------------------------------------------------------------------------------ model


class CausalAttention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = self.mix(hidden).view(batch, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and inside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.feed(self.feed_norm(hidden))


class MinGPT(nn.Module):
    """Token and position embeddings, blocks, a norm and a head."""

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__()
        self.checkpointing = flags.activation_checkpointing
        self.tokens = nn.Embedding(flags.vocab_size, flags.n_embd)
        self.positions = nn.Embedding(flags.block_size, flags.n_embd)
        self.blocks = nn.ModuleList(Block(flags.n_embd, flags.n_head) for _ in range(flags.n_layer))
        self.norm = nn.LayerNorm(flags.n_embd)
        self.head = nn.Linear(flags.n_embd, flags.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = self._checkpoint(block, hidden) if self.checkpointing else block(hidden)
        return self.head(self.norm(hidden))

    @staticmethod
    def _checkpoint(block: nn.Module, hidden: Tensor) -> Tensor:
        import deepspeed  # provided by hf_zero

        return deepspeed.checkpointing.checkpoint(block, hidden)


# ------------------------------------------------------------------------------------------------ one run


def train(flags: argparse.Namespace) -> int:
    """Train in one way; rank 0 prints a line of numbers."""
    import lightning

    on_gpu = torch.cuda.is_available()
    limit_memory(flags.memory_gib, on_gpu)
    module = make_module(flags)
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=flags.gpus,
        strategy=strategy_of(flags),
        precision=precision_of(flags),
        max_epochs=flags.max_epochs,
        limit_train_batches=flags.limit_train_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randint(flags.vocab_size, (flags.limit_train_batches * flags.batch_size * flags.gpus, flags.block_size + 1))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=flags.batch_size))
    report(trainer, module, flags)
    return 0


def limit_memory(gib: float, on_gpu: bool) -> None:
    """Make allocations beyond ``gib`` per rank fail; 0 is no limit."""
    if not gib:
        return
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), int(os.environ.get("LOCAL_RANK", 0)))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), -1))


def precision_of(flags: argparse.Namespace) -> str:
    """Return Lightning's name of the precision; fp16 needs a GPU, so a CPU uses bf16."""
    if flags.precision == "16":
        return "16-mixed" if torch.cuda.is_available() else "bf16-mixed"
    return {"bf16": "bf16-mixed", "32": "32-true"}[flags.precision]


def strategy_of(flags: argparse.Namespace) -> Any:
    if flags.strategy == "ddp":
        return "ddp"
    from hf_zero.integrations import ZeroStrategy

    return ZeroStrategy(stage=3, offload_optimizer=flags.cpu_offload, offload_parameters=flags.cpu_offload)


def make_module(flags: argparse.Namespace) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        """Module built in ``configure_model``, where stage 3 shards each parameter as it is created."""

        def __init__(self) -> None:
            super().__init__()
            self.model: MinGPT | None = None
            self.epoch_seconds: list[float] = []

        def configure_model(self) -> None:
            if self.model is None:
                torch.manual_seed(0)
                self.model = MinGPT(flags)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            logits = self.model(batch[:, :-1])  # type: ignore[misc]
            return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95))

        def on_train_epoch_start(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self._start = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.epoch_seconds.append(time.perf_counter() - self._start)

    return Module()


def report(trainer: Any, module: Any, flags: argparse.Namespace) -> None:
    """Gather the measurements of all ranks, and print them."""
    numbers = {
        "epoch_seconds": sum(module.epoch_seconds) / len(module.epoch_seconds),
        "host_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "device_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
    }
    ranks: list[Any] = [numbers]
    if torch.distributed.is_initialized():
        ranks = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, numbers)
    if trainer.is_global_zero:
        found = {name: max(rank[name] for rank in ranks) for name in numbers} | {"parameters": parameters_of(flags)}
        print(f"Average Epoch time: {found['epoch_seconds']:.2f} seconds")
        print(f"Average Peak memory: {found['device_mib'] or found['host_mib']:.2f}MiB")
        print(RESULT + json.dumps(found), flush=True)


def parameters_of(flags: argparse.Namespace) -> int:
    """Return the number of parameters of the whole model, counted without building it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in MinGPT(flags).parameters())


# ------------------------------------------------------------------------------------------------ the table


def measure(flags: argparse.Namespace, way: list[str], layers: int, batches: int, epochs: int) -> dict[str, Any] | None:
    """Run once in new processes; return the numbers, or None when it ran out of memory.

    Raises:
        RuntimeError: The run failed for another reason.
    """
    sizes = {"n_layer": layers, "n_head": flags.n_head, "n_embd": flags.n_embd, "gpus": flags.gpus, "precision": flags.precision}
    sizes |= {
        "batch_size": flags.batch_size,
        "limit_train_batches": batches,
        "vocab_size": flags.vocab_size,
        "block_size": flags.block_size,
    }
    sizes |= {"max_epochs": epochs, "memory_gib": flags.memory_gib}
    command = [sys.executable, "-m", "benchmarks.steps.mingpt_lightning", *way]
    command += [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    env = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    env["OMP_NUM_THREADS"] = "1"
    code, text = run(command, env, flags.timeout)
    lines = [line for line in text.splitlines() if line.startswith(RESULT)]
    if lines:
        return json.loads(lines[-1].removeprefix(RESULT))
    if out_of_memory(text):
        return None
    raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{text[-3000:]}")


def run(command: list[str], env: dict[str, str], seconds: int) -> tuple[int | None, str]:
    """Return the exit code (None at the time limit) and the ranks' output; a rank that fails to allocate may leave the others waiting."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        return process.returncode, log.read()


def out_of_memory(text: str) -> bool:
    signs = ("out of memory", "MemoryError", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "not enough memory")
    return any(sign in text for sign in signs)


def table(flags: argparse.Namespace) -> ResultTable:
    """Measure all ways at one size, then the largest model of each; return the table."""
    rows = []
    for name, way in WAYS.items():
        common = measure(flags, way, flags.n_layer, flags.limit_train_batches, flags.max_epochs)
        if common is None:
            raise RuntimeError(f"{name} does not train {flags.n_layer} layers")
        layers, largest = 2 * flags.n_layer, common["parameters"]
        while layers <= flags.most_layers:
            trained = measure(flags, way, layers, batches=2, epochs=1)
            print(f"{name}: {layers} layers {'out of memory' if trained is None else 'trained'}", file=sys.stderr)
            if trained is None:
                break
            largest, layers = trained["parameters"], 2 * layers
        bound = ">= " if layers > flags.most_layers else ""
        memory = [f"{common['device_mib']:.0f}" if common["device_mib"] else "-", f"{common['host_mib']:.0f}"]
        rows.append([name, f"{bound}{largest / 1e6:.1f} M", f"{common['epoch_seconds']:.2f}", *memory])
    devices = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU processes"
    note = "" if torch.cuda.is_available() else " On a CPU the optimizer is on the host in any case, so offload changes nothing."
    text = TEXT.format(devices=devices, note=note, **vars(flags))
    columns = ["way", "largest model that trains", "epoch s", "peak device MiB", "peak host MiB"]
    given = " ".join(sys.argv[1:])
    return ResultTable("minGPT with Lightning", f"python -m benchmarks.steps.mingpt_lightning {given}", text, columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"n_layer": (4, "blocks"), "n_head": (4, "heads"), "n_embd": (256, "width"), "gpus": (2, "GPUs, or processes without one")}
    sizes |= {"batch_size": (1, "rows per rank"), "limit_train_batches": (8, "batches per epoch"), "max_epochs": (2, "epochs")}
    sizes |= {"vocab_size": (1024, "vocabulary"), "block_size": (128, "tokens"), "most_layers": (256, "where --table stops doubling")}
    sizes |= {"timeout": (600, "seconds for one run of --table")}
    for name, (value, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value})")
    parser.add_argument("--precision", default="32", choices=["16", "bf16", "32"])
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "zero3"])
    parser.add_argument("--cpu_offload", action="store_true", help="optimizer state and parameters rest on the host (stage 3)")
    parser.add_argument("--activation_checkpointing", action="store_true", help="every block through deepspeed.checkpointing.checkpoint")
    parser.add_argument("--memory_gib", type=float, default=0.0, help="memory of a rank; --table needs one (1.5 where it is left out)")
    parser.add_argument("--table", action="store_true", help="all four ways, and the largest model of each")
    parser.add_argument("--json", type=Path, help="file for the table")
    parser.add_argument("--plot", type=Path, help="PNG file for the bars")
    flags = parser.parse_args()
    if not flags.table:
        return train(flags)
    flags.memory_gib = flags.memory_gib or 1.5
    result = table(flags)
    result.print()
    if flags.plot:
        figures.mingpt_lightning(asdict(result), flags.plot)
    if flags.json:
        ResultTable(**{**vars(result), "figure": flags.plot.name if flags.plot else ""}).save(flags.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
