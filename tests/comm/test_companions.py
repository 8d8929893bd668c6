"""Who is known not to come to a call before this rank goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm import companions, hang_watch
from hf_zero.comm.rank_status import RankStatus
from tests.support import ranks
from tests.support.processes import until


@pytest.mark.parametrize(
    ("text", "elsewhere"),
    [
        (f"0 {hang_watch.ENDED}", True),
        (f"7 {RankStatus('barrier', '0', issued={'0': 5}).as_text()}", True),  # this rank has issued 4 in the group of both
        (f"6 {RankStatus('barrier', '0', issued={'0': 5}).as_text()}", False),  # an answer to a question before
        (f"7 {RankStatus('all_reduce', '0', issued={'0': 4}).as_text()}", False),  # of which this rank has issued its part
        (f"7 {RankStatus('all_reduce', '9', issued={'0': 5, '9': 5}).as_text()}", False),  # in a group without this rank
        (f"7 {RankStatus('', '', issued={'0': 5}).as_text()}", False),  # it computes, and may come
    ],
)
def test_where_another_rank_is(text: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "issued", lambda: {"0": 4})
    store = dist.HashStore()
    assert not companions._is_elsewhere(store, 1, 7)
    store.set("status/1", text)
    assert companions._is_elsewhere(store, 1, 7) is elsewhere


def test_each_rank_is_asked_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda *_: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 20)
    asked = [rank for number in range(3) for rank in companions._those_of_round(number)]
    assert asked[:3] == [3, 4, 5] and set(asked) == set(range(20)) - {2}
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 3)
    assert companions._those_of_round(0) == companions._those_of_round(5) == [0, 1]


def test_without_an_engine_nobody_is_asked() -> None:
    assert companions.comes_alone() is False


def _end_on_others(folder: Path) -> None:
    model = torch.nn.Linear(4, 4)
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=settings)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    if dist.get_rank() == 0:
        assert companions.comes_alone() is True
        (folder / "went on").touch()
        dist.destroy_process_group()
        assert companions.comes_alone() is True, "it would wait for the others to meet again"
    else:
        dist.destroy_process_group()
        until((folder / "went on").exists, "rank 0")  # the process still runs: it need not end to be known as gone


def test_a_rank_that_has_destroyed_its_group_will_not_come(tmp_path: Path) -> None:
    ranks.run_ranks(_end_on_others, 2, tmp_path)


def _free_on_all() -> None:
    engine, *_ = hf_zero.initialize(model=torch.nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1})
    engine.destroy()
    if dist.get_rank() == 0:
        assert companions.comes_alone() is True
    dist.barrier()


def test_ranks_without_an_engine_can_still_be_asked() -> None:
    """As after accelerate's `free_memory()`: rank 0 reloads a model, and the others wait at a barrier."""
    ranks.run_ranks(_free_on_all, 2, ordered=False)
