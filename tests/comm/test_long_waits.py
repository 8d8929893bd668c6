"""What ranks say of a wait that takes long: for what, for whom, and where those are; and that no thread stays."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero import observe
from hf_zero.comm import hang_watch, rank_status
from hf_zero.comm.collectives import _collective_error
from hf_zero.comm.hang_watch import HangWatch, LongWaits, report
from hf_zero.comm.rank_status import RankStatus
from hf_zero.system import stacks
from tests.support import processes, ranks

SECONDS = 0.3
LATE = "in until"
WAITING = "waits for barrier"
STOPPED = "No answer from rank 0"
IN_LIBRARY = r"(?: \(in [^)]*\))?"
"""The second half of a place, for a thread that is inside of a library's function (of pathlib, when it looks for a file)."""
TELLING = {("chain", 2): WAITING}
"""Words of the report that the late rank waits for, by kind of wait and rank; for all others ``LATE``."""


class _Reports(logging.Handler):
    """Keeps what this rank's thread says, and marks in a folder that it has."""

    def __init__(self, told: Callable[[str], None]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        if record.threadName == "hf_zero long waits":
            self.lines.append(record.getMessage())
            self._told(record.getMessage())


@contextmanager
def _reports(told: Callable[[str], None]) -> Iterator[list[str]]:
    handler = _Reports(told)
    logging.getLogger("hf_zero").addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger("hf_zero").removeHandler(handler)


def until(*marks: Path) -> None:
    """Where the late rank is."""
    for mark in marks:
        processes.until(mark.exists, str(mark))


def _engine(stage: int = 3, seconds: float = SECONDS) -> Any:
    net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3)])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "hf_zero": {"hang_report_s": seconds},
    }
    return hf_zero.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def _step(engine: Any, late: Callable[[], None] | None = None) -> None:
    loss = engine(torch.ones(2, 8)).sum()
    if late is not None:
        loss.register_hook(lambda _: late())
    engine.backward(loss)
    engine.step()


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hf_zero long waits"]


def _all_kinds(folder: Path) -> dict[str, list[str]]:
    me, found = dist.get_rank(), {}
    hang_watch._AGAIN = 2  # on a busy machine a first report may come before the late rank is where it stays
    pair, other_pair = dist.new_group([0, 1]), dist.new_group([1, 2])
    engine, second = _engine(), _engine(0)
    assert len(_threads()) == 1
    _step(engine)

    def run(kind: str, body: Callable[[], None]) -> None:
        def mark(line: str) -> None:
            if TELLING.get((kind, me), LATE) in line:  # on a busy machine other waits are long as well
                (folder / f"{kind}-{me}").touch()

        with _reports(mark) as lines:
            body()
            dist.barrier()
        found[kind] = lines

    def marks(kind: str, *others: int) -> list[Path]:
        return [folder / f"{kind}-{rank}" for rank in others]

    def backward() -> None:
        _step(engine, (lambda: until(*marks("backward", 0, 2))) if me == 1 else None)

    def alone() -> None:
        if me == 1:
            until(*marks("alone", 0, 2))
        with hf_zero.zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}):
            torch.nn.Linear(8, 8)

    def chain() -> None:
        if me == 0:
            until(*marks("chain", 1, 2))
        if me < 2:
            dist.barrier(pair)
        if me > 0:
            dist.barrier(other_pair)

    def stopped() -> None:
        if me == 0:
            (folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    run("backward", backward)
    run("alone", alone)
    run("chain", chain)
    if me == 1:  # wakes the rank that has been stopped
        woken: list[str] = []

        def wake(line: str) -> None:
            if STOPPED in line and not woken:
                woken.append(line)
                os.kill(int((folder / "pid").read_text()), signal.SIGCONT)

        with _reports(wake) as found["stopped"]:
            stopped()
    else:
        stopped()
    second.destroy()
    assert len(_threads()) == 1
    _step(engine)
    engine.destroy()
    assert len(_threads()) == 1, "it answers other ranks until the group ends"
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="stops a process")
def test_each_kind_of_long_wait_is_told_by_those_that_wait(tmp_path: Path) -> None:
    first, second, third = ranks.run_ranks(_all_kinds, 3, tmp_path, ordered=False)  # ranks are apart on purpose
    late = rf"rank 1 on \S+ is at \S*processes.py:\d+ in until{IN_LIBRARY}"
    for rank, found in ((0, first), (2, third)):
        line = _telling(found["backward"], LATE)
        assert re.fullmatch(rf"rank {rank} on \S+ has waited \d+ s for hf_zero::\w+ \(\S+\), in backward, block \S+, at .*", line), line
        assert re.fullmatch(rf".* Not come: {late}, in backward, \d+ s after hf_zero::.*", line), line
        line = _telling(found["alone"], LATE)
        assert re.fullmatch(rf".* for hf_zero::all_reduce \(.*\), at .* Not come: {late}.*", line), line
    late_ones = [line for kind in ("backward", "alone") for line in second[kind]]
    assert not [line for line in late_ones if LATE in line.partition(" Not come: ")[0]], "a rank that does not wait says nothing"
    waits = r"rank 1 on \S+ waits for barrier, at .*"
    assert re.fullmatch(rf"rank 2 on \S+ has waited .* s for barrier, at .* Not come: {waits}", _telling(third["chain"], WAITING))
    late = rf"rank 0 on \S+ is at \S*processes.py:\d+ in until{IN_LIBRARY}"
    assert re.fullmatch(rf".* Not come: {late}.*", _telling(second["chain"], LATE))
    assert re.fullmatch(r".* for barrier, .* No answer from rank 0: ended, stopped .*", _telling(second["stopped"], STOPPED))


def _telling(lines: list[str], words: str) -> str:
    """Return the first line that has these words; a wait that another load of the machine made long may be told before."""
    found = [line for line in lines if words in line]
    assert found, lines
    return found[0]


def _off() -> list[str]:
    _threads_after_a_while()  # those of earlier calls in this process
    engine = _engine(1, seconds=0)
    threads = _threads()
    engine.destroy()
    left = _engine(1)
    assert len(_threads()) == 1
    del left  # never destroyed
    return threads


def test_no_thread_where_it_is_off_and_none_after_the_group() -> None:
    assert ranks.run_ranks(_off, 2) == [[], []]
    assert not any(ranks.run_ranks(_threads_after_a_while, 2)), "the group of the call before has gone"


def _threads_after_a_while() -> list[str]:
    processes.until(lambda: not _threads(), "the end of the thread")
    return _threads()


WAITS = RankStatus("hf_zero::vote (x)", "1", "a.py:1 in f", issued={"0": 3, "1": 7}, host="node-0")


@pytest.mark.parametrize(
    ("answers", "silent", "end"),
    [
        ({1: RankStatus("hf_zero::vote (x)", "1", "a.py:1 in f", issued={"1": 7})}, [], "All ranks have reached this collective, so "),
        ({1: RankStatus(place="b.py:2 in g", issued={"0": 9, "1": 6}, host="h")}, [], "Not come: rank 1 on h is at b.py:2 in g"),
        # It has issued its part and computes; and more elsewhere.
        (
            {1: RankStatus(place="b.py:2 in g", issued={"0": 9, "1": 7}, host="h")},
            [],
            "is slow or broken. Elsewhere: rank 1 on h is at b.py:2",
        ),
        # Rank 1 has come to another place than the making of a group, which no back end counts.
        (
            {1: RankStatus(place="b.py:2 in g", issued={"1": 7}, host="h")},
            None,
            "new_group, at a.py:1 in f. Not come: rank 1 on h is at b.py:2",
        ),
        # Rank 1 waits for rank 2, in the same vote.
        (
            {1: RankStatus("hf_zero::vote (x)", "1", issued={"1": 6}), 2: RankStatus(place="b.py:2 in g", issued={"1": 5}, host="h")},
            [],
            "f. Not come: rank 2 on h is at b.py:2 in g",
        ),
        # Rank 1 waits in another group for this rank.
        (
            {1: RankStatus("barrier", "0", "b.py:2 in g", issued={"0": 4, "1": 6}, host="h")},
            [],
            "Not come: rank 1 on h waits for barrier, at b.py:2 in g. These ranks wait for each other until the time-out: make the same "
            "calls on all ranks, in the same order. Saves of checkpoints are such calls, and at stage 3 forwards without gradients",
        ),
        ({1: RankStatus("hf_zero::vote (x)", "1", issued={"1": 6})}, [2, 3], "f. No answer from ranks 2 and 3: ended, stopped"),
        ({}, list(range(1, 12)), "f. No answer from ranks 1, 2, 3, 4, 5, 6, 7 and 8 and 3 more: ended"),
        ({rank: RankStatus(place="b", host="h", issued={"1": 0}) for rank in range(1, 11)}, [], "rank 8 on h is at b; and 2 more ranks"),
    ],
)
def test_who_is_named(answers: dict[int, RankStatus], silent: list[int] | None, end: str) -> None:
    waits = WAITS if silent is not None else replace(WAITS, operation="new_group", group="")
    line = report(0, 31.4, waits, answers, silent or [])
    assert line.startswith(f"rank 0 on node-0 has waited 31 s for {waits.operation}, at a.py:1 in f. ")
    assert end in line


def test_the_error_that_ends_a_wait_repeats_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    store, places = dist.HashStore(), iter([("here",), ("here",), ("here",), ("elsewhere",)])
    monkeypatch.setattr(hang_watch, "moment", lambda: next(places))
    monkeypatch.setattr(hang_watch, "look", lambda device: WAITS)
    watch, owner = HangWatch(store, store, 0, 2), LongWaits(0)
    watch.owners[owner] = 1e-9
    try:
        watch._look()
        watch._look()  # asks
        store.set("status/1", f"1 {RankStatus(place='b.py:2 in g', issued={'1': 6}, host='h').as_text()}")
        watch._look()
        said = " s for hf_zero::vote (x), at a.py:1 in f. Not come: rank 1 on h is at b.py:2 in g."
        assert said in str(_collective_error("hf_zero::vote (x)", RuntimeError("closed"))) and said in observe.long_wait()
        watch._look()
        assert not observe.long_wait(), "the rank has continued"
        assert "Not come" not in str(_collective_error("hf_zero::vote (x)", RuntimeError("closed")))
    finally:
        observe.set_long_wait("")


def test_a_standing_travels_as_it_is() -> None:
    assert RankStatus.from_text(WAITS.as_text()) == WAITS


def _waits_by_itself(future: torch.futures.Future[int]) -> None:
    future.wait()


def test_a_wait_of_a_script_for_its_own_work_is_seen() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    waiting = threading.Thread(target=_waits_by_itself, args=(future,))
    waiting.start()

    def seen() -> tuple[Any, Any, str]:
        with stacks.threads_of_others() as frames:
            waits = (frame for frame in frames if any(one.f_code is _waits_by_itself.__code__ for one in stacks.outer_frames(frame)))
            frame = next(waits, None)
            if frame is None:  # the thread has not come so far
                return None, None, ""
            return rank_status._operation(frame, main=True), rank_status._operation(frame, main=False), stacks.place(frame)

    processes.until(lambda: seen()[0], "the thread's wait")
    found, beside, place = seen()
    future.set_result(0)
    waiting.join()
    assert found == ("a wait of the script's", None) and beside is None
    assert re.fullmatch(r"comm/test_long_waits.py:\d+ in _waits_by_itself .*", place)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_frames_are_read(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12, a destructor that runs while another thread's frames are made can corrupt memory or stop the process."""
    outer, during, before = stacks.outer_frames, [], gc.isenabled()

    def recorded(frame: FrameType | None) -> Iterator[FrameType]:
        for one in outer(frame):
            during.append(gc.isenabled())
            yield one

    monkeypatch.setattr(stacks, "_COLLECTS_INSIDE", True)
    monkeypatch.setattr(stacks, "outer_frames", recorded)
    try:
        (gc.enable if enabled else gc.disable)()
        looking = threading.Thread(target=lambda: (rank_status.look(), rank_status.moment()))
        looking.start()
        looking.join()
        assert during and not any(during) and gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


class _Gone(dist.HashStore):
    """As a store whose process has ended."""

    def add(self, key: str, amount: int) -> int:  # type: ignore[override]
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_has_gone_is_no_error_and_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(hang_watch, "default_store", lambda: store)
    monkeypatch.setattr(hang_watch, "moment", lambda: ("at the same place",))
    monkeypatch.setattr(hang_watch, "look", lambda device: WAITS)
    owner = LongWaits(0)
    watch = HangWatch(store, _Gone(), 0, 2)
    watch.owners[owner] = 0.01
    with _reports(lambda _: None) as lines:
        watch.start()
        watch.join(processes.MOST_SECONDS)
    assert not watch.is_alive()
    assert len(lines) <= 1 and all(line.endswith("the process that keeps it has ended or hangs") for line in lines)


class _Slow(dist.HashStore):
    """As a store on a busy machine: a call takes longer than the end of a thread is waited for where the process goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.called = threading.Event()

    def add(self, key: str, amount: int) -> int:  # type: ignore[override]
        self.called.set()
        time.sleep(1.5)
        return 0


def test_a_process_does_not_end_while_the_thread_is_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, own, owner = dist.HashStore(), _Slow(), LongWaits(0)
    monkeypatch.setattr(hang_watch, "default_store", lambda: store)
    watch = HangWatch(store, own, 0, 2)
    watch.owners[owner] = 0.01
    watch.start()
    assert own.called.wait(processes.MOST_SECONDS)
    watch.stop(process=True)
    assert not watch.is_alive()
    assert own.get("status/0") == b"0 " + hang_watch.ENDED.encode()


def test_a_store_nobody_listens_for_is_noticed_without_asking_it() -> None:
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = hang_watch._own_connection(dist.PrefixStore("group", kept), 2)
    hang_watch._require_listener(own)
    assert own is not None and own.add("asked", 1) == 1, "the server goes on"
    del kept
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:\d+: .*refused"):
        hang_watch._require_listener(own)


def test_a_large_world_opens_no_further_connections() -> None:
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for world, shared in ((2, False), (5000, True)):
        own = hang_watch._own_connection(kept, world)
        assert isinstance(own, dist.PrefixStore) and (own.underlying_store is kept) == shared


@pytest.mark.parametrize("finished", [False, True])
def test_a_host_that_stands_still_waits_where_its_device_has_not_finished(finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def uncounted(_device: torch.device) -> None:
        raise RuntimeError("no back end")

    group = SimpleNamespace(_device_types=[torch.device("cuda")], _get_backend=uncounted)
    monkeypatch.setattr(rank_status, "default_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(rank_status, "groups_of_this_rank", lambda: [group])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: SimpleNamespace(query=lambda: finished))
    found: list[Any] = []
    looking = threading.Thread(target=lambda: found.extend([rank_status.look(device=True), rank_status.look(), rank_status.moment()]))
    looking.start()
    looking.join()
    asked, unasked, moment = found
    assert asked.operation.startswith("work of its device") != finished and unasked.operation == ""
    assert moment is not None, "it may wait"
