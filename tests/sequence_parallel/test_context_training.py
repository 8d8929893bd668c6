"""Training under context parallelism is training on one rank: architectures, masks, stages, precisions, sizes of groups."""

from __future__ import annotations

from functools import partial

import pytest

from tests.sequence_parallel.test_sequence_training import MASKS
from tests.support import ranks
from tests.support.context import check
from tests.support.parity import Run
from tests.support.sequences import Data, llama

pytest.importorskip("transformers", minversion="5.0")


def each(names: list[str], size: int) -> None:
    for name in names:
        make, run, data = MASKS[name]
        check(make, run, data, size)


def test_masks_and_stages_over_two_ranks() -> None:
    ranks.run_ranks(each, 2, list(MASKS), 2)


def two_groups() -> None:
    check(llama, Run(stage=1, accumulation=2, clip=0.5), Data(padding="right"), 2)
    check(partial(llama, kv_heads=1, heads=3), Run(stage=3), Data(packed=True), 2)
    check(llama, Run(stage=2, clip=0.5), Data(packed=True, length=21), 4)  # padded to 24


def test_groups_over_four_ranks() -> None:
    ranks.run_ranks(two_groups, 4)
