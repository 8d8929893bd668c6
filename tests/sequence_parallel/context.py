"""Training under context parallelism beside training on one rank: what the ``test_context_*`` files compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import hf_zero
from tests.support import parity, ranks
from tests.support.parity import Run
from tests.support.sequences import Data, Result, build, compare, whole


def config(run: Run, size: int, sequence: int = 1, tensor: int = 1, strategy: str = "allgather") -> dict[str, Any]:
    """``run``'s configuration with the axes of a mesh."""
    found = run.config()
    found["hf_zero"] = {**found.get("hf_zero", {}), "context_parallel_size": size, "context_parallel_strategy": strategy}
    if sequence > 1:
        found["sequence_parallel_size"] = sequence
    if tensor > 1:
        found["tensor_parallel"] = {"autotp_size": tensor}
    return found


def divided(make: Callable[[], nn.Module], run: Run, data: Data, size: int, **axes: Any) -> Result:
    """The losses, norms and weights of a script that knows of one rank only: the same whole batch on all ranks of a group."""
    engine = hf_zero.initialize(model=build(make), config=config(run, size, **axes))[0]
    sharers = size * axes.get("sequence", 1) * axes.get("tensor", 1)
    losses, norms = [], []
    for step in range(run.steps):
        parts = []
        for micro in range(run.accumulation):
            loss = engine(**script_batch(data, step, micro, ranks.rank() // sharers)).loss
            parts.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        losses.append(parity.mean_over_ranks(parts))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
    weights = engine._consolidated_16bit_state_dict()
    return Result(losses, norms, {name: value.float() for name, value in (weights or {}).items()})


def script_batch(data: Data, *seed: int) -> dict[str, Any]:
    """A batch as a collator gives it: with positions only where samples are packed."""
    batch = dict(data.batch(*seed))
    if not data.packed:
        del batch["position_ids"]
    return batch


def check(make: Callable[[], nn.Module], run: Run, data: Data, size: int, factor: float = 1.0, **axes: Any) -> None:
    """On every rank: training over parts of sequences is training on one rank."""
    groups = ranks.world() // (size * axes.get("sequence", 1) * axes.get("tensor", 1))
    expected = whole(make, run, data, groups)
    compare(divided(make, run, data, size, **axes), expected, f"{run} {data} {axes}", factor)
