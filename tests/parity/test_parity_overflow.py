"""Test fp16 overflow: found on one rank, skipped by all; the scheduler does not advance, the scale falls, the parameter is named."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from tests.support import ranks
from tests.support.models import CASES, Batch, class_loss
from tests.support.parity import Run, check_training, initialize
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)
SCHEDULE = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
}


def feed_with_one_infinity(step: int, micro: int, rank: int) -> Batch:
    """Return a feed in which rank 1's last micro-step of the second step holds a value that overflows in fp16."""
    batch = CASES["mlp"].rows(step, micro, rank)
    if (step, micro, rank) == (1, 1, 1):
        batch["inputs"][0, 0] = math.inf
    return batch


def _against_reference(run: Run) -> None:
    trace = check_training(CASES["mlp"].build, feed_with_one_infinity, class_loss, run, label="overflow on rank 1")
    assert trace.skipped == [False, True, False, False], trace.skipped
    assert trace.norms[1] == math.inf, trace.norms  # the gradients are NaN


def _initial_scale_too_large(run: Run) -> None:
    trace = check_training(CASES["mlp"].build, CASES["mlp"].rows, class_loss, run, label="initial scale too large")
    assert trace.skipped[0] and not trace.skipped[-1], trace.skipped


def _skip_moves_nothing(stage: int, static: bool) -> None:
    """Check weights, moments, scheduler and counters of a skipped step; the log names a parameter."""
    import hf_zero

    scale = {"loss_scale": 128.0} if static else {"loss_scale": 0, "initial_scale_power": 7, "hysteresis": 1}
    engine = initialize(CASES["mlp"].build(), Run(stage=stage, dtype="fp16", extra={**SCHEDULE, "fp16": scale}))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    parameter = engine.module.blocks[1].up.weight
    seen, norms = [], []
    for step in range(3):
        batch = CASES["mlp"].rows(step, 0, ranks.rank())
        inputs = batch["inputs"].half()
        if step == 1 and ranks.rank() == 1:
            inputs[0, 0] = math.inf
        engine.backward(class_loss(engine, {**batch, "inputs": inputs}))
        engine.step()
        norms.append((engine.get_global_grad_norm(), engine.optimizer._global_grad_norm))
        master = hf_zero.utils.safe_get_full_fp32_param(parameter).clone()
        moment = hf_zero.utils.safe_get_full_optimizer_state(parameter, "exp_avg").clone()
        seen.append((master, moment, engine.get_lr()[0], engine.optimizer.overflow, engine.was_step_applied()))
    logging.getLogger("hf_zero").removeHandler(handler)
    assert [entry[3] for entry in seen] == [False, True, False]
    assert [entry[4] for entry in seen] == [True, False, True]
    assert torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[1][0], seen[2][0])
    assert torch.equal(seen[0][1], seen[1][1])
    assert seen[0][2] == seen[1][2] < seen[2][2], [entry[2] for entry in seen]
    assert norms[1] == (math.inf, math.inf) and all(math.isfinite(norm) for norm in (*norms[0], *norms[2])), norms
    assert engine.skipped_steps == 1
    assert engine.scaler.scale == (128.0 if static else 64.0)
    names = [name for name, _ in engine.module.named_parameters()]
    if ranks.rank() == 0:
        assert any(name in message for name in names for message in messages), messages
    engine.destroy()


def _smallest_scale(stage: int) -> str:
    """Train on a loss that is never finite: the run ends once the scale cannot fall any more; at stage 0 all steps are skipped."""
    fp16 = {"loss_scale": 0, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}
    engine = initialize(CASES["mlp"].build(), Run(stage=stage, dtype="fp16", extra={"fp16": fp16}))
    batch = CASES["mlp"].rows(0, 0, 0)
    inputs = torch.full_like(batch["inputs"], math.inf).half()
    for _ in range(8):
        engine.backward(class_loss(engine, {**batch, "inputs": inputs}))
        try:
            engine.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return f"{engine.skipped_steps} of 8 steps skipped at {engine.scaler.scale:g}"


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_every_rank_skips_the_overflow_of_one(stage: int) -> None:
    ranks.run_ranks(_against_reference, 2, Run(stage=stage, dtype="fp16", steps=4, accumulation=2, clip=0.1))


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_three_ranks_skip_the_overflow_of_one(stage: int) -> None:
    ranks.run_ranks(_against_reference, 3, Run(stage=stage, dtype="fp16", steps=4, accumulation=2))


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_too_large_initial_scale_falls_until_it_fits(stage: int) -> None:
    ranks.run_ranks(_initial_scale_too_large, 2, Run(stage=stage, dtype="fp16", steps=4, scale_power=18))


@thinned(stage=STAGES, static=[False, True])
def test_a_skipped_step_moves_nothing_and_names_a_parameter(stage: int, static: bool) -> None:
    ranks.run_ranks(_skip_moves_nothing, 2, stage, static)


@pytest.mark.parametrize(("stage", "expected"), [(0, "8 of 8 steps skipped at 1"), (1, "StateError: "), (3, "StateError: ")])
def test_scale_at_its_minimum_is_an_error_from_stage_1_on(stage: int, expected: str) -> None:
    for answer in ranks.run_ranks(_smallest_scale, 2, stage):
        assert answer.startswith(expected) and (stage == 0 or "min_loss_scale" in answer), answer
