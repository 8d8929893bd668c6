"""Tensor parallelism on CPU ranks: step time against DeepSpeed's AutoTP and torch's DTensor; bytes sent and held against the formulas.

    python -m benchmarks.parallel.tensor_parallel                                                   # Llama and GPT-2 shape, 2 gloo ranks
    python -m benchmarks.parallel.tensor_parallel --ranks 4                                         # TP 4, and TP 2 x ZeRO-1
    python -m benchmarks.parallel.tensor_parallel --peer-python /path/to/venv-with-deepspeed/bin/python
    python -m benchmarks.parallel.tensor_parallel --accounts                                        # bytes only
    python -m benchmarks.parallel.tensor_parallel --rounds 2 --steps 1 --layers 2                   # quick check

Every contender keeps its processes; a round times each in turn, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.processes import RankProcesses
from benchmarks.common.tables import ResultTable

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
SIZES = {"layers": 4, "width": 512, "heads": 8, "vocab": 8192, "length": 128, "batch": 4}
ACCOUNT_SIZES = {"layers": 8, "width": 512, "heads": 8, "vocab": 4096, "length": 32, "batch": 1}
TITLES = {"hf_zero": "hf_zero", "deepspeed": "DeepSpeed AutoTP", "dtensor": "torch DTensor"}


@dataclass
class Contender:
    """One package at one group size: seconds per step, one entry per round."""

    package: str
    shape: str
    world: int
    tp: int
    stage: int
    ranks: RankProcesses | None = None
    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")
    failed: str = ""

    @property
    def name(self) -> str:
        """Return the name of the contender's row."""
        copies = self.world // self.tp
        over = "" if copies == 1 else (" x FSDP2" if self.package == "dtensor" else f" x ZeRO-{self.stage}")
        return f"{self.shape}, TP {self.tp}{over}: {TITLES[self.package]}"

    def start(self, python: str, size: dict[str, int]) -> None:
        """Build the model on every rank; record the error of a peer that fails."""
        contender = {"package": self.package, "tp": self.tp, "stage": self.stage}
        try:
            self.ranks = RankProcesses(self.name, WORKER, [contender, self.shape, size], self.world, python)
            self.run(1)
        except RuntimeError as error:
            if self.package == "hf_zero":
                raise
            print(error, file=sys.stderr)
            self.failed = last_error(str(error))
            self.stop()

    def run(self, steps: int) -> float:
        """Run ``steps`` steps; return the seconds per step of the slowest rank."""
        answers = self.ranks.ask(steps=steps)  # type: ignore[union-attr]
        self.loss = answers[0]["loss"]
        return max(answer["seconds"] for answer in answers)

    def stop(self) -> None:
        """End the contender's processes."""
        if self.ranks is not None:
            self.ranks.stop()
            self.ranks = None


def last_error(log: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line or "NotImplemented" in line or "parallelize" in line]
    return (lines[-1] if lines else log.strip().splitlines()[-1])[:120].replace("|", "/")


def contenders(ranks: int, peer: bool) -> list[list[Contender]]:
    """Return groups of contenders that are timed against each other on that many ranks; hf_zero is first in each."""
    packages = ["hf_zero", *(["deepspeed"] if peer else []), "dtensor"]
    cells = {2: [("llama", 2, 2, 0), ("gpt2", 2, 2, 0)], 4: [("llama", 4, 4, 0), ("llama", 4, 2, 1)]}
    return [[Contender(package, *cell) for package in packages] for cell in cells[ranks]]


def measure(group: list[Contender], arguments: argparse.Namespace, size: dict[str, int]) -> None:
    """Time the contenders of one group in rotating order."""
    try:
        for one in group:
            print(f"building {one.name}", file=sys.stderr)
            one.start(arguments.peer_python if one.package == "deepspeed" else sys.executable, size)
        running = [one for one in group if not one.failed]
        for one in running:
            one.run(arguments.warmup)
        for index in range(arguments.rounds):
            shift = index % len(running)
            for one in running[shift:] + running[:shift]:
                one.seconds.append(one.run(arguments.steps))
            print("  ".join(f"{one.name} {one.seconds[-1]:.3f}" for one in running), file=sys.stderr)
    finally:
        for one in group:
            one.stop()


def time_rows(groups: list[list[Contender]]) -> list[list[str]]:
    """Return the cells of the table of times."""
    rows = []
    for group in groups:
        ours = group[0].seconds
        for one in group:
            if one.failed:
                rows.append([one.name, "does not run", "", "", one.failed])
                continue
            ratios = [mine / theirs for mine, theirs in zip(ours, one.seconds, strict=True)]
            spread = "" if one is group[0] else f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            rows.append([one.name, f"{statistics.median(one.seconds):.4f}", f"{min(one.seconds):.4f}", spread, f"{one.loss:.6f}"])
    return rows


# ------------------------------------------------------------------------------------------------ bytes against the formulas


def parameters(size: dict[str, int], tp: int) -> int:
    """Return the elements on one rank of a Llama whose matrices are all split and whose norms are whole."""
    width, inner = size["width"], size["width"] * 8 // 3 // 32 * 32
    matrices = 2 * size["vocab"] * width + size["layers"] * (3 * width * width + 3 * width * inner)
    return matrices // tp + (2 * size["layers"] + 1) * width


def model_bytes(size: dict[str, int], tp: int) -> int:
    """Return the bytes a rank sends over the model axis in a bf16 step: sums around attention and MLP, embedding, head; logits; norm."""
    tokens = size["batch"] * size["length"]
    activation, logits = 2 * tokens * size["width"], 2 * tokens * size["vocab"] // tp
    sums = 4 * size["layers"] + 2
    return (sums * 2 * (tp - 1) * activation // tp + (tp - 1) * logits + 2 * (tp - 1) * 8 // tp) if tp > 1 else 0


def data_bytes(size: dict[str, int], tp: int, stage: int, copies: int) -> int:
    """Return the bytes that a rank sends over the data axis in a bf16 step; stage 0 sums in fp32."""
    return (8 if stage == 0 else 4) * parameters(size, tp) * (copies - 1) // copies


def state_bytes(numel: int, stage: int, copies: int) -> int:
    """Return the bytes of parameters, masters and moments on a rank."""
    return {0: 14 * numel, 3: 14 * numel // copies}.get(stage, 2 * numel + 12 * numel // copies)


def peak_bound(numel: int, stage: int, copies: int) -> int:
    """Return the bytes of state and all gradients: fp32 sums (of the shard, from stage 1), sent 16-bit ones, and gathered stage 3
    parameters.
    """
    sums, moving = 4 * numel // (copies if stage else 1), 2 * numel if stage else 0
    gathered = 2 * numel if stage == 3 and copies > 1 else 0
    return state_bytes(numel, stage, copies) + sums + moving + gathered


def account_rows(size: dict[str, int]) -> list[list[str]]:
    """Return the cells of the table of bytes; every number except the peak must equal its formula."""
    rows = []
    for world in (2, 4):
        ranks = RankProcesses("account", WORKER, [{"package": "account"}, "llama", size], world)
        try:
            for tp in (1, 2, 4):
                for stage in range(4) if tp <= world else ():
                    found = ranks.ask(tp=tp, stage=stage)[0]
                    rows.append(account_row(found, size, world, tp, stage))
        finally:
            ranks.stop()
    return rows


def account_row(found: dict[str, int], size: dict[str, int], world: int, tp: int, stage: int) -> list[str]:
    """Return one row: measured / formula."""
    numel, copies = parameters(size, tp), world // tp
    if found["numel"] != numel:
        raise AssertionError(f"{found['numel']} elements on a rank, the formula says {numel}")

    def against(measured: int, expected: int) -> str:
        return f"{measured / 2**20:.2f} / {expected / 2**20:.2f}"

    return [
        f"{world}, TP {tp}, ZeRO-{stage}",
        against(found["model_bytes"], model_bytes(size, tp)),
        against(found["data_bytes"], data_bytes(size, tp, stage, copies)),
        against(found["held_bytes"], state_bytes(numel, stage, copies)),
        against(found["peak_bytes"], peak_bound(numel, stage, copies)),
    ]


# ------------------------------------------------------------------------------------------------ the command


def shape_text(size: dict[str, int]) -> str:
    return f"{size['layers']} layers, width {size['width']}, vocabulary {size['vocab']}, batch {size['batch']} x {size['length']}"


def times(arguments: argparse.Namespace, size: dict[str, int]) -> ResultTable:
    """Measure step times; return the table."""
    groups = contenders(arguments.ranks, bool(arguments.peer_python))
    for group in groups:
        measure(group, arguments, size)
    text = (
        f"{shape_text(size)} per copy of the model, fp32, `AdamW(fused=True)`, gloo, one thread per rank; {arguments.rounds} interleaved "
        f"rounds of {arguments.steps} steps. **Ratio**: median (and range) of hf_zero's time to that contender's; below 1 hf_zero is "
        "faster. DTensor's plan is written by hand and splits the same layers. `parallelize_module` has no plan for GPT-2's `Conv1D`."
    )
    command = f"python -m benchmarks.parallel.tensor_parallel --ranks {arguments.ranks}" + (
        " --peer-python /path/to/venv/bin/python" if arguments.peer_python else ""
    )
    columns = ["contender", "median s/step", "fastest", "hf_zero's time to its", "loss"]
    return ResultTable(f"Tensor parallelism: step time on {arguments.ranks} ranks", command, text, columns, time_rows(groups))


def accounts() -> ResultTable:
    """Measure bytes; return the table."""
    size = ACCOUNT_SIZES
    text = (
        f"Llama shape, {shape_text(size)}, bf16 with fp32 masters and Adam; MiB of one rank, measured / by formula. n: elements on a rank "
        "(matrices divided by the TP ranks t, norms whole); d = ranks / t; a = 2 x tokens x width bytes; L layers. **Model axis**: "
        "4 L + 2 sums of a at 2 (t-1)/t each, and the gather of the logits. **Data axis**: 8 n (d-1)/d at stage 0, which sums in fp32; "
        "4 n (d-1)/d at 1, 2 and 3, whose blocks stay gathered from forward to backward where there is room. **State**: 14 n, "
        "2 n + 12 n / d, 14 n / d. **Peak** of all tensors within a step against the state and all gradients at once (stage 3: and all "
        "gathered parameters), without activations."
    )
    columns = ["ranks, TP, stage", "model axis", "data axis", "state", "peak"]
    command = "python -m benchmarks.parallel.tensor_parallel --accounts"
    return ResultTable("Tensor parallelism: bytes per rank and step", command, text, columns, account_rows(size))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--accounts", action="store_true", help="bytes against the formulae instead of times")
    parser.add_argument("--peer-python", help="Python of a venv with deepspeed")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    table = accounts() if arguments.accounts else times(arguments, {name: getattr(arguments, name) for name in SIZES})
    table.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
