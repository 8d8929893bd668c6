"""Numbered batches of replica groups: none is lost or taken twice, whichever groups die and return."""

from __future__ import annotations

import json
import random

import pytest

from hf_zero.errors import ConfigError, StateError
from hf_zero.replica_groups.sampler import ReplicaSampler, Shares, _source, serve_numbers


def test_a_group_that_dies_gives_its_batches_to_the_others() -> None:
    shares = Shares()
    shares.give((0, 1), 3)
    assert shares.held == {0: [0, 2, 4], 1: [1, 3, 5]}
    assert shares.take((0, 1), 1) == {0: [0], 1: [1]}
    shares.give((0,), 3)
    assert (shares.held, shares.back, shares.next) == ({0: [2, 4, 3]}, [5], 6)
    assert shares.take((0,), 1) == {0: [2]}
    shares.give((0, 1), 3)  # group 1 is back, as a new process
    assert shares.held == {0: [4, 3, 5], 1: [6, 7, 8]}
    with pytest.raises(StateError, match="took 4 batches of replica group 0"):
        shares.take((0, 1), 4)


def test_random_deaths_lose_nothing() -> None:
    for seed in range(40):
        chance, shares, taken = random.Random(seed), Shares(), list[int]()
        for _ in range(60):
            members = tuple(chance.sample(range(4), chance.randrange(1, 5)))
            before = {group: list(own) for group, own in shares.held.items() if group in members}
            saved = json.loads(json.dumps(shares.state_dict()))
            shares.give((9, *members), 5)  # a quorum that came to nothing
            shares.load_state_dict(saved)
            shares.give(members, 5)
            assert all(shares.held[group][: len(own)] == own for group, own in before.items()), "what a loader has read stays"
            taken += [number for own in shares.take(members, chance.randrange(3)).values() for number in own]
        still = [*shares.back, *(number for own in shares.held.values() for number in own)]
        assert sorted([*taken, *still]) == list(range(shares.next)), seed


class _Numbers:
    def number(self, position: int, ahead: int) -> int:
        return 2 * position + ahead


def test_the_sampler_of_each_rank_and_of_a_group_pass_through_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    whole = ReplicaSampler(26, 2, ranks=3, shuffle=True, seed=4)
    parts = [ReplicaSampler(26, 2, ranks=3, rank=rank, shuffle=True, seed=4) for rank in range(3)]
    assert (len(whole), len(parts[0])) == (12, 4)
    for number in range(9):
        assert whole.samples(number) == [index for part in parts for index in part.samples(number)]
    first, second = ([index for number in range(start, start + 4) for index in whole.samples(number)] for start in (0, 4))
    assert sorted(set(first)) == sorted(first) and len(first) == 24, "a pass has each sample at most once"
    assert first != second, "each pass has an order of its own"
    plain = ReplicaSampler(26, 2, ranks=3, shuffle=False, ahead=1)
    before = list(_source)
    try:
        _source.clear()
        with pytest.raises(StateError, match="has no engine to get"):
            list(plain)
        serve_numbers(_Numbers())
        assert list(plain) == [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23], "batches 1 and 3 of four"
        assert list(plain)[:2] == [6, 7], "the next pass goes on at position 2, with batch 5"
    finally:
        _source[:] = before
    with pytest.raises(ConfigError, match="11 samples are no batch of 2 samples on 3 rank"):
        ReplicaSampler(11, 2, ranks=3)
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "two")
    with pytest.raises(ConfigError, match="NUM_REPLICA_GROUPS is 'two'"):
        ReplicaSampler(26, 2)
