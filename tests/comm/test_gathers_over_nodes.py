"""All-gathers over gloo where nodes are known: every shard comes to a node once, and nobody waits for a rank that is busy."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm.direct_exchange import GlooCollectives
from hf_zero.comm.topology import build_topology
from tests.support import ranks
from tests.support.matrix import check_stages

NUMEL = 1000


def _gather(per_node: int) -> None:
    collectives = GlooCollectives(build_topology())
    collectives.set_ranks_per_node(per_node)
    rank, world = collectives.rank, collectives.world
    sent: Counter[int] = Counter()
    isend = dist.isend

    def counted(tensor: torch.Tensor, dst: int | None = None, *, group_dst: int | None = None, **rest: Any) -> Any:
        target = group_dst if dst is None else dst  # the group is that of all ranks
        assert target is not None
        sent[target // per_node] += tensor.nbytes
        return isend(tensor, dst, group_dst=group_dst, **rest)

    def shard_of(owner: int, number: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.arange(NUMEL) + 31 * owner + number).to(dtype)

    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    with mock.patch.object(dist, "isend", counted):
        fulls = [torch.empty(world * NUMEL, dtype=dtype) for dtype in dtypes]
        pending = [collectives.all_gather(full, shard_of(rank, number, full.dtype), f"unit {number}") for number, full in enumerate(fulls)]
        if rank == 1:  # it gets to its gathers when the others have theirs
            dist.barrier()
        for gather in pending[:: -1 if rank % 2 else 1]:
            gather.wait()
        if rank != 1:
            dist.barrier()
    for number, full in enumerate(fulls):
        assert torch.equal(full, torch.cat([shard_of(owner, number, full.dtype) for owner in range(world)]))
    nbytes, nodes = sum(NUMEL * dtype.itemsize for dtype in dtypes), world // per_node
    across = {node: count for node, count in sent.items() if node != rank // per_node}
    assert across == dict.fromkeys(set(range(nodes)) - {rank // per_node}, nbytes)
    assert sum(sent.values()) == collectives.sent_bytes == (world - 1) * nbytes


@pytest.mark.parametrize(
    ("world", "per_node"), [(4, 2), pytest.param(6, 2, marks=pytest.mark.slow), pytest.param(6, 3, marks=pytest.mark.slow)]
)
def test_a_shard_comes_to_each_node_once(world: int, per_node: int) -> None:
    ranks.run_ranks(_gather, world, per_node)


@pytest.mark.slow  # fast: test_parity_node_parameters.py
def test_training_is_what_it_is_on_one_node() -> None:
    ranks.run_ranks(check_stages, 4, "odd_mlp", "bf16", 2, 0.1, env={"LOCAL_WORLD_SIZE": "2"})


def _die_in_the_middle(per_node: int) -> None:
    collectives = GlooCollectives(build_topology())
    collectives.set_ranks_per_node(per_node)
    if collectives.rank == 3:
        raise ValueError("gone")
    full = torch.empty(4 * NUMEL)
    collectives.all_gather(full, torch.ones(NUMEL), "unit").wait()


def test_a_rank_that_is_gone_fails_the_gather_on_the_others() -> None:
    outcomes = ranks.observe_ranks(_die_in_the_middle, 4, 2, group_timeout=8.0, grace=60.0)
    assert [outcome.status for outcome in outcomes] == ["error"] * 4, [outcome.text for outcome in outcomes]
    assert all("CollectiveError" in outcome.text and "all_gather (unit)" in outcome.text for outcome in outcomes[:3])
