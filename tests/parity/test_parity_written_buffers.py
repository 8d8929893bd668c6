"""Test buffers that training writes: after each step all ranks have rank 0's values, so losses, weights and buffers are those of
DistributedDataParallel.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero import observe
from tests.support import ranks
from tests.support.logged import messages_of_log
from tests.support.parity import Run, initialize
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


class Codebook(nn.Module):
    """A layer whose training forward reads buffers and moves them towards this rank's batch.

    The codebook is written through ``.data``, as many implementations do; the queue is a new tensor after each forward; ``scale`` is
    written in place; the rest is constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm, self.head = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("book", torch.randn(6, 16))
        self.register_buffer("queue", torch.randn(5, 16))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("constant", torch.ones(32))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.entry(inputs))
        nearest = torch.cdist(hidden.detach(), self.book).argmin(-1)
        codes = self.book[nearest].clone()
        negatives = self.queue.clone()
        loss = self.head(hidden + (codes - hidden).detach()).square().mean() + (hidden - codes).square().mean() * self.scale.item()
        if self.training:
            self.book.data[nearest] = 0.7 * self.book[nearest] + 0.3 * hidden.detach()
            self.queue = torch.cat([self.queue, hidden.detach()])[-5:]
            self.scale *= 0.9 + 0.1 * inputs.mean().double()
        return loss + (hidden @ negatives.t()).logsumexp(-1).mean()


def _batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(ranks.rank())
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def _as_with_ddp(stage: int, accumulation: int) -> None:
    torch.manual_seed(0)
    model = Codebook()
    expected = DistributedDataParallel(copy.deepcopy(model))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    engine = initialize(model, Run(stage=stage, accumulation=accumulation, extra=SGD))
    batches = iter(_batches(5 * accumulation))
    for step in range(5):
        for micro_step in range(accumulation):
            inputs = next(batches)
            with nullcontext() if micro_step == accumulation - 1 else expected.no_sync():
                loss, expected_loss = engine(inputs), expected(inputs)
                torch.testing.assert_close(loss, expected_loss, msg=f"step {step}, micro-step {micro_step}")
                engine.backward(loss)
                engine.step()
                (expected_loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    same = torch.zeros(4, 8)
    torch.testing.assert_close(engine(same), expected(same))  # DDP sends buffers before a forward
    for name, buffer in expected.module.named_buffers():
        torch.testing.assert_close(engine.module.get_buffer(name), buffer, msg=name)
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but(STAGES, 1, 3))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_and_buffers_are_those_of_ddp(stage: int, accumulation: int) -> None:
    ranks.run_ranks(_as_with_ddp, 2, stage, accumulation)


class Counting(nn.Module):
    """A model with buffers that ranks update from their own batches, each in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(8), persistent=False)
        self.register_buffer("named", torch.zeros(8))
        self.register_buffer("shared", torch.zeros(8))
        self.register_buffer("late", torch.zeros(8))
        self.register_buffer("longest", torch.zeros(1))
        self.calls = 0
        self.register_buffer("mean", nn.Parameter(torch.zeros(8), requires_grad=False))
        self.norm: nn.Module = nn.Identity()
        self._ddp_params_and_buffers_to_ignore = ["named"]

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        mean = inputs.mean(0)
        for buffer in (self.cache, self.named, self.shared, self.mean):
            buffer += mean
        self.norm(inputs)
        if self.calls >= 3:
            self.late += mean
        self.longest = torch.zeros(1 + ranks.rank())
        if "made" not in self._buffers:
            self.register_buffer("made", mean)
        return self.layer(inputs).square().mean()


def _of_rank_zero(engine, name: str) -> bool:  # type: ignore[no-untyped-def]
    """Return whether all ranks have rank 0's values; collective."""
    own: Tensor = engine.module.get_buffer(name)
    first = own.clone()
    torch.distributed.broadcast(first, 0)
    equal = torch.tensor(float(torch.equal(own, first)))
    torch.distributed.all_reduce(equal, torch.distributed.ReduceOp.MIN)
    return bool(equal)


def _which_are_sent(stage: int) -> list[str]:
    """Train eight steps; return the lines about buffers in the log."""
    with messages_of_log() as lines:
        engine = initialize(Counting(), Run(stage=stage, extra=SGD))
        for step, inputs in enumerate(_batches(8)):
            if step in (2, 5):
                engine.module.norm = nn.BatchNorm1d(8, affine=False)  # found in the steps 4 and 8
            engine.backward(engine(inputs))
            engine.step()
            assert all(_of_rank_zero(engine, name) for name in ("shared", "made", "late", "mean")), step
            if step in (3, 4, 7):
                assert _of_rank_zero(engine, "norm.running_mean") and engine.module.norm.running_mean.any(), step
            assert not _of_rank_zero(engine, "cache") and not _of_rank_zero(engine, "named")
            assert engine.module.longest.numel() == 1 + ranks.rank()
        assert engine.module.late.abs().sum() > 0
        engine.destroy()
    return [line for line in lines if "training writes the buffers" in line]


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_each_rank_keeps_caches_named_buffers_and_buffers_of_other_shapes(stage: int) -> None:
    first, second = ranks.run_ranks(_which_are_sent, 2, stage)
    wanted = ("buffers made, mean, shared:", "buffers late:", "buffers norm.num_batches_tracked, norm.running_mean, norm.running_var:")
    assert [text in line for text, line in zip(wanted, first, strict=True)] == [True] * 3 and not second


def _constants(stage: int) -> list[str]:
    """Load a checkpoint's buffers, train, and return the labels of the steps' messages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 1))
    engine = initialize(model, Run(stage=stage, extra=SGD))
    model[1].load_state_dict({name: value.clone() for name, value in model[1].state_dict().items()}, strict=False)
    with observe.record_labels() as labels:
        for inputs in _batches(3):
            engine.backward(engine(inputs).mean())
            engine.step()
    engine.destroy()
    return [label for label in labels if "buffers" in label]


def test_constant_buffers_are_not_sent() -> None:
    assert ranks.run_ranks(_constants, 2, 0) == [[], []]


class Bank(nn.Module):
    """A model with two large buffers; the forward writes other values on each rank to a row of one, and equal values to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("bank", torch.zeros(1 << 19, 9))
        self.register_buffer("average", torch.zeros(1 << 19, 9))

    def forward(self, inputs: Tensor) -> Tensor:
        self.bank[7] = inputs.mean()
        self.average += 1
        return self.layer(inputs).mean()


def _large() -> list[str]:
    engine = initialize(Bank(), Run(stage=1, extra=SGD))
    with messages_of_log() as lines:
        for inputs in _batches(3):
            engine.backward(engine(inputs))
            engine.step()
            assert _of_rank_zero(engine, "bank") and engine.module.bank[7].all()
    engine.destroy()
    return [line for line in lines if "training writes the buffers" in line]


def test_large_buffers_are_sent_if_ranks_differ() -> None:
    first, _ = ranks.run_ranks(_large, 2)
    assert len(first) == 1 and "buffers bank:" in first[0] and "18.00 MiB" in first[0]


def _overflow() -> None:
    """Skip a step: its forward has written buffers all the same."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    engine = initialize(model, Run(stage=2, dtype="fp16", extra=SGD))
    for factor in (1.0, float("inf")):
        inputs = _batches(1)[0].half()
        engine.backward(engine(inputs).float().mean() * factor)
        engine.step()
        assert _of_rank_zero(engine, "1.running_mean")
    assert not engine.was_step_applied()
    engine.destroy()


def test_a_skipped_step_sends_buffers_too() -> None:
    ranks.run_ranks(_overflow, 2)
