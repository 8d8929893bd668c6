"""Test gradient accumulation in every protocol that callers use: one update per boundary, the same numbers from all of them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch

from hf_zero.errors import StateError
from hf_zero.integrations.accumulate import no_sync as no_sync_of_accelerate
from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import Forward, Run, Trace, check, collect, initialize, reference_case, train
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)
STEPS = 3  # micro-steps per update
CASE, MLP = CASES["gpt2"], CASES["mlp"]


def step_always(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Train as accelerate 1.6 and Lightning Trainer do: backward and step after every micro-step, the engine counts."""
    loss = forward(engine, batch)
    assert engine.is_gradient_accumulation_boundary() == (micro == STEPS - 1)
    engine.backward(loss)
    engine.step()
    return loss.item()


def step_at_boundary(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Train as accelerate 1.15 does: the caller announces the boundary and calls step only there."""
    last = micro == STEPS - 1
    engine.set_gradient_accumulation_boundary(is_boundary=last)
    loss = forward(engine, batch)
    engine.backward(loss)
    if last:
        engine.step()
    return loss.item()


def caller_scales(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Train as Trainer does: the loss is divided already, so ``scale_wrt_gas=False``."""
    last = micro == STEPS - 1
    engine.set_gradient_accumulation_boundary(is_boundary=last)
    loss = forward(engine, batch)
    engine.backward(loss / STEPS, scale_wrt_gas=False)
    if last:
        engine.step()
    return loss.item()


def caller_accumulates(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Train with ``gradient_accumulation_steps: 1`` in the configuration; the caller divides and announces the boundary."""
    engine.set_gradient_accumulation_boundary(micro == STEPS - 1)
    loss = forward(engine, batch)
    engine.backward(loss / STEPS)
    engine.step()  # off the boundary: does nothing
    return loss.item()


def fabric(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Train as Fabric does: ``engine.step`` is never called; the returned optimizer is stepped after every micro-step."""
    loss = forward(engine, batch)
    engine.backward(loss)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return loss.item()


def no_sync(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Train as accelerate's ``accumulate()`` does below stage 2: no_sync around all but the last micro-step, step only at the end."""
    last = micro == STEPS - 1
    engine.set_gradient_accumulation_boundary(is_boundary=last)
    if last:
        loss = forward(engine, batch)
        engine.backward(loss)
        engine.step()
    else:
        with engine.no_sync() if engine.stage_policy.allows_deferral else nullcontext():
            loss = forward(engine, batch)
            engine.backward(loss)
    return loss.item()


def no_sync_with_step(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Train as accelerate 1.6 does: enter no_sync at any stage and call step inside."""
    if micro == STEPS - 1:
        return step_always(engine, batch, forward, micro)
    with no_sync_of_accelerate(None, None, engine):
        loss = forward(engine, batch)
        engine.backward(loss)
        engine.step()
    return loss.item()


def coalesced(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Train with one ``coalesce_grad_reduction`` around all backwards of a step, ``gradient_accumulation_steps: 1``."""
    if micro == 0:
        engine.block = engine.coalesce_grad_reduction()
        engine.block.__enter__()
    loss = forward(engine, batch)
    engine.backward(loss / STEPS)
    assert not engine.accumulation.boundary
    if micro == STEPS - 1:
        engine.block.__exit__(None, None, None)
        engine.step()
        assert engine.was_step_applied() or engine.optimizer.overflow
    return loss.item()


CALLER_DIVIDES = ("caller_accumulates", "coalesced")
PROTOCOLS = {
    function.__name__: function
    for function in (step_always, step_at_boundary, caller_scales, caller_accumulates, fabric, no_sync, no_sync_with_step, coalesced)
}


def _check_protocols(run: Run, protocols: tuple[str, ...]) -> None:
    expected = cache(partial(reference_case, "gpt2", run, ranks.world()))
    for protocol in protocols:
        extra = {"gradient_accumulation_steps": 1} if protocol in CALLER_DIVIDES else {}
        engine = initialize(CASE.build(), Run(**{**vars(run), "extra": extra}))
        trace = train(engine, CASE.rows, CASE.forward, run, PROTOCOLS[protocol])
        assert engine.global_steps == run.steps, (protocol, engine.global_steps, run.steps)
        engine.destroy()
        if ranks.rank() == 0:
            check(
                trace,
                lambda follow=None: reference_case("gpt2", run, ranks.world(), follow=follow) if follow else expected(),
                run,
                protocol,
            )


# What a loop does: f forward, b backward, s step, ( ) a no_sync block; and which backwards each update has, as DeepSpeed counts, which is
# by calls of step(). Weights of DeepSpeed 0.19.8 at stages 0 and 3 are the same; at 1 and 2 it drops the first backward of two.
PATTERNS = {
    "two before each step": ("fbfbs" * 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    "three, then one": ("fbfbfbsfbs" * 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    "both losses first": ("ffBBs" * 2, [(0, 1, 2, 3)]),
    "a step without a backward": ("sfbsfbs", [(0,)]),
    "two steps after a backward": ("fbssfbsfbs", [(0,), (1, 2)]),
    "a block": ("(fb)fbs" * 2, [(0, 1, 2, 3)]),
    "a step after a block": ("(fb)sfbs", [(0, 1)]),
}

UNMANAGED = {"each step updates": ("fbfbsfbsfbfbfbs", [(0, 1), (2,), (3, 4, 5)])}


def _counted_by_steps(stages: tuple[int, ...]) -> None:
    """Check with ``gradient_accumulation_steps`` 2 that every second call of ``step`` updates, with all gradients since the last update.

    Without ``managed_gradient_accumulation`` every call updates, and the samples of the micro-steps before it count.
    """
    for stage in stages:
        for label, (pattern, updates) in (PATTERNS | UNMANAGED).items():
            extra = {"managed_gradient_accumulation": False} if label in UNMANAGED else {}
            engine = initialize(MLP.build(), Run(stage, accumulation=2, extra=extra))
            losses: list[Any] = []
            seen, block = 0, None
            for action in pattern:
                if action == "f":
                    losses.append(MLP.forward(engine, MLP.rows(0, seen, ranks.rank())))
                    seen += 1
                elif action in "bB":  # the last one, or the first
                    engine.backward(losses.pop(-1 if action == "b" else 0))
                elif action == "s":
                    engine.step()
                elif action == "(":
                    block = engine.no_sync()
                    block.__enter__()
                elif block is not None:
                    block.__exit__(None, None, None)
            assert engine.global_steps == len(updates), (stage, label, engine.global_steps)
            micro_steps = sum(map(len, updates)) if label in UNMANAGED else 2 * len(updates)
            assert engine.global_samples == micro_steps * engine.train_batch_size() // 2, (stage, label, engine.global_samples)
            if label in UNMANAGED:
                with pytest.raises(StateError, match="managed_gradient_accumulation is false in the configuration: every step"):
                    engine.set_gradient_accumulation_boundary(False)
            weights = collect(engine, Trace()).weights
            engine.destroy()
            for name, value in _after(updates).items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-5, msg=lambda text: f"{stage} {label}: {text}")  # noqa: B023


def _after(updates: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return the weights of plain PyTorch after updates of these micro-steps, the mean over ranks, each divided by 2."""
    run, model = Run(0), MLP.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay, eps=run.eps, betas=(0.9, 0.99))
    for micros in updates:
        optimizer.zero_grad()
        for micro in micros:
            for rank in range(ranks.world()):
                (MLP.forward(model, MLP.rows(0, micro, rank)) / (2 * ranks.world())).backward()
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.slow)], ids=["odd", "even"])
def test_every_second_step_updates_with_all_backwards_since(stages: tuple[int, ...]) -> None:
    ranks.run_ranks(_counted_by_steps, 2, stages)


def _batch_arithmetic(stage: int) -> None:
    """Check that the batch sizes follow from any two of the three numbers and the world size."""
    run = Run(stage=stage, accumulation=STEPS, extra={"train_batch_size": 2 * STEPS * ranks.world(), "gradient_accumulation_steps": None})
    engine = initialize(CASE.build(), run)
    assert engine.gradient_accumulation_steps() == STEPS
    assert engine.train_batch_size() == 2 * STEPS * ranks.world()
    assert engine.train_micro_batch_size_per_gpu() == 2
    engine.destroy()


def _weights_move_only_at_the_boundary(stage: int) -> None:
    import hf_zero

    engine = initialize(CASE.build(), Run(stage=stage, accumulation=STEPS))
    parameter = engine.module.transformer.h[0].mlp.c_fc.weight
    before = hf_zero.utils.safe_get_full_fp32_param(parameter).clone()
    for micro in range(2 * STEPS):
        engine.backward(CASE.forward(engine, CASE.rows(0, micro, ranks.rank())))
        engine.step()
        after = hf_zero.utils.safe_get_full_fp32_param(parameter).clone()
        moved, before = not after.equal(before), after
        assert moved == (micro % STEPS == STEPS - 1), (micro, moved)
        assert engine.was_step_applied() == moved
    engine.destroy()


DEFERRED = ("no_sync", "no_sync_with_step", "coalesced", "caller_accumulates")  # where stages differ in what waits for the boundary


@pytest.mark.fast_rows("0-protocols0", "3-protocols3")
@pytest.mark.parametrize(("stage", "protocols"), [(0, DEFERRED), (1, DEFERRED), (2, DEFERRED[1:]), (3, tuple(PROTOCOLS))])
def test_protocols_give_one_update_per_boundary(stage: int, protocols: tuple[str, ...]) -> None:
    ranks.run_ranks(_check_protocols, 2, Run(stage=stage, accumulation=STEPS, clip=0.1), protocols)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_all_protocols_give_one_update_per_boundary(stage: int) -> None:
    ranks.run_ranks(_check_protocols, 2, Run(stage=stage, accumulation=STEPS, clip=0.1), tuple(PROTOCOLS))


@pytest.mark.fast_rows("0-bf16-step_always", "2-bf16-fabric", "3-fp16-no_sync")
@thinned(None, stage=[0, 2, 3], dtype=["bf16", "fp16"], protocol=list(PROTOCOLS))
def test_protocols_in_16_bit(stage: int, dtype: str, protocol: str) -> None:
    ranks.run_ranks(_check_protocols, 2, Run(stage=stage, dtype=dtype, accumulation=STEPS), (protocol,))


@pytest.mark.parametrize("stage", [0, 3])
def test_accumulation_from_the_batch_sizes(stage: int) -> None:
    ranks.run_ranks(_batch_arithmetic, 2, stage)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_weights_move_only_at_the_boundary(stage: int) -> None:
    ranks.run_ranks(_weights_move_only_at_the_boundary, 2, stage)
