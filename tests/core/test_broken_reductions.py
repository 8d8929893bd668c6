"""Test that an error or interrupt in a backward reaches the caller and leaves nothing behind: not in the engine, nor in the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from hf_zero.comm.collectives import Pending
from hf_zero.core.schedule.backward_phase import SharedBackward
from hf_zero.errors import CollectiveError
from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, Trace, collect, initialize, prepare

MLP = CASES["mlp"]


def _no_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _micro_step(engine: Any, step: int) -> None:
    batch = prepare(MLP.rows(step, 0, ranks.rank()), engine.precision.param_dtype or torch.float32)
    engine.backward(class_loss(engine, batch))
    engine.step()


def _weights(engine: Any) -> dict[str, Tensor]:
    weights = collect(engine, Trace()).weights
    engine.destroy()
    return weights


@contextmanager
def _failing(error: BaseException, unit: str) -> Iterator[None]:
    """Raise ``error`` in place of taking the result of the reduction of ``unit``."""
    wait = Pending.wait

    def fail() -> Tensor:
        raise error

    def failing(self: Pending) -> None:
        if "reduce" in self.label and self.label.endswith(f"({unit})"):
            self.finish = fail
        wait(self)

    with mock.patch.object(Pending, "wait", failing):
        yield


def _broken_steps(stage: int) -> list[str]:
    """Return for each error what the caller sees; check the weights of a run that drops the gradients and repeats the step."""
    said: list[str] = []
    expected: dict[str, Tensor] = {}
    # The reduction of the root ends after the vote at the end of the backward: the other ranks learn nothing of an error there.
    cases: tuple[tuple[BaseException | None, str, tuple[int, ...]], ...] = (
        (None, "", ()),
        (_no_memory(), "blocks.2", (0,)),
        (_no_memory(), "root", (0, 1)),
        (KeyboardInterrupt(), "blocks.1", (0, 1)),
    )
    for error, unit, on in cases:
        engine = initialize(MLP.build(), Run(stage, dtype="bf16"))
        _micro_step(engine, 0)
        if error is not None:
            try:
                with _failing(error, unit if ranks.rank() in on else "no unit"):
                    _micro_step(engine, 1)
                said.append("nothing")
            except (RuntimeError, KeyboardInterrupt) as raised:
                assert isinstance(raised, KeyboardInterrupt) or should_reduce_batch_size(raised), raised
                said.append(type(raised).__name__)
            assert not SharedBackward._begun
            engine.zero_grad()
        _micro_step(engine, 1)
        weights = _weights(engine)
        expected = expected or weights
        assert all(torch.equal(value, expected[name]) for name, value in weights.items()), error
    return said


@pytest.mark.fast_rows("2")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_error_while_a_reduction_is_received_reaches_the_caller(stage: int) -> None:
    first, second = ranks.run_ranks(_broken_steps, 2, stage)
    assert first == ["OutOfMemoryError", "OutOfMemoryError", "KeyboardInterrupt"]
    assert second == ["StateError", "OutOfMemoryError", "KeyboardInterrupt"]


def test_a_result_that_was_lost_names_the_first_error() -> None:
    def fail() -> Tensor:
        raise ValueError("no bytes left")

    pending = Pending("all_reduce (test)", [], fail)
    with pytest.raises(ValueError, match="no bytes left"):
        pending.received()
    with pytest.raises(CollectiveError, match="an earlier wait for it ended with ValueError"):
        pending.received()
    pending.drop()


class _Work:
    """A work that a process group has begun; gloo never ends a second wait for it."""

    def __init__(self, interrupted: bool = False) -> None:
        self.waits, self.interrupted = 0, interrupted

    def wait(self) -> None:
        self.waits += 1
        if self.interrupted:
            raise KeyboardInterrupt


def test_each_work_is_waited_for_once() -> None:
    works = [_Work(), _Work(interrupted=True), _Work()]
    pending = Pending("all_reduce (test)", [*works, None])
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.drop()
    pending.drop()
    assert [work.waits for work in works] == [1, 1, 1]


def _interrupted(number: int) -> Any:
    """Return a function for ``sys.setprofile`` that interrupts the hook of a parameter with this number, counted from 0."""
    numbers = count()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "collect" and code.co_filename.endswith("backward_phase.py") and next(numbers) == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    return look


def _interrupted_backwards(stage: int, folder: str) -> None:
    expected: dict[str, Tensor] = {}
    for then in ("", "load", "repeat"):
        for number in (0, 3) if then else (0,):
            engine = initialize(MLP.build(), Run(stage))
            _micro_step(engine, 0)
            if then:
                engine.save_checkpoint(folder, tag=f"{then}{number}")
                sys.setprofile(_interrupted(number))
                with pytest.raises(KeyboardInterrupt):
                    _micro_step(engine, 1)
                assert all(param.grad is None for param in engine.module.parameters())
                if then == "load":
                    engine.load_checkpoint(folder, tag=f"{then}{number}")
            _micro_step(engine, 1)
            weights = _weights(engine)
            expected = expected or weights
            assert all(torch.equal(value, expected[name]) for name, value in weights.items()), (then, number)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_interrupt_leaves_no_gradient_to_the_next_backward(stage: int, tmp_path: Any) -> None:
    ranks.run_ranks(_interrupted_backwards, 2, stage, str(tmp_path))
