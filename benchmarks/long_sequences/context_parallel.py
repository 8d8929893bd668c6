"""Divided sequences on CPU ranks: seconds per step, bytes that attention sends, and memory, against one rank and the peers.

    python -m benchmarks.long_sequences.context_parallel --peer-python VENV/bin/python --json benchmarks/results/context_parallel.json
    python -m benchmarks.long_sequences.context_parallel --ranks 4 --lengths 8192 32768 --peer-python VENV/bin/python
    python -m benchmarks.long_sequences.context_parallel --rounds 1 --steps 1 --lengths 256                # quick check

The peers, from a venv with DeepSpeed, accelerate and transformers: DeepSpeed's Ulysses, and accelerate's FSDP2 with ``cp_size``. Every
contender keeps its processes; a round times each in turn, and ratios are taken within a round. Bytes are counted, and must be those of
the formulas of docs/sequence-parallel.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from pathlib import Path

from benchmarks.common.tables import ResultTable
from benchmarks.parallel.sequence_parallel import PEERS, Contender, add_size_flags, measure, size_of, started

TITLES = {
    "one": "one rank",
    "context": "context parallel, allgather",
    "ring": "context parallel, alltoall",
    "hf_zero": "Ulysses",
    "deepspeed": "DeepSpeed: Ulysses",
    "fsdp2": "accelerate: FSDP2 with cp_size",
}
TEXT = """A Llama ({layers} layers, {width} wide, {heads} heads, half as many key heads, vocabulary {vocab}, fp32) at ZeRO stage 1 on
{ranks} gloo ranks of one thread, which share each sequence; one rank has it alone. Seconds: medians of {rounds} rounds of {steps} steps,
in turns; ratios within a round (least to most). Sent: bytes of a layer's attention in a step, counted, and by the formulas of
[sequence-parallel.md](sequence-parallel.md#context-parallelism). Memory: what tensors of a step add at their peak."""


def sent_by_formula(package: str, size: dict[str, int], length: int, ranks: int) -> int:
    """Return the bytes that attention of a layer sends in forward and backward, in fp32."""
    hidden, keys, away = size["width"], size["width"] // 2, ranks - 1
    if package in ("hf_zero", "deepspeed"):
        return 2 * (2 * hidden + 2 * keys) * length * 4 * away // ranks**2
    forward = 2 * length * keys * 4 * away // ranks
    return {"context": 2 * forward, "ring": 2 * forward + 2 * length * keys * 4}.get(package, 0)


def rows(contenders: list[Contender], arguments: argparse.Namespace, size: dict[str, int]) -> list[list[str]]:
    """Return the cells of the table."""
    found = []
    alone, base = contenders[0], contenders[1]
    for length in arguments.lengths:
        for one in contenders:
            name = f"{length} tokens: {TITLES['one' if one is alone else one.package]}"
            if one.failed:
                found.append([name, "does not run", textwrap.shorten(one.failed, 90), "", "", "", ""])
                continue
            seconds = one.seconds[length]
            ratios = [mine / theirs for mine, theirs in zip(seconds, base.seconds[length], strict=True)]
            spread = "" if one is base else f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            told = sent_by_formula(one.package, size, length, arguments.ranks) if one is not alone else 0
            sent = one.sent[length] / size["layers"] if one is not alone else 0
            memory = [f"{one.peaks[length] / 2**20:.1f}", f"{one.peaks[length] / alone.peaks[length]:.2f}"]
            found.append([name, f"{statistics.median(seconds):.3f}", spread, f"{sent / 2**20:.3f}", f"{told / 2**20:.3f}", *memory])
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    add_size_flags(parser)
    parser.add_argument("--peer-python", help="Python of a venv with DeepSpeed, accelerate and transformers")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    size = size_of(arguments)
    ours = [Contender("whole", 1), *(Contender(name, arguments.ranks) for name in ("context", "ring", "hf_zero"))]
    contenders = [*ours, *(Contender(name, arguments.ranks) for name in PEERS if arguments.peer_python)]
    with started(contenders, arguments):
        measure(contenders, arguments)
        for one in contenders[1:]:
            for length in arguments.lengths if not one.failed else ():
                one.count(length)
    table = ResultTable(
        "Context parallelism",
        f"python -m benchmarks.long_sequences.context_parallel --ranks {arguments.ranks}"
        + " --peer-python PYTHON" * bool(arguments.peer_python),
        TEXT.format(**size, ranks=arguments.ranks, rounds=arguments.rounds, steps=arguments.steps),
        ["sequences", "s/step", "against allgather", "sent, MiB", "by formula", "memory, MiB per rank", "against one rank"],
        rows(contenders, arguments, size),
    )
    table.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
