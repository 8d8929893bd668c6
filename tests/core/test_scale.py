"""Test that a rank's work, memory and messages do not grow with the world, by counts on rank 0 of pretended worlds."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from benchmarks.collectives.collective_counts import Collectives
from benchmarks.collectives.wire_bytes import Layout, traffic
from hf_zero.core.units.grouping import NamedParam, build_blocks
from tests.support import ranks
from tests.support.small_blocks import WIDTH, Model

pytestmark = pytest.mark.quick

PACKAGE = str(Path(hf_zero.__file__).parent)
NODE, WORLD = 8, 64
# A list with an entry per rank is larger, from 16 to 4096 ranks: 32 KiB. What is kept varies by 4 KiB from run to run.
GROWTH = 3 << 13  # bytes
RESHARD = {"stage3_max_reuse_distance": 0}
LAYOUTS: dict[str, tuple[dict[str, Any], Layout]] = {
    "1": ({"stage": 1}, Layout("", 1)),
    "2": ({"stage": 2}, Layout("", 2)),
    "3": ({"stage": 3, **RESHARD}, Layout("", 3)),
    "2-node": ({"stage": 2, "mics_shard_size": NODE}, Layout("", 2, shard=NODE)),
    "3-node": ({"stage": 3, **RESHARD, "mics_shard_size": NODE}, Layout("", 3, shard=NODE)),
    "3-hpz": ({"stage": 3, **RESHARD, "zero_hpz_partition_size": NODE}, Layout("", 3, node=NODE)),
}


def _join(world: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def _made(zero: dict[str, Any], accumulation: int = 1) -> Any:
    model = Model(6)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
    }
    return hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), fused=True), config=config)[0]


def _step(engine: Any, micro_steps: int = 1) -> None:
    for _ in range(micro_steps):
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
        engine.step()


@dataclass(frozen=True)
class Cost:
    """Costs of one layout, until the first step has ended.

    Attributes:
        start: Collectives at start-up: number and bytes, by kind and ranks of the group.
        calls: Number of all collectives, by kind.
        groups: Number of process groups that are made.
        kept: Bytes that lines of this package keep for a further engine.
    """

    start: dict[str, list[int]]
    calls: dict[str, int]
    groups: int
    kept: int


def _costs(world: int) -> dict[str, Cost]:
    _join(world)
    return {name: _cost(zero) for name, (zero, _) in LAYOUTS.items()}


def _cost(zero: dict[str, Any]) -> Cost:
    made, new_group = [], dist.new_group
    with pytest.MonkeyPatch.context() as patch, Collectives() as seen:
        patch.setattr(dist, "new_group", lambda *args, **kwargs: made.append(1) or new_group(*args, **kwargs))
        engine = _made(zero)
        start = seen.table()
        _step(engine)
    calls: Counter[str] = Counter()
    for kind, (count, _) in seen.table().items():
        calls[kind.split()[0]] += count
    engine.destroy()
    del engine
    seen.calls.clear()
    return Cost(start, dict(calls), len(made), _kept(zero))


def _kept(zero: dict[str, Any]) -> int:
    gc.collect()
    tracemalloc.start()
    engine = _made(zero)
    _step(engine)
    gc.collect()
    held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{PACKAGE}/*")])
    tracemalloc.stop()
    engine.destroy()
    return sum(entry.size for entry in held.statistics("filename"))


@pytest.fixture(scope="module")
def costs() -> dict[int, dict[str, Cost]]:
    # Not ordered: one process stands for all ranks.
    return {world: ranks.run_ranks(_costs, 1, world, group=False, ordered=False)[0] for world in (16, 4096)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_ours_grows_with_the_world(costs: dict[int, dict[str, Cost]], layout: str) -> None:
    small, large = (of_world[layout] for of_world in costs.values())
    assert small.calls == large.calls, "collectives at start-up and in a step"
    assert small.groups == large.groups, "process groups made"
    assert large.kept - small.kept < GROWTH, f"bookkeeping of {small.kept} and {large.kept} bytes"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_start_up_gathers_no_objects(costs: dict[int, dict[str, Cost]], layout: str) -> None:
    """Check that start-up sends at most three numbers per rank, where ranks exchange their lines."""
    start = costs[4096][layout].start
    assert {kind.split()[0] for kind in start} <= {"allgather_base", "allreduce", "broadcast"}, start
    for calls, nbytes in (row for kind, row in start.items() if kind.startswith("allgather_base")):
        assert calls <= 3 and nbytes == calls * 4096 * 3 * 8, start


Sent = tuple[dict[str, list[int]], int, int]


def _sent(world: int) -> dict[tuple[str, int], Sent]:
    """Return the collectives of a step, and the elements of all units and of the root's, by layout and micro-steps."""
    _join(world)
    return {(name, micro_steps): _sent_by(zero, micro_steps) for name, (zero, _) in LAYOUTS.items() for micro_steps in (1, 3)}


def _sent_by(zero: dict[str, Any], micro_steps: int) -> Sent:
    engine = _made(zero, micro_steps)
    _step(engine, micro_steps)
    with Collectives() as seen:
        _step(engine, micro_steps)
    root = sum(unit.layout.padded_numel for unit in engine.runtime.root.units)
    found = seen.table(), sum(unit.layout.padded_numel for unit in engine.units), root
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def sent() -> dict[tuple[str, int], Sent]:
    found: dict[tuple[str, int], Sent] = ranks.run_ranks(_sent, 1, WORLD, group=False, ordered=False)[0]
    return found


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_of_a_step_are_those_of_the_page(sent: dict[tuple[str, int], Sent], layout: str, micro_steps: int) -> None:
    """Check the formulas of docs/scale.md, without votes and norms; the root is gathered once per micro-step, in forward."""
    described = LAYOUTS[layout][1]
    found, elements, root = sent[layout, micro_steps]
    expected = traffic(described, elements, WORLD, micro_steps)
    again = micro_steps * root * 2 if described.stage == 3 else 0
    gathers = {size: nbytes - (again if size == min(expected.gathers) else 0) for size, nbytes in expected.gathers.items()}
    assert {size: found[f"allgather_base {size}"][1] for size in gathers} == gathers
    assert {size: found[f"reduce_scatter_base {size}"][1] for size in expected.reductions} == expected.reductions
    for size, nbytes in expected.all_reduces.items():
        votes = found[f"allreduce {size}"][1] - nbytes
        assert 0 <= votes < 256, found


# -- as the model grows -------------------------------------------------------------------------------------------------


def _calls_to_find_units(blocks: int) -> int:
    """Return the number of calls of functions, including C functions, made by dividing a model into units."""
    model = Model(blocks)
    members = [NamedParam(name, param, 0) for name, param in model.named_parameters()]
    counted: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: counted.update([event]))
    try:
        build_blocks(model, members)
    finally:
        sys.setprofile(None)
    return counted["call"] + counted["c_call"]


def test_units_are_found_in_time_that_grows_with_the_blocks_and_no_faster() -> None:
    few, many = _calls_to_find_units(25), _calls_to_find_units(100)
    assert many < 4.2 * few
