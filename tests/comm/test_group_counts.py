"""Process groups of engines that come and go in one process: the next one uses those of the one before."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.integrations.parallelism import torch_mesh
from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, initialize, micro_step

LAYOUTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "shard groups of slices": {"zero_optimization": {"mics_shard_size": 2}, "sequence_parallel_size": 2},
    "secondary copy": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    "node": {"hf_zero": {"param_shard_size": 2}},
}


def _groups() -> int:
    gc.collect()
    return len(dist.distributed_c10d._world.pg_map)


def _engine(extra: dict[str, Any], destroyed: bool) -> None:
    engine = initialize(CASES["mlp"].build(), Run(3, extra=extra))
    micro_step(engine, CASES["mlp"].rows(0, 0, ranks.rank()), class_loss, 0)
    engine.step()
    if destroyed:
        engine.destroy()


def _coming_and_going() -> dict[str, tuple[int, int]]:
    """Process groups after the first and after the last engine, by layout: one is dropped without a word, one destroyed, a third follows.

    The third is made of the first layout alone: what an engine leaves behind does not depend on where its groups lie.
    """
    found = {}
    for name, extra in LAYOUTS.items():
        _engine(extra, destroyed=False)
        first = _groups()
        _engine(extra, destroyed=True)
        if not found:
            _engine(extra, destroyed=False)
        found[name] = (first, _groups())
    return found


def test_the_last_engine_has_no_more_groups_than_the_first() -> None:
    for found in ranks.run_ranks(_coming_and_going, 4):
        assert {name: last - first for name, (first, last) in found.items()} == dict.fromkeys(LAYOUTS, 0)


def _meshes() -> tuple[int, int, bool]:
    from hf_zero.config.mesh import Claim, solve

    def mesh(axis: str, size: int) -> Any:
        return torch_mesh(solve([Claim(axis, size, "a test")], dist.get_world_size()), "cpu")

    first, counted = mesh("tp", 2), _groups()
    again, other = mesh("tp", 2), mesh("dp_replicate", 2)
    return counted, _groups(), again is first and other is not first


def test_accelerators_after_each_other_share_a_mesh() -> None:
    """``AcceleratorState._reset_state()`` and another Accelerator: no further groups, unless its sizes are others."""
    pytest.importorskip("accelerate")
    for counted, after, shared in ranks.run_ranks(_meshes, 4):
        assert shared and after - counted == 3  # dp_replicate, dp_shard, and the two together
