"""Find out whether the other ranks join a collective call that a script may have meant for one rank alone, without an endless wait.

[Note: calls of one rank] At stage 3 all ranks load a model together. A script that has finished training may load one on rank 0 alone,
while the other ranks wait at its next barrier: then neither side continues. A rank cannot detect this from its own state. So ranks that
reach the call count themselves in the store, and a rank that has waited for a moment asks where the others are, like a report of a long
wait ([Note: long waits]). If another rank waits in a collective that this rank has not issued, in a group of both, that rank waits for this
one; each would wait for the other, so the call belongs to this rank alone. The same holds if another rank has ended, or has
destroyed the default group (accelerate's `end_training`). A rank that is computing may still come, and is asked again.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from hf_zero.comm import hang_watch
from hf_zero.comm.rank_status import RankStatus, issued

_PATIENCE = 1.0  # seconds before other ranks are asked: ranks seldom arrive at the same time
_OFTEN = 0.02
_ROUND = 6.0  # seconds until the next ranks are asked; the answering threads look every five seconds
_ASKED = 8  # number of ranks asked in one round

_joint = 0  # number of calls that all ranks have joined
_of: dist.Store | None = None


def comes_alone() -> bool:
    """Wait until all ranks have called this function, or until it is certain that some will not; collective, or called by one rank alone.

    Returns:
        True if this rank is alone, or has destroyed the default group, without which no rank can be expected; False if there are no other
        ranks, or if they cannot be asked because there is no engine yet.
    """
    global _joint, _of
    if hang_watch.group_is_gone():
        return True
    base = hang_watch.joint_store()
    if base is None or dist.get_world_size() == 1:
        return False
    if _of is not base:
        _joint, _of = 0, base
    store, world, key = dist.PrefixStore(hang_watch.KEY, base), dist.get_world_size(), f"joint/{_joint}"
    store.add(key, 1)
    if hang_watch.current() is None:  # the store did not answer
        _joint += 1
        return False
    start, rounds = time.monotonic(), 0
    question, asked = 0, start + _PATIENCE - _ROUND
    while store.add(key, 0) < world:
        now = time.monotonic()
        if now - asked > _ROUND:
            question, asked, rounds = store.add("asked", 1), now, rounds + 1
        if question and any(_is_elsewhere(store, rank, question) for rank in _those_of_round(rounds - 1)):
            store.add(key, -1)
            return True
        time.sleep(_OFTEN)
    _joint += 1
    return False


def _those_of_round(number: int) -> list[int]:
    """Return the ranks to ask in round ``number``, starting with the rank after this one."""
    world, own = dist.get_world_size(), dist.get_rank()
    others = [(own + 1 + step) % world for step in range(world - 1)]
    first = number * _ASKED % len(others)
    return others[first : first + _ASKED]


def _is_elsewhere(store: dist.Store, rank: int, question: int) -> bool:
    """Return whether it is certain that ``rank`` will not call before this rank continues."""
    if not store.check([key := f"status/{rank}"]):
        return False
    number, _, text = bytes(store.get(key)).decode().partition(" ")
    if text == hang_watch.ENDED:
        return True
    return int(number) >= question and _waits_for_this_rank(RankStatus.from_text(text))


def _waits_for_this_rank(other: RankStatus) -> bool:
    own = issued()
    return bool(other.operation) and other.issued.get(other.group, 0) > own.get(other.group, other.issued.get(other.group, 0))
