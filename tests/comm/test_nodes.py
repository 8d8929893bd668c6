"""How ranks lie in nodes, and which groups fit them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.nodes import Nodes, nodes_of
from hf_zero.comm.topology import axis_over
from hf_zero.errors import ConfigError
from tests.support import ranks
from tests.support.rows import each

pytestmark = pytest.mark.quick


def test_ranks_in_each() -> None:
    cells = [
        ((4,), [range(8)], 4),
        ((4,), [range(4)], 4),
        ((8,), [range(0, 16, 2), range(1, 16, 2)], 4),  # two ranks hold one model
        ((2,), [range(0, 16, 4)], 1),
        ((4,), [range(6)], 0),
        ((4,), [[0, 1, 2, 3], [4, 5, 8, 9]], 0),  # another line has two in each
        ((2,), [[0, 2, 1, 3]], 0),  # not adjacent
        ((2, 4), [range(6)], 0),
        ((), [range(6)], 0),
    ]
    each(cells, lambda cell: _found(*cell))


def _found(sizes: tuple[int, ...], lines: list[list[int]], expected: int) -> None:
    assert Nodes(sizes).ranks_in_each(lines) == expected


def test_groups_that_fit() -> None:
    for sizes, ranks_, fits in (
        ((8,), 24, {1, 2, 4, 8, 24}),
        ((6,), 24, {1, 2, 3, 6, 12, 24}),
        ((4, 8), 24, {1, 2, 4, 24}),
        ((), 24, {1, 2, 3, 4, 6, 8, 12, 24}),
    ):
        for size in (1, 2, 3, 4, 6, 8, 12, 24):
            if size in fits:
                Nodes(sizes).require_fit(size, ranks_, "groups")
            else:
                with pytest.raises(ConfigError, match=f"groups: {size} adjacent ranks do not fit nodes of"):
                    Nodes(sizes).require_fit(size, ranks_, "groups")
    with pytest.raises(ConfigError, match="do not fit nodes of 4 and of 8 ranks .LOCAL_WORLD_SIZE.; 1 or 2 or 4 or 12 ranks would"):
        Nodes((4, 8)).require_fit(3, 12, "groups")
    with pytest.raises(
        ConfigError, match="groups: 6 adjacent ranks do not fit nodes of 4 ranks .LOCAL_WORLD_SIZE.; 1 or 2 or 6 x 2 ranks would"
    ):
        Nodes((4,)).require_fit(3, 12, "groups", together=2)
    assert Nodes((2,)).fitting(6) == [1, 2, 6]  # 3 divides them, and no node holds it


def _told(told: list[list[str]]) -> list[tuple[int, ...]]:
    found, network = [], build_collectives(axis_over(dist.group.WORLD))
    for values in told:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", values[ranks.rank()])
            found.append(nodes_of([network]).sizes)
    return found


def test_what_ranks_are_told() -> None:
    told = [["2", "2", "2", "2"], ["1", "3", "3", "3"], ["", "2", "2", "2"], ["x"] * 4]
    assert ranks.run_ranks(_told, 4, told) == [[(2,), (1, 3), (), ()]] * 4
