"""One layout at one size of the world, each in a process of its own. Started by ``scale.py``.

Cases are forked from a process that has imported everything and trained once, so that no case includes that time. Each is rank 0 of a
pretended world (see ``host_work_worker.py``). torch's ``fake`` back end accepts every collective and copies as many bytes as a real one
would return, N small copies for N ranks; the time of that is measured by issuing the same collectives alone, and subtracted.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.collectives.collective_counts import Collectives
from benchmarks.common.processes import open_answers
from benchmarks.steps.host_work_worker import ADAMW, Model, plain_loop

Step = Callable[[torch.Tensor], None]
Built = tuple[Any, Step]  # objects to keep alive, and the training step
RESHARD = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}  # a gather in forward and one in backward
NODE = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "hf_zero-1": {"stage": 1},
    "hf_zero-2": {"stage": 2},
    "hf_zero-3": {"stage": 3, **RESHARD},
    "hf_zero-1-node": {"stage": 1, "mics_shard_size": NODE},
    "hf_zero-3-node": {"stage": 3, **RESHARD, "mics_shard_size": NODE},
    "hf_zero-3-hpz": {"stage": 3, **RESHARD, "zero_hpz_partition_size": NODE},
}

# ------------------------------------------------------------------------------------------------ contenders


def fsdp2(model: Model, hybrid: bool) -> Built:
    """Return the step of ``fully_shard`` per block and around all; ``hybrid``: sharded inside nodes, with replicas across nodes (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (world // NODE, NODE), mesh_dim_names=("replicate", "shard"))
        if hybrid
        else init_device_mesh("cpu", (world,))
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    return model, plain_loop(model, 0.0)


def engine(model: Model, zero: dict[str, Any]) -> Built:
    """Return the step of an hf_zero engine."""
    import hf_zero

    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    made = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), **ADAMW), config=config)[0]

    def step(x: torch.Tensor) -> None:
        made.backward(made(x))
        made.step()

    return made, step


def build(name: str, blocks: int, width: int) -> Built:
    model = Model(blocks, width).train()
    return engine(model, LAYOUTS[name]) if name in LAYOUTS else fsdp2(model, hybrid=name.endswith("hsdp"))


# ------------------------------------------------------------------------------------------------ measuring


def times(name: str, blocks: int, width: int, steps: int) -> dict[str, float]:
    """Return the processor seconds of set-up and of a step, and the back end's part of each."""
    x = torch.ones(1, 4, width, dtype=torch.bfloat16)
    start = time.process_time()
    kept, step = build(name, blocks, width)
    setup = time.process_time() - start
    for _ in range(2):  # the first step learns the order and creates the moments
        step(x)
    taken = []
    for _ in range(steps):
        start = time.process_time()
        step(x)
        taken.append(time.process_time() - start)
    with Collectives() as seen:
        step(x)
    bare = seen.bare_seconds(2)
    del kept
    return {"setup": setup, "step": min(taken), "bare": bare, "rss": resident()}


def counts(name: str, blocks: int, width: int) -> dict[str, Any]:
    """Return the collectives of start-up and of a step, and the bytes that Python keeps for them, by the code that allocated them."""
    x = torch.ones(1, 4, width, dtype=torch.bfloat16)
    gc.collect()
    tracemalloc.start()
    first = Collectives()
    with first if name in LAYOUTS else contextlib.nullcontext():  # the record of FSDP2's 4096 pieces per parameter would take too long
        kept, step = build(name, blocks, width)
    started = first.table()
    first.calls.clear()
    for _ in range(2):
        step(x)
    gc.collect()
    held = tracemalloc.take_snapshot()
    tracemalloc.stop()
    with Collectives() as seen:
        step(x)
    sizes = {"all": 0, "hf_zero": 0}
    for entry in held.statistics("filename"):
        sizes["all"] += entry.size
        sizes["hf_zero"] += entry.size if "/hf_zero/" in entry.traceback[0].filename else 0
    del kept
    return {"held": sizes, "start": started, "step": seen.table()}


def resident() -> int:
    """Return the bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case: contender, world, blocks, width, steps, and the kind of measurement (times or counts)."""
    join(case["world"])
    name, blocks, width = case["contender"], case["blocks"], case["width"]
    return times(name, blocks, width, case["steps"]) if case["what"] == "times" else counts(name, blocks, width)


def join(world: int) -> None:
    """Become rank 0 of a pretended world."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def rehearse() -> None:
    """Import, create operator schemas and train once, so that no case includes that time."""
    join(NODE)
    for name in ("hf_zero-3", "fsdp2"):
        _, step = build(name, 1, 64)
        step(torch.ones(1, 4, 64, dtype=torch.bfloat16))
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    answers = open_answers()
    torch.set_num_threads(1)
    rehearse()
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                answers.write(json.dumps(run(json.loads(line))) + "\n")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{line} failed")


if __name__ == "__main__":
    main()
