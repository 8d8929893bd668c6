"""Test the stage table, row by row."""

from __future__ import annotations

import pytest

from hf_zero.core.stages import stage_policy
from hf_zero.errors import ConfigError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("stage", "inside", "boundary", "deferred", "deferred_boundary"),
    [(0, False, True, False, False), (1, True, True, False, False), (2, True, True, True, True), (3, True, True, True, True)],
)
def test_when_a_stage_reduces(stage: int, inside: bool, boundary: bool, deferred: bool, deferred_boundary: bool) -> None:
    policy = stage_policy(stage)
    assert policy.reduces(boundary=False, in_no_sync=False) == inside
    assert policy.reduces(boundary=True, in_no_sync=False) == boundary
    assert policy.reduces(boundary=False, in_no_sync=True) == deferred
    assert policy.reduces(boundary=True, in_no_sync=True) == deferred_boundary


def test_what_a_stage_shards() -> None:
    shards = [(stage_policy(stage).optimizer_sharded, stage_policy(stage).parameters_sharded) for stage in range(4)]
    assert shards == [(False, False), (True, False), (True, False), (True, True)]


def test_parameters_in_the_node_are_a_row_of_stage_3_alone() -> None:
    row = stage_policy(3, parameters_in_node=True)
    assert row.parameters_in_node and not stage_policy(3).parameters_in_node
    assert (row.optimizer_sharded, row.parameters_sharded, row.reduces_each_micro_step, row.allows_deferral) == (True, True, True, False)
    for stage in range(3):
        with pytest.raises(ConfigError, match=r"stage is .*allowed are \[3\]"):
            stage_policy(stage, parameters_in_node=True)


def test_there_are_four() -> None:
    with pytest.raises(ConfigError, match=r"stage is 4, allowed are \[0, 1, 2, 3\]"):
        stage_policy(4)
