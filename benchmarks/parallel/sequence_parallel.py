"""Sequence parallelism on 2 CPU ranks: tokens per second and memory of a step at growing length, against whole sequences and DeepSpeed.

    python -m benchmarks.parallel.sequence_parallel --json benchmarks/results/sequence_parallel.json
    python -m benchmarks.parallel.sequence_parallel --peer-python /path/to/venv-with-deepspeed/bin/python
    python -m benchmarks.parallel.sequence_parallel --rounds 1 --steps 1 --lengths 256 512        # quick check

Every contender keeps its processes; a round times each in turn, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.processes import RankProcesses
from benchmarks.common.tables import ResultTable

WORKER = Path(__file__).with_name("sequence_parallel_worker.py")
WORLD = 2
TITLES = {"hf_zero": "hf_zero, slices", "deepspeed": "DeepSpeed Ulysses, slices", "whole": "hf_zero, whole sequences"}
PEERS = ("deepspeed", "fsdp2")
TEXT = (
    "A Llama ({layers} layers, {width} wide, {heads} heads, half as many key heads, vocabulary {vocab}, fp32) at ZeRO stage 1 on 2 gloo "
    "ranks of one thread. Slices: both ranks train on one sequence; whole sequences: each rank on its own. Memory is what tensors of a "
    "step add at their peak on a rank, by torch's own record. Medians of {rounds} interleaved rounds of {steps} steps."
)


@dataclass
class Contender:
    """One package; by length: seconds per step, one entry per round, and bytes."""

    package: str
    world: int = WORLD
    ranks: RankProcesses | None = None
    seconds: dict[int, list[float]] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    failed: str = ""

    def start(self, python: str, size: dict[str, int]) -> None:
        """Build the model on both ranks; record the error of a peer that fails."""
        try:
            self.ranks = RankProcesses(self.package, WORKER, [self.package, size], self.world, python)
        except RuntimeError as error:
            if self.package not in PEERS:
                raise
            lines = [line for line in str(error).strip().splitlines() if "Error" in line] or str(error).strip().splitlines()
            self.failed = lines[-1].removeprefix("[rank0]: ").removeprefix("[rank1]: ")[:160]

    def time(self, length: int, steps: int) -> None:
        """Add the seconds per step of the slower rank."""
        answers = self.ranks.ask(steps=steps, length=length)  # type: ignore[union-attr]
        self.seconds.setdefault(length, []).append(max(answer["seconds"] for answer in answers))

    def weigh(self, length: int) -> None:
        """Record the bytes of the rank that needs more."""
        self.peaks[length] = max(answer["peak"] for answer in self.ranks.ask(peak=True, length=length))  # type: ignore[union-attr]

    def count(self, length: int) -> None:
        """Record the bytes that attention of the rank with more sends in a step."""
        self.sent[length] = max(answer["sent"] for answer in self.ranks.ask(sent=True, length=length))  # type: ignore[union-attr]

    def tokens_per_second(self, length: int, place: int) -> float:
        """Return the tokens per second of all ranks in one round."""
        return length * (WORLD if self.package == "whole" else 1) / self.seconds[length][place]


def measure(contenders: list[Contender], arguments: argparse.Namespace) -> None:
    """Time the contenders in rotating order, length by length."""
    running = [one for one in contenders if not one.failed]
    for length in arguments.lengths:
        for one in running:
            one.ranks.ask(steps=1, length=length)  # type: ignore[union-attr]
            one.weigh(length)
        for index in range(arguments.rounds):
            shift = index % len(running)
            for one in running[shift:] + running[:shift]:
                one.time(length, arguments.steps)
        print(length, "  ".join(f"{one.package} {statistics.median(one.seconds[length]):.3f} s" for one in running), file=sys.stderr)


def rows(contenders: list[Contender], lengths: list[int], rounds: int) -> list[list[str]]:
    """Return the cells of the table."""
    ours = contenders[0]
    found = []
    for length in lengths:
        for one in contenders:
            if one.failed:
                found.append([f"{length} tokens: {TITLES[one.package]}", "does not run", one.failed, "", ""])
                continue
            rates = [one.tokens_per_second(length, place) for place in range(rounds)]
            ratios = [mine / ours.tokens_per_second(length, place) for place, mine in enumerate(rates)]
            spread = "" if one is ours else f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            memory = "" if one is ours else f"{one.peaks[length] / ours.peaks[length]:.2f}"
            cells = [f"{statistics.median(rates):.0f}", spread, f"{one.peaks[length] / 2**20:.1f}", memory]
            found.append([f"{length} tokens: {TITLES[one.package]}", *cells])
    return found


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model's size to ``parser``."""
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2048)


def size_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the model's size as the ranks read it."""
    return {name: getattr(arguments, name) for name in ("layers", "width", "heads", "vocab")} | {"longest": max(arguments.lengths)}


@contextmanager
def started(contenders: list[Contender], arguments: argparse.Namespace) -> Iterator[None]:
    """Run the ranks of all contenders in a context; ``PEERS`` run under ``--peer-python``."""
    try:
        for one in contenders:
            one.start(arguments.peer_python if one.package in PEERS else sys.executable, size_of(arguments))
        yield
    finally:
        for one in contenders:
            if one.ranks is not None:
                one.ranks.stop()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    add_size_flags(parser)
    parser.add_argument("--peer-python", help="Python of a venv with DeepSpeed and transformers")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    contenders = [Contender(name) for name in ("hf_zero", "whole", *(["deepspeed"] if arguments.peer_python else []))]
    with started(contenders, arguments):
        measure(contenders, arguments)
    table = ResultTable(
        "Sequence parallelism",
        "python -m benchmarks.parallel.sequence_parallel" + (" --peer-python PYTHON" if arguments.peer_python else ""),
        TEXT.format(**size_of(arguments), rounds=arguments.rounds, steps=arguments.steps),
        ["sequences", "tokens/s", "against slices of hf_zero", "peak of a step, MiB per rank", "against slices of hf_zero"],
        rows(contenders, arguments.lengths, arguments.rounds),
    )
    table.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
