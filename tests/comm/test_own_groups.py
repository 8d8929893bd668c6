"""The engine's own process groups: every rank is connected before any goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero import zero
from hf_zero.comm import process_groups
from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, initialize


def _slow_connections() -> None:
    store = dist.distributed_c10d._get_default_store()
    new_group = dist.new_group

    def connects_late(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if dist.get_rank() == 1:
            time.sleep(0.3)
            store.add("connected", 1)
        else:
            asked.append(len(asked) + 1)
        return group

    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", connects_late)
        engine = initialize(CASES["mlp"].build(), Run(3))
    assert store.add("connected", 0) >= len(asked)
    assert dist.get_rank() == 1 or len(asked) == 2  # for gathers and for reductions
    engine.destroy()


def test_no_rank_leaves_before_all_are_connected() -> None:
    """gloo's ranks connect each in its own time: one that destroyed the group at once would cut the others off."""
    ranks.run_ranks(_slow_connections, 2)


def _lines(lines: list[list[int]]) -> list[list[int]]:
    return process_groups.lines_of_all(next(line for line in lines if ranks.rank() in line))


@pytest.mark.parametrize("lines", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1], [2]], [[0, 1, 3], [2]]])
def test_ranks_tell_their_lines(lines: list[list[int]]) -> None:
    """In three numbers, or rank by rank where the distances differ."""
    assert ranks.run_ranks(_lines, 4, lines) == [lines] * 4


def _named_alike() -> list[str]:
    lines = [[0, 3], [1, 2]]
    made = [process_groups._make(lines, None, "gloo"), dist.new_group([0, 1, 2, 3]), process_groups._make(lines[::-1], None, "gloo")]
    total = torch.tensor([float(ranks.rank())])
    dist.all_reduce(total, group=made[0])
    assert total == 3
    return [group.group_name for group in made]


def test_groups_of_others_count() -> None:
    """Each rank makes its own groups only, and all agree on the names of those that come later."""
    first, second, third, fourth = ranks.run_ranks(_named_alike, 4)
    assert first == fourth and second == third and first[1] == second[1]
    assert first[0] != second[0] and first[2] != second[2] and len({*first, *second}) == 5


def _after_the_end(stage: int) -> None:
    engine = initialize(CASES["mlp"].build(), Run(stage))
    parameters = list(engine.module.parameters())
    dist.destroy_process_group()
    with pytest.raises(StateError, match=r"process group has been destroyed \(by accelerator.end_training\(\)"):
        engine.step()
    if stage == 3:
        with pytest.raises(StateError, match="gather parameters, save and load before"), zero.GatheredParameters(parameters):
            pass


@pytest.mark.parametrize("stage", [2, 3])
def test_use_after_the_process_group_is_destroyed(stage: int) -> None:
    """Scripts that save after `accelerator.end_training()`: the error says so. It was torch's TypeError "Invariant encountered"."""
    ranks.run_ranks(_after_the_end, 2, stage)
