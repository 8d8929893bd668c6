"""Time one Adam step over host memory: hf_zero, torch's plain and fused Adam, and DeepSpeedCPUAdam, in the same rounds.

python -m benchmarks.offload.host_adam [--peer-python /path/to/venv/bin/python] [--save]
python -m benchmarks.offload.host_adam --count 100000 --rounds 1        # quick check

Every contender has a process of its own, with tensors of the same size. In a round each takes one timed step in turn, after an in-place
addition that measures the memory bandwidth at that moment. `fp32`: gradient and parameter in fp32. `mixed`: bf16 gradient scaled by a
factor (unscale and clip), fp32 masters and moments, bf16 parameter written; the peers need a cast before and one after. `bf16 moments`:
like mixed, with moments in bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.processes import REPOSITORY, RankProcesses, open_answers

CASES = ("fp32", "mixed", "bf16 moments")
CONTENDERS = ("hf_zero", "torch fused", "torch plain", "deepspeed")
# Bytes that a step must move per parameter: each tensor once in, and once out if it is written.
BYTES = {"fp32": 28, "mixed": 28, "bf16 moments": 20}
FACTOR = 0.5
CACHED, CACHED_STEPS = 1 << 17, 300


def make_step(contender: str, case: str, count: int) -> Callable[[], None] | None:
    """Return a function that takes one step; None where the contender has no such step."""
    master = torch.nn.Parameter(torch.randn(count) * 0.02, requires_grad=True)
    grad = torch.randn(count) if case == "fp32" else torch.randn(count, dtype=torch.bfloat16)
    low = None if case == "fp32" else torch.zeros(count, dtype=torch.bfloat16)
    if contender == "hf_zero":
        from hf_zero.ops import HostAdam

        moments = torch.bfloat16 if case == "bf16 moments" else torch.float32
        ours = HostAdam([master], lr=1e-4, weight_decay=0.01, moment_dtype=moments)
        return lambda: ours.update([master], [grad], [low], FACTOR if low is not None else 1.0)
    if case == "bf16 moments":
        return None
    if contender == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        peer: torch.optim.Optimizer = DeepSpeedCPUAdam([master], lr=1e-4, weight_decay=0.01)
    else:
        kind = {"fused": True} if contender == "torch fused" else {"foreach": False}
        peer = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.01, **kind)
    if low is None:
        master.grad = grad
        return lambda: _ignore(peer.step())
    wide = torch.zeros(count)
    master.grad = wide

    def mixed() -> None:
        torch.mul(grad, FACTOR, out=wide)  # one pass: cast and unscale
        peer.step()
        low.copy_(master.detach())

    return mixed


def _ignore(_: object) -> None:
    """Discard a step's result."""


def serve(contender: str, count: int) -> None:
    """Answer requests: a case, threads and parameters prepare a step; an empty request takes one step.

    The answer to a step is the seconds of the addition before it and its own seconds.
    """
    answers = open_answers()
    stream = torch.zeros(count)
    step: Callable[[], None] | None = None
    parameters = count
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request:
            parameters = request["parameters"]
            torch.set_num_threads(request["threads"])
            step, answer = None, {"error": "has no such step"}
            try:
                step = make_step(contender, request["case"], parameters)
            except Exception as problem:  # the peer cannot be built or imported here
                answer = {"error": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}
            if step is not None:
                step()
                answer = {}
        elif step is not None:
            with torch.no_grad():
                start = time.perf_counter()
                stream.add_(1.0)
                if parameters <= CACHED:  # load the tensors into the cache again
                    step()
                middle = time.perf_counter()
                step()
                answer = {"seconds": [middle - start, time.perf_counter() - middle]}
        answers.write(json.dumps(answer) + "\n")


class Server:
    """The process of one contender."""

    def __init__(self, python: str, contender: str, count: int) -> None:
        self.process = RankProcesses(
            contender, Path(__file__), ["--serve", contender, str(count)], 1, python, OMP_NUM_THREADS=os.cpu_count()
        )
        self.times: list[tuple[float, float]] = []

    def prepare(self, case: str, threads: int, count: int) -> str:
        """Create the tensors; return the reason why the step cannot run, or ""."""
        self.times = []
        error: str = self.process.ask(case=case, threads=threads, parameters=count)[0].get("error", "")
        return error

    def step(self) -> None:
        addition, own = self.process.ask()[0]["seconds"]
        self.times.append((addition, own))


def measure(servers: dict[str, Server], arguments: argparse.Namespace, case: str, threads: int) -> list[list[str]]:
    """Return the rows of one case with one number of threads."""
    errors = {contender: server.prepare(case, threads, arguments.count) for contender, server in servers.items()}
    running = {contender: server for contender, server in servers.items() if not errors[contender]}
    for _ in range(arguments.rounds):
        for server in running.values():
            server.step()
    rows = [[f"{contender}, {case}", error, "", "", ""] for contender, error in errors.items() if error not in ("", "has no such step")]
    for contender, server in running.items():
        steps = [step for _, step in server.times]
        # An addition reads and writes 4 bytes each; a copy loop would count less, since writing reads the cache line first.
        shares = [BYTES[case] / step / (8 / addition) for addition, step in server.times]
        against = [own / ours for own, (_, ours) in zip(steps, servers["hf_zero"].times, strict=True)]
        bandwidth = statistics.median(8 * arguments.count / addition / 1e9 for addition, _ in server.times)
        cells = [f"{statistics.median(steps) / arguments.count * 1e9:.3f}", f"{bandwidth:.1f}", f"{100 * statistics.median(shares):.0f} %"]
        label = f"{contender}, {case}, {threads} thread{'s' if threads > 1 else ''}"
        rows.append([label, *cells, f"{statistics.median(against):.2f}"])
    return rows


def in_cache(server: Server, case: str) -> list[str]:
    """Return the row of a step without memory cost: all tensors in the processor's cache, the best of many steps."""
    server.prepare(case, 1, CACHED)
    for _ in range(CACHED_STEPS):
        server.step()
    best = min(step for _, step in server.times)
    return [f"hf_zero, {case}, 1 thread, in cache", f"{best / CACHED * 1e9:.3f}", "", "", ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64 * 2**20, help="parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peer-python", default="", help="Python of a venv with DeepSpeed, which builds its kernel on first use")
    parser.add_argument("--save", action="store_true", help="keep the result for python -m tools.render")
    arguments = parser.parse_args()
    from benchmarks.common.tables import ResultTable
    from hf_zero.native import status

    pythons = dict.fromkeys(CONTENDERS, sys.executable) | {"deepspeed": arguments.peer_python}
    servers = {contender: Server(python, contender, arguments.count) for contender, python in pythons.items() if python}
    rows = [row for threads in arguments.threads for case in CASES for row in measure(servers, arguments, case, threads)]
    rows += [in_cache(servers["hf_zero"], case) for case in CASES]
    for server in servers.values():
        server.process.stop()
    table = ResultTable(
        title="Adam in host memory",
        command="python -m benchmarks.offload.host_adam --peer-python /path/to/venv/bin/python --save",
        text=f"One AdamW step over {arguments.count / 2**20:.0f} Mi parameters; median of {arguments.rounds} rounds in which every "
        f"contender steps once. Kernels: {status().isa or 'torch reference'}. **Bandwidth**: of an in-place addition just before each "
        "step; **share**: what a step (28 bytes a parameter, 20 with bf16 moments) reaches of it. **Mixed**: bf16 gradient, unscale and "
        "clip factor, bf16 parameter written; the peers cast before and after, hf_zero does all in one pass. **Ratio** is the "
        "contender's time to hf_zero's in the same round. **In cache**: the same step over 128 Ki parameters, best of 300: what the "
        "arithmetic takes where "
        "memory costs nothing, and the least that a thread can reach.",
        columns=["contender", "ns per parameter", "bandwidth GB/s", "share", "ratio"],
        rows=rows,
    )
    table.print()
    if arguments.save:
        table.save(REPOSITORY / "benchmarks" / "results" / "host_adam.json")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
        sys.exit(0)
    sys.exit(main())
