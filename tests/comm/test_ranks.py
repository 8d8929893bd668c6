"""The rank pool itself: values by rank, seeds, and what a failed, dead or hung rank looks like."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.topology import build_topology
from tests.support.ranks import RankError, observe_ranks, rank, run_ranks, world


def _sum_of_ranks() -> tuple[float, float, str]:
    total = torch.tensor([float(rank())])
    dist.all_reduce(total)
    return total.item(), torch.rand(1).item(), os.environ["LOCAL_RANK"]


def _process_id() -> int:
    return os.getpid()


def _raise_on_rank_one() -> None:
    if rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def _die_on_rank_one() -> None:
    if rank() == 1:
        os._exit(7)
    dist.barrier()


def _hang_on_rank_zero() -> None:
    if rank() == 0:
        time.sleep(1000)


def _votes() -> list[list[float]]:
    net = build_collectives(build_topology())
    votes = []
    for voter in range(world()):
        own = [float(rank() == voter), -1.0]
        vote = net.begin_vote(own, "vote")
        net.all_reduce(torch.ones(3), "other messages meanwhile").wait()
        votes.append(net.wait_for_vote(vote, own))
    return votes


def _leave_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def _initialized() -> bool:
    return dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_answers_and_starts_from_the_same_seed(world_size: int) -> None:
    values = run_ranks(_sum_of_ranks, world_size)
    assert [value[0] for value in values] == [sum(range(world_size))] * world_size
    assert len({value[1] for value in values}) == 1
    assert [value[2] for value in values] == [str(rank) for rank in range(world_size)]


def test_ranks_are_reused_and_get_a_fresh_group() -> None:
    assert run_ranks(_process_id, 2) == run_ranks(_process_id, 2)
    assert run_ranks(_initialized, 2, group=False) == [False, False]


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match="the reason") as caught:
        run_ranks(_raise_on_rank_one, 2)
    assert caught.value.outcomes[1].status == "error"
    assert run_ranks(world, 2) == [2, 2]  # a new pool


def test_a_dead_rank_is_named_with_its_exit_code() -> None:
    outcomes = observe_ranks(_die_on_rank_one, 2)
    assert outcomes[1].status == "died"
    assert "exit code" in outcomes[1].text


def test_a_hung_rank_shows_its_stack() -> None:
    outcomes = observe_ranks(_hang_on_rank_zero, 2, timeout=8)
    assert [outcome.status for outcome in outcomes] == ["hung", "ok"]
    assert "_hang_on_rank_zero" in outcomes[0].text


def test_a_job_that_leaves_global_state_behind_fails() -> None:
    with pytest.raises(RankError, match=r"default dtype at torch\.float64"):
        run_ranks(_leave_the_default_dtype, 1)


@pytest.mark.parametrize("world_size", [3, 4, 9])
def test_every_rank_hears_the_vote_of_every_rank(world_size: int) -> None:
    assert run_ranks(_votes, world_size) == [[[1.0, -1.0]] * world_size] * world_size
