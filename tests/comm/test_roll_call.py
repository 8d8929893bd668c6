"""Who is named when a collective has failed, and that nobody hangs on a store that does not answer."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from hf_zero.comm import roll_call
from tests.support import ranks


@pytest.mark.parametrize(
    ("world", "here", "said"),
    [
        (4, (0, 1), "ranks 2 and 3 on node-1 did not answer within 0.2 s"),
        (6, (0, 2, 3, 5), "rank 1 on node-0, rank 4 on node-2 did not answer within 0.2 s"),
        (3, (0, 1, 2), "all ranks answer"),
        (
            14,
            (0, 1),
            "ranks 2 and 3 on node-1, ranks 4 and 5 on node-2, ranks 6 and 7 on node-3, ranks 8 and 9 on node-4 and 4 more ranks",
        ),
    ],
)
def test_who_is_named(world: int, here: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "SECONDS_TO_ANSWER", 0.2)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: world)
    store = dist.HashStore()
    for rank in range(world):
        store.set(f"{roll_call._KEY}/host/{rank}", f"node-{rank // 2}")
    for rank in here:
        store.set(f"{roll_call._KEY}/here/{rank}", "1")
        store.add(f"{roll_call._KEY}/answered", 1)
    assert roll_call._wait_for_all(store).startswith(said)


def test_a_rank_that_never_signed_in_has_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert roll_call._places(dist.HashStore(), [3]) == "rank 3 on an unknown host"


def test_without_a_group_nobody_is_asked() -> None:
    roll_call.sign_in()
    assert roll_call.call_roll() == ""


class _Silent(dist.HashStore):
    """Takes what is written and never answers, as one whose host has gone does."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def add(self, key: str, amount: int) -> int:  # type: ignore[override]
        self.asked.wait()
        return 0


def test_a_store_that_does_not_answer_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Silent()
    for name, value in {
        "SECONDS_TO_ANSWER": 0.1,
        "_MORE": 0.1,
        "_signed_in": store,
        "_verdict": None,
        "default_store": lambda: store,
    }.items():
        monkeypatch.setattr(roll_call, name, value)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert roll_call.call_roll().startswith("the store in which the ranks met at node-1:29500 does not answer")
    store.asked.set()  # nobody waited for it, or the call would not have returned


def _all_call() -> str:
    roll_call.sign_in()
    first = roll_call.call_roll()
    assert roll_call.call_roll() == first
    return first


def test_ranks_that_are_all_there_hear_the_same() -> None:
    assert set(ranks.run_ranks(_all_call, 3)) == {roll_call._ALL}
