"""Ways to reduce and gather a unit over gloo, by number of ranks: processor time of all ranks, messages, bytes, connections.

    python -m benchmarks.collectives.gloo_ranks --json benchmarks/results/gloo_ranks.json
    python -m benchmarks.collectives.gloo_ranks --ranks 4 --kib 16 --rounds 1       # quick check

All ranks share the processors of one machine, so seconds are no measure of a network. The processor time of all ranks together and the
bytes sent are measured instead. They decide at how many ranks ``comm/back_end.py`` switches from direct exchange to all-to-alls.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.common.processes import free_port
from benchmarks.common.tables import ResultTable

WAYS = ("reduce, direct", "reduce, all-to-all", "reduce, gloo", "gather, direct", "gather, gloo", "gather, all-to-all")
TEXT = """Milliseconds of processor time of all ranks together for one unit of so many KiB, fp32; the least of {rounds} rounds; one
machine, one thread per rank. **direct**: a send and a receive for each peer, sums in rank order. **all-to-all**: one call, the same bits.
**gloo**: its own reduce-scatter (other bits) and ring. hf_zero gathers directly, and reduces directly up to 16 ranks, by all-to-all
above."""


def _rank(rank: int, world: int, port: int, sizes: list[int], rounds: int, answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = {}
    for kib in sizes:
        ways = _ways(kib * 256 // world * world)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                taken[name].append(_processor_seconds(run))
        found[kib] = {name: min(seconds) for name, seconds in taken.items()}
    files = len(os.listdir("/proc/self/fd"))
    if rank == 0:
        answers.put((world, found, files))
    dist.barrier()
    dist.destroy_process_group()


def _processor_seconds(run: Callable[[], object]) -> float:
    """Return the processor seconds of all ranks together, once; threads that are still sending get a moment to finish."""
    dist.barrier()
    time.sleep(0.02)
    start = time.process_time()
    for _ in range(2):
        run()
    time.sleep(0.02)
    taken = torch.tensor([(time.process_time() - start) / 2])
    dist.all_reduce(taken)
    return taken.item()


def _ways(numel: int) -> dict[str, Callable[[], object]]:
    from hf_zero.comm.direct_exchange import AllToAllCollectives, GlooCollectives
    from hf_zero.comm.topology import build_topology

    axis = build_topology()
    direct, swapped = GlooCollectives(axis), AllToAllCollectives(axis)
    full, shard = torch.ones(numel), torch.ones(numel // axis.world)
    part = torch.empty_like(shard)
    ways: tuple[Callable[[], object], ...] = (
        lambda: direct.reduce_scatter(full, torch.float32, "unit").wait(),
        lambda: swapped.reduce_scatter(full, torch.float32, "unit").wait(),
        lambda: dist.reduce_scatter_tensor(part, full),
        lambda: direct.all_gather(full, shard, "unit").wait(),
        lambda: dist.all_gather_into_tensor(full, shard),
        lambda: dist.all_to_all_single(full, shard.repeat(axis.world)),
    )
    return dict(zip(WAYS, ways, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--kib", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="keep the table in this file, which python -m tools.render reads")
    arguments = parser.parse_args()
    answers = mp.get_context("fork").SimpleQueue()
    rows = []
    for world in arguments.ranks:
        mp.start_processes(_rank, (world, free_port(), arguments.kib, arguments.rounds, answers), world, start_method="fork")
        _, found, files = answers.get()
        for kib, ways in found.items():
            rows.append([f"{world} ranks, {kib} KiB", *(f"{1000 * seconds:.1f}" for seconds in ways.values()), str(files)])
    command = " ".join(["python", "benchmarks/collectives/gloo_ranks.py", *sys.argv[1:]])
    columns = ("unit", *WAYS, "open files of a rank")
    result = ResultTable("Reductions and gathers on gloo", command, TEXT.format(rounds=arguments.rounds), columns, rows)
    result.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
