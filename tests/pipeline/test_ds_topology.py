"""Coordinates of ranks on named axes, as DeepSpeed documents them."""

from __future__ import annotations

import pytest

from hf_zero.deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    default_topology,
    prime_factors,
)
from hf_zero.errors import ConfigError

pytestmark = pytest.mark.quick


def test_the_last_axis_runs_fastest() -> None:
    topology = ProcessTopology(axes=["x", "y"], dims=[2, 3])
    assert [topology.get_rank(x=x, y=y) for x in range(2) for y in range(3)] == list(range(6))
    assert topology.world_size() == 6 and topology.get_axis_names() == ["x", "y"]
    assert topology.get_dim("y") == 3 and topology.get_dim("z") == 0


def test_coordinates_are_named_tuples_that_give_their_rank() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4)
    assert topology.get_axis_names() == ["pipe", "data", "model"] and topology.dims == [2, 4, 3]
    for rank in range(topology.world_size()):
        coord = topology.get_coord(rank)
        assert topology.get_rank(**coord._asdict()) == rank == coord.pipe * 12 + coord.data * 3 + coord.model
    assert topology.get_coord(17) == topology.ProcessCoord(pipe=1, data=1, model=2)


def test_lines_along_an_axis() -> None:
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("elsewhere") == []


def test_ranks_by_some_of_their_places() -> None:
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.filter_match() == list(range(8)) and topology.filter_match(pipe=2) == []
    assert topology.get_axis_list(axis="data", idx=1) == [2, 3, 6, 7]
    assert PipeDataParallelTopology(num_pp=2, num_dp=2).get_axis_list("pipe", 1) == [2, 3]


def test_texts_of_ranks() -> None:
    topology = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert [topology.get_rank_repr(rank) for rank in range(4)] == ["a_00-b_00", "a_00-b_01", "a_01-b_00", "a_01-b_01"]
    assert topology.get_rank_repr(3, omit_axes=["a"]) == "b_01"
    assert topology.get_rank_repr(2, inner_sep="=", outer_sep=",") == "a=01,b=00"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(1) == ""
    assert PipeModelDataParallelTopology(2, 2, 2).get_rank_repr(5) == "model_01"
    assert PipeModelDataParallelTopology(2, 2, 2).get_rank_repr(5, omit_axes=("data",)) == "pipe_01-model_01"


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: ProcessTopology(["pipe"], [2, 2]), "a distinct name and a size"),
        (lambda: ProcessTopology(["pipe", "pipe"], [2, 2]), "a distinct name"),
        (lambda: PipeDataParallelTopology(0, 2), "size of at least 1"),
        (lambda: PipeDataParallelTopology(2, 2).get_rank(pipe=1), r"use filter_match\(\)"),
        (lambda: PipeDataParallelTopology(2, 2).get_rank(pipe=1, data=2), "positions on axis data are 0 to 1"),
        (lambda: PipeDataParallelTopology(2, 2).get_coord(4), "ranks are 0 to 3"),
        (lambda: PipeDataParallelTopology(2, 2).filter_match(model=0), r"the axes are \['pipe', 'data'\]"),
    ],
)
def test_what_is_not_in_the_grid_is_an_error(ask, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ask()


@pytest.mark.parametrize(("ranks", "stages", "replicas"), [(1, 1, 1), (2, 2, 1), (4, 2, 2), (12, 6, 2), (7, 7, 1)])
def test_without_sizes_stages_and_replicas_are_about_as_many(ranks: int, stages: int, replicas: int) -> None:
    assert default_topology(ranks).dims == [stages, replicas]


def test_prime_factors() -> None:
    assert [prime_factors(number) for number in (1, 2, 12, 49, 97)] == [[], [2], [2, 2, 3], [7, 7], [97]]
    with pytest.raises(ConfigError, match="must be at least 1"):
        prime_factors(0)
