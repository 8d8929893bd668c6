"""GPT-2 XL at stage 3 with CPU offload on one GPU whose memory is capped: hf_zero, DeepSpeed, FSDP2, plain PyTorch.

    python -m benchmarks.offload.offload_gpu --peer-python PYTHON --trace timeline.json --json benchmarks/results/offload_gpu.json
    python -m benchmarks.offload.offload_gpu --largest                                    # the largest model that trains one step as well
    python -m benchmarks.offload.offload_gpu --device cpu --toy                           # the same code at toy size, without a GPU

The model comes from its configuration with random weights. Each contender runs in a process of its own, and each process may allocate
``--cap-gib`` of the GPU. In the same run a process measures the rates that bound a step: copies to and from the device, Adam at the
bandwidth of host memory (28 bytes per parameter, the bandwidth of an in-place addition), and forward and backward alone on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.device_processes import add_peer, peer_of, run
from benchmarks.common.tables import ResultTable

XL = {"layers": 48, "width": 1600, "heads": 25, "vocab": 50257, "length": 128, "batch": 16}
TOY = {"layers": 2, "width": 64, "heads": 4, "vocab": 512, "length": 16, "batch": 2}
NAMES = {
    "hf_zero": "hf_zero-3, cpu offload",
    "deepspeed": "deepspeed-3, cpu offload",
    "fsdp2": "FSDP2, CPUOffloadPolicy",
    "pytorch": "PyTorch",
}
MOST_LAYERS = 1 << 12


def bounds(rates: dict[str, float]) -> dict[str, float]:
    """Return lower bounds of a step in seconds: its computation alone, its copies alone, and its update alone.

    Every parameter is copied to the device in 16 bit for forward and again for backward, its gradient back; both directions at once.
    """
    numel = rates["params"]
    copies = max(2 * 2 * numel / rates["inward"], 2 * numel / rates["outward"])
    return {"compute": rates["compute"], "copies": copies, "Adam": 28 * numel / rates["host"]}


def largest(base: dict[str, Any], python: str) -> str:
    """Return the largest number of layers of this width that trains one step: doubled until it fails, then by bisection."""
    fits, fails = 0, 0
    layers = base["size"]["layers"]
    while layers <= MOST_LAYERS and (not fails or fails - fits > max(1, fits // 16)):
        outcome = run({**base, "size": {**base["size"], "layers": layers}, "steps": 1, "warmup": 0, "trace": ""}, python)
        print(f"{base['contender']}: {layers} layers: {outcome.reason or 'trains'}", file=sys.stderr)
        if outcome.answer:
            fits = layers
        else:
            fails = layers
        layers = 2 * fits if not fails else (fits + fails) // 2
        if layers in (0, fits):
            break
    numel = 12 * fits * base["size"]["width"] ** 2 + base["size"]["vocab"] * base["size"]["width"]
    return f"{numel / 1e9:.2f} G ({fits} layers)" if fits else "none"


def limits_of(base: dict[str, Any]) -> dict[str, float]:
    """Return the lower bounds of a step; empty if they could not be measured."""
    measured = run({**base, "contender": "rates"}, sys.executable)
    if not measured.answer:
        print(f"the machine's rates could not be measured: {measured.reason}", file=sys.stderr)
    return bounds(measured.answer) if measured.answer else {}


def rows_of(arguments: argparse.Namespace, base: dict[str, Any], pythons: dict[str, str], limits: dict[str, float]) -> Iterator[list[str]]:
    """Yield a row for each contender of one element type as soon as it is measured, and again with the largest model, the last cell."""
    for contender, python in pythons.items():
        job = {**base, "contender": contender, "trace": arguments.trace if contender == "hf_zero" and base["dtype"] == "bf16" else ""}
        print(f"{base['dtype']}: {contender}", file=sys.stderr)
        outcome = run(job, python)
        answer = outcome.answer
        cells = [outcome.reason, "", "", "", ""]
        if answer:
            ratio = f"{answer['seconds'] / max(limits.values()):.2f}" if limits else ""
            memory = [f"{answer[name] / 2**30:.2f}" for name in ("gpu", "host")]
            cells = [f"{answer['seconds']:.3f}", ratio, *memory, f"{answer['loss']:.4f}"]
        measured = [f"{NAMES[contender]}, {base['dtype']}", *cells]
        yield [*measured, ""]
        if arguments.largest:  # takes long; the rows so far are kept if it is interrupted
            yield [*measured, largest(job, python)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu", "pretend"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="a model of 0.1 M parameters")
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp16"], default=["bf16", "fp16"])
    parser.add_argument("--contenders", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--block", type=int, help="tokens per sample")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--cap-gib", type=float, default=24.0, help="GPU memory that each process may allocate; 0 for all")
    parser.add_argument("--host-gib", type=float, default=0.0, help="host memory at which a process is ended; 0 for no limit")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds that each process may take; 0 for no limit")
    parser.add_argument("--overlap", default="auto", help="hf_zero.offload_overlap: auto, none, forward, full")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--largest", action="store_true", help="search the largest model of this width that trains one step")
    add_peer(parser)
    parser.add_argument("--trace", default="", help="Chrome trace of two steps of hf_zero in bf16")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    size = dict(TOY if arguments.toy else XL)
    size["length"], size["batch"] = arguments.block or size["length"], arguments.batch or size["batch"]
    pythons = {name: peer_of(arguments) if name == "deepspeed" else sys.executable for name in arguments.contenders}
    pythons = {name: python for name, python in pythons.items() if python}
    names = ("device", "cap_gib", "host_gib", "steps", "warmup", "overlap", "limit", "peer_path")
    base = {name: getattr(arguments, name) for name in names} | {"size": size}
    rows: list[list[str]] = []
    texts: list[str] = []
    for dtype in arguments.dtypes:
        limits = limits_of({**base, "dtype": dtype})
        texts.append(f"{dtype}: " + (", ".join(f"{name} {value:.3f} s" for name, value in limits.items()) or "not measured"))
        for row in rows_of(arguments, {**base, "dtype": dtype}, pythons, limits):
            if rows and rows[-1][0] == row[0]:
                rows.pop()
            rows.append(row)
            if arguments.json:  # results are kept even if a later measurement fails
                table_of(arguments, size, rows, texts).save(arguments.json)
    table_of(arguments, size, rows, texts).print()
    return 0


def table_of(arguments: argparse.Namespace, size: dict[str, int], rows: list[list[str]], texts: list[str]) -> ResultTable:
    """Return the table of the results so far."""
    return ResultTable(
        title="CPU offload beside a device",
        command="python -m benchmarks.offload.offload_gpu --peer-python PYTHON --json benchmarks/results/offload_gpu.json",
        text=f"GPT-2 shape, {size['layers']} layers, width {size['width']}, random weights, "
        f"batch {size['batch']} x {size['length']}, one rank, {arguments.device} capped at {arguments.cap_gib:g} GiB; median of "
        f"{arguments.steps} steps. **Peak GPU GiB**: of the steps, without set-up. **Ratio**: to the longest of what a step needs alone, "
        f"from rates measured in the same run ({'; '.join(texts)}).",
        columns=["contender", "s/step", "ratio to the bound", "peak GPU GiB", "peak host GiB", "loss", "largest model"],
        rows=rows,
    )


if __name__ == "__main__":
    sys.exit(main())
