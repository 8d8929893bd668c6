"""Expert parallelism on CPU ranks: time, bytes sent and memory, against stage 3 without it, transformers' own and DeepSpeed's AutoEP.

    python -m benchmarks.parallel.experts --peer-python /path/to/venv-with-deepspeed/bin/python --json benchmarks/results/experts.json
    python -m benchmarks.parallel.experts --kinds mixtral --ranks 4
    python -m benchmarks.parallel.experts --kinds qwen3_moe --ranks 2 --json FILE           # a part; other rows of the file are kept
    python -m benchmarks.parallel.experts --untimed --json FILE                             # on a busy machine: bytes and memory alone
    python -m benchmarks.parallel.experts --rounds 1 --steps 1                              # quick check

Every contender keeps its processes; a round times each in turn, and ratios are taken within a round. Several Pythons for the peer are
several contenders, because AutoEP runs only with some versions of transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.processes import RankProcesses
from benchmarks.common.tables import ResultTable
from benchmarks.parallel.tensor_parallel import last_error

WORKER = Path(__file__).with_name("experts_worker.py")
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"kind": "mixtral", "experts": 8, "inner": 512, "choices": 2},
    "qwen3_moe": {"kind": "qwen3_moe", "experts": 64, "inner": 128, "choices": 4},
}
TEXT = (
    "A Mixtral (8 experts, {layers} layers, {width} wide) and a Qwen3-MoE (64 experts) in fp32 on {ranks} gloo ranks of one thread, one "
    "sequence of {length} tokens each, AdamW. Experts are divided over all ranks. Memory: tensors that a step adds at its peak. Sent: "
    "bytes that a rank sends in a step. Medians of {rounds} interleaved rounds of {steps} steps; ratios are relative to hf_zero at the "
    "same stage (FSDP2: stage 3), above 1 is slower or more. Theory: weights, moments, gradients, and what autograd saves in plain "
    "PyTorch. Empty: not measured."
)
NAME, SECONDS, RATIO = "", "s per step", "ratio (lowest-highest)"
COLUMNS = [NAME, SECONDS, RATIO, "MiB sent", "MiB held", "ratio", "of theory", "loss"]
Row = dict[str, str]


@dataclass
class Contender:
    """One package at one stage: seconds per step, one entry per round, and bytes."""

    package: str
    stage: int
    experts: int
    python: str = sys.executable
    versions: str = ""
    ranks: RankProcesses | None = None
    seconds: list[float] = field(default_factory=list)
    memory: int = 0
    least: int = 0
    sent: float = 0.0
    loss: float = 0.0
    failed: str = ""

    @property
    def title(self) -> str:
        """Return the contender's name in the table."""
        if self.package == "transformers":
            return "transformers' own (FSDP2)"
        name = "hf_zero" if self.package == "hf_zero" else f"DeepSpeed AutoEP ({self.versions})"
        stage = "any stage" if self.failed else f"stage {self.stage}"
        return f"{name}, {stage}{'' if self.experts > 1 else ' without'}"

    def start(self, world: int, size: dict[str, Any]) -> None:
        """Build the model on all ranks; record the error of a peer that fails."""
        try:
            self.ranks = RankProcesses(self.title, WORKER, [self.package, str(self.stage), str(self.experts), size], world, self.python)
            self.ask(steps=2)
            answers = self.ask(peak=True)
            self.memory = max(answer["peak"] + answer["resting"] for answer in answers)
            if self.package == "hf_zero" and self.experts > 1:
                self.least = max(answer["least"] for answer in self.ask(least=True))
        except RuntimeError as error:
            if self.package == "hf_zero":
                raise
            print(error, file=sys.stderr)
            self.failed = last_error(str(error))
            self.stop()

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Send a request to all ranks; return their answers."""
        assert self.ranks is not None
        return self.ranks.ask(**request)

    def time(self, steps: int) -> None:
        """Run ``steps`` steps; add the seconds per step of the slowest rank."""
        self.seconds.append(max(answer["seconds"] for answer in self.train(steps)))

    def train(self, steps: int) -> list[dict[str, Any]]:
        """Run ``steps`` steps; record the ranks' answers except the time, and return them."""
        answers = self.ask(steps=steps)
        self.sent = max(answer["sent"] for answer in answers)
        self.loss = statistics.mean(answer["loss"] for answer in answers)
        return answers

    def stop(self) -> None:
        """End the contender's processes."""
        if self.ranks is not None:
            self.ranks.stop()
            self.ranks = None


def versions_of(python: str) -> str:
    """Return the versions of DeepSpeed and transformers in an interpreter's environment."""
    ask = "from importlib.metadata import version as v; print(v('deepspeed') + ', transformers ' + v('transformers'))"
    return subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()


def contenders(world: int, peers_found: list[str]) -> list[Contender]:
    """Return the contenders: hf_zero with divided experts at three stages, hf_zero without, and the peers."""
    ours = [Contender("hf_zero", stage, world) for stage in (3, 2, 1)]
    peers = [Contender("deepspeed", stage, world, python, versions_of(python)) for python in peers_found for stage in (3, 2, 1)]
    return [*ours, Contender("hf_zero", 3, 1), Contender("transformers", 3, world), *peers]


def measure(kind: str, world: int, arguments: argparse.Namespace) -> list[Contender]:
    """Measure the contenders of one model, in rotating order; one after the other without times."""
    size = {**KINDS[kind], **{name: getattr(arguments, name) for name in ("layers", "width", "vocab", "length")}}
    found = contenders(world, arguments.peer_python)
    try:
        for one in list(found):
            if any(other.failed and other.versions == one.versions for other in found):
                found.remove(one)  # the peer does not run at any stage
                continue
            print(f"building {kind}, {world} ranks: {one.title}", file=sys.stderr)
            one.start(world, size)
            if arguments.untimed and not one.failed:
                one.train(arguments.rounds * arguments.steps)
                one.stop()
        running = [one for one in found if not one.failed]
        for index in range(0 if arguments.untimed else arguments.rounds):
            shift = index % len(running)
            for one in running[shift:] + running[:shift]:
                one.time(arguments.steps)
    finally:
        for one in found:
            one.stop()
    return found


def rows(kind: str, world: int, found: list[Contender]) -> list[Row]:
    """Return the rows of the table, by column; without times where none were measured."""
    with_experts = {one.stage: one for one in found if one.package == "hf_zero" and one.experts > 1}
    lines = []
    for one in found:
        first = with_experts[one.stage]
        name = {NAME: f"{kind}, {world} ranks: {one.title}"}
        if one.failed:
            lines.append({**dict.fromkeys(COLUMNS, ""), **name, SECONDS: "does not run", RATIO: one.failed})
            continue
        ratio = "" if one is first else f"{one.memory / first.memory:.2f}"
        of_least = f"{one.memory / (one.least or first.least):.2f}"
        numbers = [f"{one.sent / 2**20:.1f}", f"{one.memory / 2**20:.1f}", ratio, of_least, f"{one.loss:.5f}"]
        lines.append({**name, **dict(zip(COLUMNS[3:], numbers, strict=True)), **_times(one, first)})
    return lines


def _times(one: Contender, first: Contender) -> Row:
    if not one.seconds:
        return {}
    ratios = [mine / ours for mine, ours in zip(one.seconds, first.seconds, strict=True)]
    spread = "" if one is first else f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return {SECONDS: f"{statistics.median(one.seconds):.3f}", RATIO: spread}


def joined(path: Path | None, measured: list[Row]) -> list[list[str]]:
    """Return the rows of a file, updated with the new measurements, model by model."""
    stored: dict[str, Row] = {}
    if path is not None and path.exists():
        table = json.loads(path.read_text())
        stored = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    for line in measured:
        stored[line[NAME]] = {**stored.get(line[NAME], {}), **line}
    names = sorted(stored, key=_place)
    return [[stored[name].get(column, "") for column in COLUMNS] for name in names]


def _place(name: str) -> tuple[int, int]:
    kind, ranks = name.split(": ")[0].split(", ")
    return list(KINDS).index(kind), int(ranks.removesuffix(" ranks"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--peer-python", nargs="+", default=[], help="Python of a venv with DeepSpeed and transformers")
    parser.add_argument("--untimed", action="store_true", help="bytes, memory and losses alone; times of the file of --json stay")
    parser.add_argument("--json", type=Path, help="keep the table there; rows that are not measured now stay")
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    arguments = parse()
    measured: list[Row] = []
    for kind in arguments.kinds:
        for world in arguments.ranks:
            measured += rows(kind, world, measure(kind, world, arguments))
    cells = joined(arguments.json, measured)
    worlds = sorted({_place(row[0])[1] for row in cells})
    peers = " --peer-python PYTHON" if any("DeepSpeed" in row[0] for row in cells) else ""
    result = ResultTable(
        title="Expert parallelism",
        command="python -m benchmarks.parallel.experts" + peers,
        text=TEXT.format(**{**vars(arguments), "ranks": " and ".join(map(str, worlds))}),
        columns=COLUMNS,
        rows=cells,
    )
    result.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
