"""Step time, tokens per second, MFU and peak memory of Llama shapes on all GPUs of a machine: hf_zero, DDP, FSDP2, DeepSpeed.

    python -m benchmarks.steps.step_time_gpu --json benchmarks/results/step_time_gpu.json
    python -m benchmarks.steps.step_time_gpu --table compiled --json benchmarks/results/compiled_gpu.json
    python -m benchmarks.steps.step_time_gpu --table wide --json benchmarks/results/wide_gpu.json
    python -m benchmarks.steps.step_time_gpu --table lora --json benchmarks/results/lora_gpu.json
    python -m benchmarks.steps.step_time_gpu --peer-python /path/to/venv/bin/python          # adds DeepSpeed from that venv
    python -m benchmarks.steps.step_time_gpu --device cpu --toy                              # the same code at toy size, without a GPU

Tables: ``eager`` trains 1.1 B parameters as transformers runs them; ``compiled`` the same under torch.compile, with torchao's float8 and
with Liger's kernels; ``wide`` eight compiled layers of the sizes of 8 B parameters, in bf16 and float8; ``lora`` trains adapters on a
frozen base of 8 B parameters.

One rank per GPU. Contenders train one after the other in processes of their own, because their states do not fit side by side. All train
in bf16 with fp32 masters, clip the norm at 1 and step with ``torch.optim.AdamW(fused=True)``: DDP keeps fp32 parameters and casts
(autocast), FSDP2 uses ``MixedPrecisionPolicy``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import flops
from benchmarks.common.device_processes import add_peer, peer_of, run_all
from benchmarks.common.tables import ResultTable, machine

LLAMA = {"layers": 22, "width": 2048, "heads": 32, "vocab": 32000, "length": 2048, "batch": 4}
LLAMA_8B = {"layers": 32, "width": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "length": 2048, "batch": 2}
LLAMA_WIDE = {**LLAMA_8B, "layers": 8, "vocab": 32000, "batch": 4}
TOY = {"layers": 2, "width": 64, "heads": 4, "vocab": 512, "length": 16, "batch": 2}
COLUMNS = ["contender", "s/step", "ratio", "tokens/s", "MFU", "peak GPU GiB", "first step s", "loss"]
Contender = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """A model, and the contenders that train it.

    Attributes:
        size: Sizes of the model and of a batch.
        contenders: Contender and fields of its ``Job``, by name. The first is the baseline; the most important come first, for a run that
            is cut short.
        lora: Rank of adapters, 0 for none.
        text: Sentences about the contenders.
    """

    size: dict[str, int]
    contenders: dict[str, Contender]
    lora: int = 0
    text: str = ""

    @property
    def base(self) -> str:
        """Return the name of the contender to whose time the others are compared."""
        return next(iter(self.contenders))


BLOCKS: dict[str, Any] = {"compiled": "blocks"}
_COMPILED = (
    "**Compiled**: each block by torch.compile with inductor, unless a row says otherwise. **Float8**: torchao, tensorwise, all linear "
    "layers except the head."
)
TABLES = {
    "eager": Table(
        LLAMA,
        {
            "DDP": ("ddp", {}),
            "hf_zero-3": ("hf_zero", {"stage": 3}),
            "FSDP2": ("fsdp2", {"reshard": True}),
            "hf_zero-2": ("hf_zero", {"stage": 2}),
            "hf_zero-1": ("hf_zero", {"stage": 1}),
            "hf_zero-0": ("hf_zero", {"stage": 0}),
            "FSDP2, whole after forward": ("fsdp2", {"reshard": False}),
            "DeepSpeed-3": ("deepspeed", {"stage": 3}),
            "DeepSpeed-2": ("deepspeed", {"stage": 2}),
            "DeepSpeed-1": ("deepspeed", {"stage": 1}),
        },
    ),
    "compiled": Table(
        LLAMA,
        {
            "DDP, blocks compiled": ("ddp", BLOCKS),
            "hf_zero-3, compiled": ("hf_zero", {"stage": 3, **BLOCKS}),
            "hf_zero-0, compiled": ("hf_zero", {"stage": 0, **BLOCKS}),
            "FSDP2, compiled": ("fsdp2", {"reshard": True, **BLOCKS}),
            "hf_zero-3, compiled, float8": ("hf_zero", {"stage": 3, "float8": True, **BLOCKS}),
            "FSDP2, compiled, float8": ("fsdp2", {"reshard": True, "float8": True, **BLOCKS}),
            "hf_zero-3, Liger": ("hf_zero", {"stage": 3, "liger": True}),
            "hf_zero-3, compiled, Liger": ("hf_zero", {"stage": 3, "liger": True, **BLOCKS}),
            "DDP, Liger": ("ddp", {"liger": True}),
            "DDP, complete model compiled": ("ddp", {"compiled": "whole"}),
            "hf_zero-2, compiled": ("hf_zero", {"stage": 2, **BLOCKS}),
            "hf_zero-1, compiled": ("hf_zero", {"stage": 1, **BLOCKS}),
            "DDP": ("ddp", {}),
        },
        text=_COMPILED,
    ),
    "wide": Table(
        LLAMA_WIDE,
        {
            "DDP, blocks compiled": ("ddp", BLOCKS),
            "hf_zero-3, compiled": ("hf_zero", {"stage": 3, **BLOCKS}),
            "hf_zero-3, compiled, float8": ("hf_zero", {"stage": 3, "float8": True, **BLOCKS}),
            "FSDP2, compiled": ("fsdp2", {"reshard": True, **BLOCKS}),
            "FSDP2, compiled, float8": ("fsdp2", {"reshard": True, "float8": True, **BLOCKS}),
            "hf_zero-0, compiled": ("hf_zero", {"stage": 0, **BLOCKS}),
            "hf_zero-0, compiled, float8": ("hf_zero", {"stage": 0, "float8": True, **BLOCKS}),
        },
        text=_COMPILED,
    ),
    "lora": Table(
        LLAMA_8B,
        {
            "DDP": ("ddp", {}),
            "hf_zero-3": ("hf_zero", {"stage": 3}),
            "hf_zero-3, compiled": ("hf_zero", {"stage": 3, **BLOCKS}),
            "DDP, blocks compiled": ("ddp", BLOCKS),
            "hf_zero-2": ("hf_zero", {"stage": 2}),
            "hf_zero-3, compiled, Liger": ("hf_zero", {"stage": 3, "liger": True, **BLOCKS}),
            "DeepSpeed-3": ("deepspeed", {"stage": 3}),
        },
        lora=16,
        text="Adapters of rank 16 (PEFT) on all linear layers except the head; the base is frozen, in bf16.",
    ),
}


def devices(device: str) -> tuple[int, str]:
    """Return the number of ranks, and the name of the device of each."""
    import torch

    if device == "cuda":
        return torch.cuda.device_count(), torch.cuda.get_device_name()
    return 1, device


def row_of(name: str, answer: dict[str, Any], base: float, work: float, tokens: int, world: int, peak: float) -> list[str]:
    """Return the cells of one contender.

    Args:
        name: Name of the contender.
        answer: Measurements of rank 0.
        base: Seconds per step of the first contender, 0 without it.
        work: FLOPs of one rank's step.
        tokens: Tokens of one rank's step.
        world: Number of ranks.
        peak: FLOP/s of a device, 0 if unknown.
    """
    seconds = answer["seconds"]
    ratio = f"{seconds / base:.3f}" if base else ""
    utilisation = f"{100 * work / seconds / peak:.1f} %" if peak else ""
    return [
        name,
        f"{seconds:.4f}",
        ratio,
        f"{world * tokens / seconds:.0f}",
        utilisation,
        f"{answer['gpu'] / 2**30:.2f}",
        f"{answer['first']:.1f}",
        f"{answer['loss']:.4f}",
    ]


def count(size: dict[str, int]) -> int:
    """Return the number of parameters in matrix products, of a model that is not allocated."""
    import torch

    from benchmarks.common.training import build_model

    with torch.device("meta"):
        return flops.parameters_of(build_model("llama", size))


def measure(arguments: argparse.Namespace, size: dict[str, int]) -> ResultTable:
    """Run all contenders; write the file after each."""
    table = TABLES[arguments.table]
    world, device = devices(arguments.device)
    peak, tokens = flops.peak_of(device), size["batch"] * size["length"]
    parameters = count(size)
    work = flops.per_token(parameters, size, frozen=table.lora > 0) * tokens
    names = ("device", "steps", "together", "warmup", "limit", "peer_path", "backend")
    base: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    base |= {"size": size, "shape": "llama", "offload": False, "dtype": "bf16", "world": world, "lora": table.lora}
    jobs: dict[str, tuple[dict[str, Any], str]] = {}
    for name in arguments.contenders or table.contenders:
        contender, more = table.contenders[name]
        python = peer_of(arguments) if contender == "deepspeed" else sys.executable
        if python:
            jobs[name] = ({**base, **more, "contender": contender}, python)
    rows: list[list[str]] = []
    first = 0.0
    for name, outcome in zip(jobs, run_all(jobs.values()), strict=True):
        if outcome.answer and name == table.base:
            first = outcome.answer["seconds"]
        row = row_of(name, outcome.answer, first, work, tokens, world, peak) if outcome.answer else [name, outcome.reason, *[""] * 6]
        print("  ".join(row), flush=True)
        rows.append(row)
        if arguments.json:
            table_of(arguments, size, rows, world, peak, parameters).save(arguments.json)
    return table_of(arguments, size, rows, world, peak, parameters)


def table_of(
    arguments: argparse.Namespace, size: dict[str, int], rows: list[list[str]], world: int, peak: float, parameters: int
) -> ResultTable:
    """Return the table of the results so far."""
    table = TABLES[arguments.table]
    how = flops.HOW_FROZEN if table.lora else flops.HOW
    said = f"{how}, of {peak / 1e12:.0f} TFLOP/s per GPU (bf16, dense)." if peak else "MFU: this device's peak is not known."
    title = {
        "eager": "Step time",
        "compiled": "Step time of compiled blocks",
        "wide": "Step time of wide blocks",
        "lora": "Step time of LoRA",
    }
    more = "" if arguments.table == "eager" else f" --table {arguments.table}"
    file = "step_time_gpu" if arguments.table == "eager" else f"{arguments.table}_gpu"
    tokens = ""
    if size["batch"] != table.size["batch"] and not arguments.toy:
        tokens, more, file = f", {size['batch']} x {size['length']} tokens,", f"{more} --batch {size['batch']}", f"{file}_{size['batch']}"
    return ResultTable(
        title=f"{title[arguments.table]}{tokens} on {world} x {machine()['device']}",
        command=f"python -m benchmarks.steps.step_time_gpu{more} --json benchmarks/results/{file}.json",
        text=f"Llama shape, {size['layers']} layers, width {size['width']}, vocabulary {size['vocab']}, {parameters / 1e9:.3f} G "
        f"parameters without the input embeddings, random weights, {size['batch']} x {size['length']} tokens per rank, {world} rank(s), "
        f"bf16; median of {arguments.steps // arguments.together} readings of {arguments.together} steps after {arguments.warmup}. "
        f"**Ratio**: to the time of {table.base}. {said}{' ' * bool(table.text)}{table.text}",
        columns=COLUMNS,
        rows=rows,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu", "pretend"], default="cuda")
    parser.add_argument("--table", choices=list(TABLES), default="eager")
    parser.add_argument("--toy", action="store_true", help="a model of 0.1 M parameters")
    parser.add_argument("--contenders", nargs="+", default=[], metavar="NAME", help="names of the table's rows; all without it")
    parser.add_argument("--layers", type=int, help="fewer, for a GPU of less than about 40 GiB")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int, help="tokens per sample")
    parser.add_argument("--backend", default="inductor", help="back end of torch.compile")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--together", type=int, default=5, help="steps between two waits for the device: one reading")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.0, help="seconds that each contender may take; 0 for no limit")
    parser.add_argument("--json", type=Path)
    add_peer(parser)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.contenders if name not in TABLES[arguments.table].contenders]
    if unknown:
        parser.error(f"table {arguments.table} has no row {', '.join(unknown)}; it has {'; '.join(TABLES[arguments.table].contenders)}")
    return arguments


def main() -> int:
    arguments = parse()
    size = dict(TOY if arguments.toy else TABLES[arguments.table].size)
    size |= {name: getattr(arguments, name) for name in ("layers", "batch", "length") if getattr(arguments, name)}
    measure(arguments, size).print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
