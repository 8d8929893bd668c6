"""Signals that ask ranks to end: all save the same step once and end with one status; the resumed run is the one that never stopped."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_zero.errors import ConfigError
from hf_zero.utils import end_preempted
from tests.support import parity, ranks, signalled
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps
from tests.support.models import CASES
from tests.support.parity import Run

TOTAL = 5


def _script(folder: str, stage: int, receivers: dict[int, tuple[int, ...]], asks: bool = True, **extra: Any) -> tuple[int, dict[str, Any]]:
    """Resumes from ``folder`` and trains to the end, or until a signal: those of ``receivers`` come in the middle of a step.

    Returns the step at its beginning and the state at its end.
    """
    import hf_zero

    with signalled.new_process():
        engine = start(stage, **extra)
        engine.load_checkpoint(folder)
        first = engine.global_steps
        try:
            if asks:
                assert not hf_zero.utils.preempted()
            for step in range(first, TOTAL):
                signalled.send(*receivers.get(step, ()))
                steps(engine, step, 1)
                assert not asks or hf_zero.utils.preempted() == engine.preempted == bool(receivers.get(step))
                if asks and hf_zero.utils.preempted():
                    engine.save_checkpoint(folder)
                    hf_zero.utils.end_preempted()
            return first, full_state(engine)
        finally:
            engine.destroy()


def _cases(folder: str) -> None:
    """Signals to one rank, the other, and both at different steps; a script that asks, and an engine that saves by itself."""
    former = signal.getsignal(signal.SIGTERM)
    _, reference = _script(f"{folder}/none", 2, {})
    cases: list[tuple[int, bool, dict[int, tuple[int, ...]], dict[str, Any]]] = [
        (2, True, {1: (1,)}, {}),
        (3, True, {0: (0, 1), 3: (0,)}, IN_BACKGROUND),
        (1, False, {2: (1,)}, {"hf_zero": {"preemption_save_dir": f"{folder}/2"}}),
    ]
    for number, (stage, asks, receivers, extra) in enumerate(cases):
        place = f"{folder}/{number}"
        saved = [step + 1 for step in receivers]
        for step in receivers:
            assert signalled.preempted(lambda: _script(place, stage, {step: receivers[step]}, asks, **extra))  # noqa: B023
        if ranks.rank() == 0:
            assert sorted(path.name for path in Path(place).glob("global_step*")) == [f"global_step{step}" for step in saved]
        first, state = _script(place, stage, {}, asks, **extra)
        assert first == saved[-1]
        assert not differences(state, reference), f"case {number}"
    assert signal.getsignal(signal.SIGTERM) is former


def test_all_ranks_save_the_same_step_once_and_resume_bit_for_bit(tmp_path: Path) -> None:
    ranks.run_ranks(_cases, 2, str(tmp_path))


def _handlers(folder: str) -> None:
    """What was there is called and put back, other processes are none of it, and what nobody answers is delivered."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    try:
        own = signal.getsignal(signal.SIGUSR2)
        with signalled.new_process():
            engine = start(1, hf_zero={"preemption_signal": "usr2"})
            assert signal.getsignal(signal.SIGUSR2) is not own
            signalled.send(0, number=signal.SIGUSR2)
            assert heard == [signal.SIGUSR2] * (ranks.rank() == 0)  # the former handler, once
            child = os.fork()
            if child == 0:
                os._exit(signal.getsignal(signal.SIGUSR2) is own)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
            steps(engine, 0, 1)
            assert engine.preempted and engine.preemption.signal == "SIGUSR2"
            engine.destroy()
            assert signal.getsignal(signal.SIGUSR2) is own and len(heard) == (ranks.rank() == 0)  # answered
        with signalled.new_process():
            engine = start(1, hf_zero={"preemption_signal": 12})
            signalled.send(1, number=signal.SIGUSR2)
            engine.destroy()  # without a step in between
            assert len(heard) == (1 if ranks.rank() == 0 else 2), heard
        with signalled.new_process():
            engine, terminate = start(1), signal.getsignal(signal.SIGTERM)
            if ranks.rank() == 0:  # a thread cannot install a handler; the rank is told by the other
                with ThreadPoolExecutor(1) as pool:
                    assert not pool.submit(lambda: engine.preempted).result()
                assert signal.getsignal(signal.SIGTERM) is terminate and engine.preemption.listens
            assert not engine.preempted or ranks.rank() == 0
            signalled.send(1)
            steps(engine, 0, 1)
            assert engine.preempted
            engine.destroy()
        with signalled.new_process():
            settings = {"preemption_save_dir": f"{folder}/own"}
            engine = start(1, hf_zero=settings)
            with pytest.raises(ConfigError, match="preemption_save_dir"):
                start(2, hf_zero=settings)
            engine.destroy()
        with signalled.new_process():
            engine = start(1, hf_zero={"preemption_signal": "none"})
            assert not engine.preempted and signal.getsignal(signal.SIGUSR2) is own
            engine.destroy()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_handlers_are_chained_and_put_back(tmp_path: Path) -> None:
    ranks.run_ranks(_handlers, 2, str(tmp_path))


def _parts(folder: str, sections: list[dict[str, Any]]) -> None:
    """Ranks that hold one model together are on different data-parallel axes, and hear of it all the same."""
    for number, extra in enumerate(sections):
        case = CASES["llama"]
        with signalled.new_process():
            engine = parity.initialize(case.build(), Run(stage=1, dtype="fp32", extra=extra))
            assert not engine.preempted
            for step in range(2):
                signalled.send(*((1,) if step == 1 else ()))
                parity.micro_step(engine, parity.prepare(case.rows(step, 0, 0), parity.DTYPES["fp32"]), case.forward, 0)
                assert engine.preempted == (step == 1), (extra, step)
            engine.save_checkpoint(f"{folder}/{number}")
            assert signalled.preempted(end_preempted)
            engine.destroy()


@pytest.mark.slow  # fast: `test_all_ranks_save_the_same_step_once_and_resume_bit_for_bit`
def test_ranks_with_other_parts_of_the_model_hear_of_it(tmp_path: Path) -> None:
    ranks.run_ranks(_parts, 2, str(tmp_path), [{"tensor_parallel": {"autotp_size": 2}}, {"pipeline": {"stages": 2}}])
