"""Updates and reads of offloaded values that break off, by an error of the disk or an interrupt: nothing stale is used after that."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.errors import CheckpointError, OffloadError, StateError
from hf_zero.offload import files, updates
from tests.support import ranks
from tests.support.models import CASES, cast_floats
from tests.support.offload_runs import blocks_of, differing, sections, state_of, ways
from tests.support.parity import Run, initialize, train

CASE = CASES["odd_mlp"]
# Name -> (object, name of its function, class and arguments of the error that its k-th call raises).
BREAKS: dict[str, tuple[Any, str, type[BaseException], tuple[Any, ...]]] = {
    "read": (os, "preadv", OSError, (errno.EIO, "Input/output error")),
    "write": (os, "pwrite", OSError, (errno.ENOSPC, "No space left on device")),
    "wait": (files.Transfer, "wait", KeyboardInterrupt, ()),
}


def make(run: Run, blocks: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return initialize(CASE.build(), replace(run, extra=sections(run.stage, blocks)))


def steps(engine: Any, run: Run, first: int, count: int) -> None:
    train(engine, lambda step, micro, rank: CASE.rows(first + step, micro, rank), CASE.forward, replace(run, steps=count))


def step(engine: Any, number: int) -> None:
    """Take one step in bf16, without collectives of the test's own."""
    engine.backward(CASE.forward(engine, cast_floats(CASE.rows(number, 0, ranks.rank()), torch.bfloat16)))
    engine.step()


def destroy(engine: Any) -> None:
    engine.destroy()
    del engine
    gc.collect()


@contextmanager
def breaking(name: str, number: int) -> Iterator[None]:
    """Let call ``number`` of a function raise its error, once."""
    place, attribute, error, arguments = BREAKS[name]
    real, calls = getattr(place, attribute), iter(range(1, 10**6))

    def broken(*args: Any) -> Any:
        if next(calls) == number:
            raise error(*arguments)
        return real(*args)

    with mock.patch.object(place, attribute, broken):
        yield


def _expected(run: Run, folder: str) -> dict[str, torch.Tensor]:
    """Return the state after four steps without offload and without an interrupt."""
    plain = make(run, {})
    steps(plain, run, 0, 4)
    expected = state_of(plain)
    destroy(plain)
    return expected


def _broken_updates(stage: int, dtype: str, label: str, folder: str) -> list[str]:
    """Load and go on after updates that broke off at different places; return the states that differ."""
    run, wrong = Run(stage=stage, dtype=dtype), []
    expected = _expected(run, folder)
    with blocks_of(ways(stage)[label]) as blocks:
        engine = make(run, blocks)
        steps(engine, run, 0, 2)
        engine.save_checkpoint(folder, tag="here")
        for name in BREAKS:
            for number in (1, 2, 4):
                with breaking(name, number), pytest.raises((OffloadError, KeyboardInterrupt)):
                    steps(engine, run, 2, 3)
                engine.zero_grad()
                with pytest.raises(StateError, match="broke off .*Load a checkpoint with its optimizer states .engine.load_checkpoint"):
                    steps(engine, run, 2, 1)
                with pytest.raises(CheckpointError, match="in files broke off"):
                    engine.save_checkpoint(folder, tag="broken")
                engine.load_checkpoint(folder, tag="here")
                engine.zero_grad()
                steps(engine, run, 2, 2)
                wrong += [f"{name} {number}: {what}" for what in differing(state_of(engine), expected)]
                engine.load_checkpoint(folder, tag="here")
        destroy(engine)
        del engine
        gc.collect()
    return wrong


@pytest.mark.parametrize(
    ("stage", "dtype", "label"),
    [
        (2, "fp32", "nvme"),
        (2, "bf16", "nvme, pipelined, apart"),
        pytest.param(1, "bf16", "nvme, one buffer", marks=pytest.mark.slow),
        pytest.param(3, "fp32", "nvme, pipelined", marks=pytest.mark.slow),
    ],
)
def test_a_load_after_an_update_in_files_that_broke_off_leaves_nothing_of_it(tmp_path: Path, stage: int, dtype: str, label: str) -> None:
    assert ranks.run_ranks(_broken_updates, 2, stage, dtype, label, str(tmp_path)) == [[], []]


def _refused_on_all(label: str, folder: str) -> list[str]:
    """One rank's update breaks off; return what a further step and a save say."""
    run = Run(stage=3, dtype="bf16")
    with blocks_of(ways(3)[label]) as blocks:
        engine = make(run, blocks)
        step(engine, 0)
        if ranks.rank() == 1:
            with breaking("write", 1), pytest.raises(OffloadError):
                step(engine, 1)
        else:
            step(engine, 1)
        engine.zero_grad()
        with pytest.raises(StateError) as refused:
            step(engine, 2)
        with pytest.raises(CheckpointError) as unsaved:
            engine.save_checkpoint(folder, tag="broken")
        said = [str(refused.value), str(unsaved.value)]
        destroy(engine)
        del engine
        gc.collect()
    return said


def test_all_ranks_refuse_a_step_after_the_update_of_one_broke_off(tmp_path: Path) -> None:
    first, second = ranks.run_ranks(_refused_on_all, 2, "nvme", str(tmp_path))
    assert first == second and all("broke off (OffloadError: cannot write" in text and "(rank 1)" in text for text in first)


# -- updates that continue after a step --------------------------------------------------------------------------------


def _interrupted_waits(label: str, folder: str) -> list[str]:
    """A wait for an update is interrupted, and a checkpoint is loaded while the update still runs."""
    run = Run(stage=3, dtype="bf16")
    expected = _expected(run, folder)
    update = updates.UnitUpdate.run

    def slow(self: Any) -> None:
        time.sleep(0.2)
        update(self)

    with blocks_of(ways(3)[label]) as blocks:
        engine = make(run, blocks)
        steps(engine, run, 0, 2)
        engine.save_checkpoint(folder, tag=label)
        with mock.patch.object(updates.UnitUpdate, "run", slow):
            steps_and_wait(engine)
            engine.load_checkpoint(folder, tag=label)
        return _ended(engine, run, expected)


def _ended(engine: Any, run: Run, expected: Any) -> list[str]:
    """Train the rest after a load, and return the names of values that are not those of the run without a break."""
    engine.zero_grad()
    steps(engine, run, 2, 2)
    wrong = differing(state_of(engine), expected)
    destroy(engine)
    return wrong


def steps_and_wait(engine: Any) -> None:
    """Take a step, and look at the optimizer's states as a script does; the wait for the last unit is interrupted in this look."""
    step(engine, 2)
    exception, waits = Future.exception, iter(range(len(engine.optimizer.state_store._underway), 0, -1))
    here = threading.get_ident()  # the updates wait for their own reads and writes

    def interrupted(self: Any, timeout: Any = None) -> Any:
        if threading.get_ident() == here and next(waits) == 1:
            raise KeyboardInterrupt
        return exception(self, timeout)

    with mock.patch.object(Future, "exception", interrupted), mock.patch.object(Future, "result", interrupted):
        with pytest.raises(KeyboardInterrupt):
            engine.optimizer.state_dict()


@pytest.mark.parametrize("label", ["both cpu, apart, forward", pytest.param("nvme, overlap", marks=pytest.mark.slow)])
def test_an_update_whose_wait_was_interrupted_is_waited_for_before_a_load(tmp_path: Path, label: str) -> None:
    assert ranks.run_ranks(_interrupted_waits, 2, label, str(tmp_path)) == [[], []]


def _failing_thread(folder: str) -> list[str]:
    """An update in the other thread fails; the load after it replaces everything."""
    run = Run(stage=3, dtype="bf16")
    expected = _expected(run, folder)
    with blocks_of(ways(3)["nvme, overlap"]) as blocks:
        engine = make(run, blocks)
        steps(engine, run, 0, 2)
        engine.save_checkpoint(folder, tag="here")
        with breaking("read", 2):
            step(engine, 2)
            time.sleep(0.2)
        engine.load_checkpoint(folder, tag="here")  # the first wait for the update
        return _ended(engine, run, expected)


def test_a_load_goes_on_after_an_update_in_the_other_thread_that_failed(tmp_path: Path) -> None:
    assert ranks.run_ranks(_failing_thread, 2, str(tmp_path)) == [[], []]


# -- transfers ---------------------------------------------------------------------------------------------------------


def _forwards_after_failing_reads() -> list[str]:
    """A forward whose read of a shard fails is run again; return the reads after which it has other outputs."""
    run, wrong = Run(stage=3, dtype="fp32"), []
    with blocks_of(ways(3)["parameters nvme"]) as blocks:
        engine = make(run, blocks)
        steps(engine, run, 0, 1)
        engine.eval()
        batch = CASE.rows(5, 0, 0)
        with torch.no_grad():
            expected = CASE.forward(engine, batch)
            for name in ("read", "wait"):
                for number in (1, 2, 3):
                    with breaking(name, number), pytest.raises((OffloadError, KeyboardInterrupt)):
                        for _ in range(3):
                            CASE.forward(engine, batch)
                    if not torch.equal(CASE.forward(engine, batch), expected):
                        wrong.append(f"{name} {number}")
        destroy(engine)
        del engine
        gc.collect()
    return wrong


def test_a_forward_after_a_failing_read_reads_again() -> None:
    assert ranks.run_ranks(_forwards_after_failing_reads, 1) == [[]]


def test_an_interrupted_wait_leaves_the_rest_to_the_next() -> None:
    """A buffer must not be used before all parts of its transfer have ended."""
    first, second = Future[None](), Future[None]()
    first.set_result(None)
    transfer, asked = files.Transfer([first, second]), []

    def interrupted(timeout: Any = None) -> None:
        asked.append("second")
        if len(asked) == 1:
            raise KeyboardInterrupt

    with mock.patch.object(second, "exception", interrupted):
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        transfer.wait()
        transfer.wait()
    assert asked == ["second", "second"]
