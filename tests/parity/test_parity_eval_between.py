"""Test that forwards without gradient between micro-steps (evaluation, generation, inference) do not affect training."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import Forward, Run, Trace, check, check_bitwise, initialize, micro_step, reference_case, train
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)
CASE = CASES["gpt2"]


def evaluate(engine: Any, batch: Batch) -> float:
    engine.eval()
    with torch.no_grad():
        loss = CASE.forward(engine, batch).item()
    engine.train()
    return loss


def evaluate_before(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    evaluate(engine, batch)
    return micro_step(engine, batch, forward, micro)


def evaluate_between_forward_and_backward(engine: Any, batch: Batch, forward: Forward, _micro: int) -> float:
    loss = forward(engine, batch)
    assert evaluate(engine, batch) == pytest.approx(loss.item(), rel=1e-6)
    engine.backward(loss)
    engine.step()
    return loss.item()


def forward_without_backward(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Run a forward with gradients whose graph is dropped: a metric, or a loss that is not used."""
    forward(engine, batch)
    return micro_step(engine, batch, forward, micro)


def forward_between_backward_and_step(engine: Any, batch: Batch, forward: Forward, _micro: int) -> float:
    """Run a forward between backward and step: the blocks that it unshards are stale after the step."""
    loss = forward(engine, batch)
    engine.backward(loss)
    forward(engine, batch)
    engine.step()
    return loss.item()


def inference_mode_before(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    with torch.inference_mode():
        forward(engine, batch)
    return micro_step(engine, batch, forward, micro)


def bare_module_before(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Evaluate and generate with the bare module, as Trainer does: hooks are on modules, not on ``engine.forward``."""
    with torch.no_grad():
        forward(engine.module, batch)
    return micro_step(engine, batch, forward, micro)


def generate_before(engine: Any, batch: Batch, forward: Forward, micro: int) -> float:
    """Generate different lengths on the ranks: with ``synced_gpus``, finished ranks continue to run forwards."""
    engine.module.eval()
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "synced_gpus": True}
    tokens = engine.module.generate(batch["input_ids"][:, :4], max_new_tokens=3 + 2 * ranks.rank(), **settings)
    assert tokens.shape[1] == 4 + 3 + 2 * ranks.rank()
    engine.module.train()
    return micro_step(engine, batch, forward, micro)


INTERRUPTIONS = {
    function.__name__: function
    for function in (
        evaluate_before, evaluate_between_forward_and_backward, forward_without_backward,
        forward_between_backward_and_step, inference_mode_before, bare_module_before, generate_before,
    )
}  # fmt: skip


def _train(run: Run, interruption: str | None) -> Trace:
    engine = initialize(CASE.build(), run)
    trace = train(engine, CASE.rows, CASE.forward, run, INTERRUPTIONS[interruption] if interruption else micro_step)
    engine.destroy()
    return trace


def _interrupted(run: Run, interruptions: list[str]) -> None:
    plain = _train(run, None)
    if ranks.rank() == 0:
        check(plain, partial(reference_case, "gpt2", run, ranks.world()), run)
    for interruption in interruptions:
        check_bitwise(_train(run, interruption), plain, interruption)


def _generation_equals_plain(stage: int) -> None:
    """Check that greedy generation with the bare module of a stage-3 engine equals the plain model's, before and after training."""
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 5}
    prompt = CASE.rows(9, 9, 9)["input_ids"][:, :4]
    plain = CASE.build().eval()
    engine = initialize(CASE.build(), Run(stage=stage))
    engine.eval()
    assert torch.equal(engine.module.generate(prompt, **settings), plain.generate(prompt, **settings))
    engine.train()
    trace = train(engine, CASE.rows, CASE.forward, Run(stage=stage))
    plain.load_state_dict(trace.weights, strict=False)
    plain.tie_weights()
    engine.eval()
    assert torch.equal(engine.module.generate(prompt, **settings), plain.generate(prompt, **settings))
    engine.destroy()


def _evaluation_sees_the_new_weights(stage: int) -> None:
    """Check that the loss of an evaluation right after a step is the loss of the next training forward on the same batch."""
    run = Run(stage=stage)
    engine = initialize(CASE.build(), run)
    for step in range(3):
        batch = CASE.rows(step, 0, ranks.rank())
        engine.backward(CASE.forward(engine, batch))
        engine.step()
        after = evaluate(engine, batch)
        assert CASE.forward(engine, batch).item() == pytest.approx(after, rel=1e-6)
    engine.destroy()


ODD, EVEN = list(INTERRUPTIONS)[::2], list(INTERRUPTIONS)[1::2]


@pytest.mark.fast_rows("3-interruptions2")
@pytest.mark.parametrize(("stage", "interruptions"), [(0, ODD), (2, EVEN), (3, list(INTERRUPTIONS))])
def test_training_does_not_notice(stage: int, interruptions: list[str]) -> None:
    ranks.run_ranks(_interrupted, 2, Run(stage=stage, accumulation=2, clip=0.1), interruptions)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_training_notices_nothing_at_any_stage(stage: int) -> None:
    ranks.run_ranks(_interrupted, 2, Run(stage=stage, accumulation=2, clip=0.1), list(INTERRUPTIONS))


@pytest.mark.slow  # fast: the same in fp32
@pytest.mark.parametrize("stage", slow_but(STAGES, 3))
def test_training_does_not_notice_in_bf16(stage: int) -> None:
    interruptions = ["evaluate_before", "generate_before"]
    ranks.run_ranks(_interrupted, 3, Run(stage=stage, dtype="bf16", accumulation=2), interruptions)


@pytest.mark.slow  # fast: test_generation.py
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_generation_equals_the_plain_model(stage: int) -> None:
    ranks.run_ranks(_generation_equals_plain, 2, stage)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_evaluation_sees_the_new_weights(stage: int) -> None:
    ranks.run_ranks(_evaluation_sees_the_new_weights, 2, stage)
