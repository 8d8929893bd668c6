"""Find the ranks that still answer after a collective has failed: the ranks write once more into the store they met in, and name the
missing ones.
"""

from __future__ import annotations

import os
import platform
import threading
import time

import torch.distributed as dist

from hf_zero.comm.process_groups import FAKE, default_store

SECONDS_TO_ANSWER = 5.0
_MORE = 3.0  # additional seconds for the store to answer
_NAMED = 8  # maximum number of ranks that are named
_KEY = "hf_zero_roll_call"
_signed_in: dist.Store | None = None
_verdict: tuple[dist.Store, str] | None = None


def sign_in() -> None:
    """Write this rank's host into the default group's store, for ranks that outlive it; local, once per default group."""
    global _signed_in
    store = default_store()
    if store is None or store is _signed_in or dist.get_world_size() == 1:
        return
    if FAKE not in str(dist.get_backend_config()):  # a store that keeps nothing
        store.set(f"{_KEY}/host/{dist.get_rank()}", platform.node())
        _signed_in = store


def call_roll() -> str:
    """Return as text which ranks do not answer, and on which hosts; an empty text if no rank can be asked.

    [Note: roll call] The error of a back end names no rank: at best an address, or that a timeout expired. The connections of a dead rank
    close, or the timeout expires, so the other ranks fail within a short time of each other and call this function. They count themselves
    in the store. The first one waits for the others, looks up the missing ranks and their hosts, and writes the verdict, for which the
    others wait: there are as many messages as ranks. A rank that is still computing answers at its next collective, perhaps too late. The
    store may have died with its host, or be unreachable from here, and its calls have no time limit; so a thread makes them, and is
    abandoned if it does not return. This runs once per default group: after the first failure the state of the ranks is unknown.
    """
    global _verdict
    store = default_store()
    if store is None or store is not _signed_in:
        return ""
    if _verdict is None or _verdict[0] is not store:
        told: list[str] = []
        asking = threading.Thread(target=lambda: told.append(_ask(store)), daemon=True, name="hf_zero roll call")
        asking.start()
        asking.join(SECONDS_TO_ANSWER + _MORE)
        _verdict = store, told[0] if told else _unreached()
    return _verdict[1]


def _unreached() -> str:
    place = f"{os.environ.get('MASTER_ADDR', 'the host of rank 0')}:{os.environ.get('MASTER_PORT', '?')}"
    return f"the store in which the ranks met at {place} does not answer: that host has died, or cannot be reached from here"


def _ask(store: dist.Store) -> str:
    try:
        store.set(f"{_KEY}/here/{dist.get_rank()}", "1")
        if store.add(f"{_KEY}/answered", 1) == 1:
            store.set(f"{_KEY}/verdict", _wait_for_all(store))
        return bytes(store.get(f"{_KEY}/verdict")).decode()
    except RuntimeError:  # torch's errors of stores and networks are RuntimeErrors
        return _unreached()


def _wait_for_all(store: dist.Store) -> str:
    world, deadline = dist.get_world_size(), time.monotonic() + SECONDS_TO_ANSWER
    while store.add(f"{_KEY}/answered", 0) < world:
        if time.monotonic() > deadline:
            missing = [rank for rank in range(world) if not store.check([f"{_KEY}/here/{rank}"])]
            return f"{_places(store, missing)} did not answer within {SECONDS_TO_ANSWER:g} s" if missing else _ALL
        time.sleep(0.05)
    return _ALL


_ALL = "all ranks answer, so they run different sequences of steps, or the network between them failed"


def _places(store: dist.Store, ranks: list[int]) -> str:
    """Return text such as ``ranks 2 and 3 on node-2, rank 5 on node-3``."""
    hosts: dict[str, list[int]] = {}
    for rank in ranks[:_NAMED]:
        key = f"{_KEY}/host/{rank}"
        hosts.setdefault(bytes(store.get(key)).decode() if store.check([key]) else "an unknown host", []).append(rank)
    named = ", ".join(f"{numbered(there)} on {host}" for host, there in hosts.items())
    return named if len(ranks) <= _NAMED else f"{named} and {len(ranks) - _NAMED} more ranks"


def numbered(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
