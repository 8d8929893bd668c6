"""The engine's own process groups: every rank is connected before any goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

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
