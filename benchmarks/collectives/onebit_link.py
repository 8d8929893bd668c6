"""Training over a slow network: DDP, its compression hooks, ZeRO-1 and 1-bit Adam, each rank behind a real, limited link.

python -m benchmarks.collectives.onebit_link --json benchmarks/results/onebit_link.json --plot docs/onebit-link.png

Needs root (network namespaces, see slow_network.py). The processes of a contender live through all speeds. The time of a step is the
slowest rank's median; bytes are counted by the rank's network interface.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.collectives.slow_network import BURSTS, LINK, Namespaces, sent_bytes, slow_network, why_not
from benchmarks.common import figures
from benchmarks.common.processes import REPOSITORY
from benchmarks.common.tables import ResultTable

# GPT-2 with 24 M parameters, as in step_time.py.
SIZE = {"layers": 6, "width": 512, "heads": 8, "vocab": 8192, "length": 128, "batch": 2}
RATES = ("10gbit", "1gbit", "100mbit")  # fastest first, where warm-up steps are cheap
LENGTH = 5.0  # seconds to measure at one speed, in 1 to 7 steps
CONTENDERS = {
    "compute": "compute alone",
    "ddp": "DDP, fp32",
    "ddp-fp16": "DDP, fp16 hook",
    "ddp-powersgd": "DDP, PowerSGD hook",
    "zero-1": "hf_zero, stage 1",
    "onebit-warmup": "1-bit Adam, warm-up",
    "onebit": "1-bit Adam, compressed",
}
COLUMNS = ("contender", "ranks", "link", "s/step", "to compute alone", "to DDP", "MB sent a step", "DDP's bytes to its")
WARM_UP = 4
PORT = 29777


# ------------------------------------------------------------------------------------------------ one rank


def build_step(contender: str, model: Any) -> Any:
    """Return the training step of a contender."""
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.common.training import ADAMW, engine_loop, plain_loop

    if contender == "compute":
        return plain_loop(model)
    if contender.startswith("ddp"):
        # PowerSGD starts its second exchange of a bucket in the thread that ends the first. With several buckets in flight, gloo's ranks
        # start them in different orders and confuse them. One bucket has one order.
        buckets = {"bucket_cap_mb": 2**12} if contender == "ddp-powersgd" else {}
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **buckets)
        register_hook(wrapped, contender)
        return plain_loop(wrapped)
    import hf_zero

    params = {"lr": ADAMW["lr"], "betas": ADAMW["betas"], "eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
    optimizer: dict[str, Any] = {"type": "AdamW", "params": params}
    if contender.startswith("onebit"):
        optimizer = {"type": "OneBitAdam", "params": {**params, "freeze_step": 10**6 if contender == "onebit-warmup" else 2}}
    stage = 1 if contender == "zero-1" else 0
    config = {"train_micro_batch_size_per_gpu": SIZE["batch"], "zero_optimization": {"stage": stage}, "optimizer": optimizer}
    return engine_loop(hf_zero.initialize(model=model, config=config)[0])


def register_hook(model: Any, contender: str) -> None:
    """Register torch's own gradient compression, as its documentation describes."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if contender == "ddp-fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if contender == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def serve(contender: str) -> None:
    """Run steps on request until standard input ends; one line of JSON in, one out."""
    import torch
    import torch.distributed as dist

    from benchmarks.common.training import build_model, make_batch

    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries print to standard output
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = build_step(contender, build_model("gpt2", SIZE).train())
    answers.write('{"ready": true}\n')
    done = 0
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        batches = [make_batch(done + index, dist.get_rank(), SIZE) for index in range(count)]
        dist.barrier()
        before, ends = sent_bytes(), [time.perf_counter()]
        for batch in batches:
            loss = step(batch)
            ends.append(time.perf_counter())
        dist.barrier()
        seconds = statistics.median(end - start for start, end in pairwise(ends))
        done += count
        answers.write(json.dumps({"seconds": seconds, "bytes": (sent_bytes() - before) / count, "loss": loss}) + "\n")


# ------------------------------------------------------------------------------------------------ all ranks


@dataclass(frozen=True)
class Measured:
    """Measurements of a contender at one speed."""

    contender: str
    ranks: int
    rate: str
    seconds: float
    nbytes: float
    loss: float


class Ranks:
    """The processes of one contender, one in each namespace."""

    def __init__(self, network: Namespaces, contender: str) -> None:
        world = len(network.names)
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": network.address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": LINK}
        shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "LOCAL_RANK": "0"}
        words = [sys.executable, "-m", "benchmarks.collectives.onebit_link", "--rank-of", contender]
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(world)]  # noqa: SIM115  # closed by end()
        self.processes = [
            subprocess.Popen(
                network.command(rank, words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors[rank],
                text=True,
                env={**os.environ, **shared, "RANK": str(rank)},
            )
            for rank in range(world)
        ]
        self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self.processes]  # type: ignore[union-attr]
        if not all(lines):
            self.errors[ended := lines.index("")].seek(0)
            raise RuntimeError(f"rank {ended} ended early:\n" + "".join(self.errors[ended].readlines()[-20:]))
        return [json.loads(line) for line in lines]

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Run ``count`` steps; return every rank's answer."""
        for process in self.processes:
            process.stdin.write(json.dumps({"steps": count}) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        return self._answers()

    def end(self) -> None:
        """End the processes, including hanging ones."""
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for errors in self.errors:
            errors.close()


def slowest_of(answers: list[dict[str, Any]]) -> float:
    """Return the seconds per step of the slowest rank."""
    return max(float(answer["seconds"]) for answer in answers)


def measure(contender: str, network: Namespaces, rates: list[str]) -> list[Measured]:
    """Measure one contender at every speed."""
    network.limit("10gbit")
    ranks = Ranks(network, contender)
    found = []
    try:
        ranks.steps(WARM_UP)
        for rate in rates:
            network.limit(rate)
            answers = ranks.steps(1)
            more = min(6, int(LENGTH / slowest_of(answers)))
            answers = ranks.steps(more) if more else answers
            slowest, most = slowest_of(answers), max(answer["bytes"] for answer in answers)
            found.append(Measured(contender, len(network.names), rate, slowest, most, answers[0]["loss"]))
            print(f"{CONTENDERS[contender]:24} {len(network.names)} ranks {rate:>8}: {slowest:7.3f} s, {most / 1e6:8.2f} MB", flush=True)
    finally:
        ranks.end()
    return found


@dataclass(frozen=True)
class Speeds:
    """Speeds of one thread in GB/s: every number that is read or written counts once, single bits do not count."""

    add: float
    pack: float
    average: float
    unpack: float

    def __str__(self) -> str:
        rest = {"packing": self.pack, "averaging what two ranks sent": self.average, "unpacking and updating": self.unpack}
        return f"an in-place addition runs at {self.add:.1f} GB/s, " + ", ".join(
            f"{name} at {speed:.1f} ({speed / self.add:.2f} x)" for name, speed in rest.items()
        )


def packing() -> Speeds:
    """Measure how fast the passes of a compressed step run through memory, beside an in-place addition."""
    import torch

    from hf_zero.native.chunks import Fresh, MoveRule, Sent, Target, build_chunks
    from hf_zero.native.codes import compress, recompress, take

    torch.set_num_threads(1)
    numel = 24 * 2**20
    table = build_chunks([(0, numel)], numel, torch.device("cpu"))
    error, momentum, grad, master = (torch.randn(numel) for _ in range(4))
    variance = torch.rand(numel)
    bits, scales = torch.empty(numel // 8, dtype=torch.uint8), torch.empty(table.chunks)
    fresh, rule = Fresh(momentum, grad, 0.9, 0.1), MoveRule(0.99, 0.37, 1e-6, -3e-4)
    target = Target(0, 0, table.chunks, momentum, master, variance, rule)

    def speed(vectors: int, call: Any) -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 4 * vectors * numel / min(times) / 1e9

    add = speed(3, lambda: master.add_(grad))
    pack = speed(4, lambda: compress(error, table, bits, scales, None, fresh))
    sent = Sent(torch.stack([bits, ~bits]), torch.stack([scales, scales]))
    average = speed(2, lambda: recompress(error, table, sent, bits, scales))
    return Speeds(add, pack, average, speed(4, lambda: take(table, bits, scales, [target])))


# ------------------------------------------------------------------------------------------------ results


def rows_of(found: list[Measured]) -> list[list[str]]:
    """Return the table's rows, with ratios to compute alone and to DDP at the same speed."""
    known = {(entry.contender, entry.ranks, entry.rate): entry for entry in found}
    rows = []
    for entry in sorted(found, key=lambda one: (one.ranks, list(BURSTS).index(one.rate), list(CONTENDERS).index(one.contender))):
        alone, ddp = known.get(("compute", entry.ranks, entry.rate)), known.get(("ddp", entry.ranks, entry.rate))
        rows.append(
            [
                CONTENDERS[entry.contender],
                str(entry.ranks),
                entry.rate,
                f"{entry.seconds:.3f}",
                f"{entry.seconds / alone.seconds:.2f} x" if alone else "",
                f"{ddp.seconds / entry.seconds:.2f} x as fast" if ddp else "",
                f"{entry.nbytes / 1e6:.2f}",
                f"{ddp.nbytes / entry.nbytes:.1f}" if ddp and entry.contender != "compute" else "",
            ]
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--raw", type=Path, help="keep single measurements here, and add to those that are there")
    parser.add_argument("--json", type=Path, help="write the result table")
    parser.add_argument("--plot", type=Path, help="draw it (needs matplotlib)")
    parser.add_argument("--rank-of", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        serve(arguments.rank_of)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    if why_not():
        print(f"cannot measure here: {why_not()}", file=sys.stderr)
        return 1
    found = [Measured(**entry) for entry in json.loads(arguments.raw.read_text())] if arguments.raw and arguments.raw.exists() else []
    for world in arguments.ranks:
        with slow_network(world) as network:
            for contender in arguments.contenders:
                fresh = measure(contender, network, [rate for rate in RATES if rate in arguments.rates])
                replaced = {(entry.contender, entry.ranks, entry.rate) for entry in fresh}
                found = [entry for entry in found if (entry.contender, entry.ranks, entry.rate) not in replaced] + fresh
                if arguments.raw:
                    arguments.raw.write_text(json.dumps([vars(entry) for entry in found]))
    speeds = packing()
    text = (
        "GPT-2 (24 M parameters, fp32, batch 2 x 128 tokens a rank) with every rank in a network namespace behind a link of the given "
        "speed (`tc tbf` both ways). A step is as long as the slowest rank's median; bytes are counted by the interface of a rank, "
        f"headers included. PowerSGD (rank 1) has one bucket. Of one thread, {speeds}."
    )
    command = (
        "python -m benchmarks.collectives.onebit_link --json benchmarks/results/onebit_link.json --plot docs/onebit-link.png   # as root"
    )
    figure = arguments.plot.name if arguments.plot else ""
    table = ResultTable("1-bit Adam over a slow network", command, text, COLUMNS, rows_of(found), figure)
    table.print()
    print(speeds)
    if arguments.json:
        table.save(arguments.json)
    if arguments.plot:
        figures.onebit_link(asdict(table), arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
