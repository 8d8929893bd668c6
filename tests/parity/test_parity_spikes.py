"""Test gradient norms far above earlier ones: logged, or skipped on all ranks like plain PyTorch without that step, also after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.config.resolve import resolve
from hf_zero.core.step.spikes import MOST_SKIPPED, Spikes
from hf_zero.errors import ConfigError
from tests.support import ranks
from tests.support.logged import messages_of_log
from tests.support.models import CASES, Batch, class_loss
from tests.support.parity import Run, initialize
from tests.support.spikes import few_values

MLP = CASES["mlp"]
SPIKE, STEPS, SAVED = 7, 10, 6


def _rows(step: int, rank: int) -> Batch:
    """Return a batch; that of rank 1 in step ``SPIKE`` has labels far from all others and inputs 50 times as large."""
    batch = MLP.rows(step % 2, 0, rank)
    if (step, rank) == (SPIKE, 1):
        batch["inputs"] *= 50
    return batch


def _reference(skips: bool, world: int) -> tuple[list[torch.Tensor], list[float]]:
    """Train in plain PyTorch on the batches of all ranks without the update of step ``SPIKE``; return weights and losses by step."""
    run, module = Run(steps=STEPS), MLP.build()
    losses = [0.0] * STEPS
    optimizer = torch.optim.AdamW(module.parameters(), lr=run.lr, betas=(0.9, 0.99), weight_decay=run.weight_decay, eps=run.eps)
    for step in range(STEPS):
        for rank in range(world):
            loss = class_loss(module, _rows(step, rank)) / world
            loss.backward()
            losses[step] += float(loss)
        if not (skips and step == SPIKE):
            optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()], losses


def _train(engine: Any, steps: range) -> list[bool]:
    made = []
    for step in steps:
        engine.backward(class_loss(engine, _rows(step, ranks.rank())))
        engine.step()
        made.append(engine.progress.last_step_applied)
    return made


def check(stage: int, action: str, folder: Path) -> None:
    world = torch.distributed.get_world_size()
    run = Run(stage=stage, extra={"hf_zero": {"spike_factor": 3.0, "loss_spike_factor": 3.0, "spike_action": action}})
    with few_values(), messages_of_log() as messages:
        engine = initialize(MLP.build(), run)
        made = _train(engine, range(SAVED))
        engine.save_checkpoint(str(folder))
        engine.destroy()
        engine = initialize(MLP.build(), run)
        engine.load_checkpoint(str(folder))
        made += _train(engine, range(SAVED, STEPS))
    skips = action == "skip"
    assert made == [not (skips and step == SPIKE) for step in range(STEPS)]
    assert engine.progress.skipped_steps == int(skips) and engine.progress.global_steps == STEPS
    (told,) = [message for message in messages if "the gradient norm" in message] if ranks.rank() == 0 else [""]
    if ranks.rank() == 0:
        first = SPIKE * world * 2
        assert told.startswith(f"step={SPIKE + 1}:") and f"samples {first} to {first + 2 * world - 1} of the run" in told
        assert told.endswith("The update is skipped" if skips else "The update is made")
    parameters = list(engine.module.parameters())
    weights, losses = _reference(skips, world)
    assert list(engine.spikes.losses.values) == pytest.approx([*losses[:SPIKE], *losses[SPIKE + 1 :]], rel=1e-5)
    with hf_zero.zero.GatheredParameters(parameters):
        for mine, plain in zip(parameters, weights, strict=True):
            torch.testing.assert_close(mine.detach(), plain, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.fast_rows("3-skip", "2-log")
@pytest.mark.parametrize(("stage", "action"), [(0, "skip"), (3, "skip"), (2, "log")])
def test_the_step_of_a_spike_is_left_out_on_all_ranks(stage: int, action: str, tmp_path: Path) -> None:
    ranks.run_ranks(check, 2, stage, action, tmp_path)


def test_norms_that_have_grown_for_good_count_as_usual() -> None:
    with few_values():
        watched = Spikes("skip", 2.0, 1.5)
        assert not any(watched.found(norm, 1, (0, 1)) for norm in (1.0, 3.0, 1.0, 1.0)), "too few norms to compare with"
        found = [watched.found(10.0, 1, (0, 1)) for _ in range(MOST_SKIPPED + 3)]
        assert found == [True] * MOST_SKIPPED + [False] * 3 and list(watched.norms.values) == [10.0] * 3
        assert watched.found(math.inf, 1, (0, 1)) and watched.found(math.nan, 1, (0, 1)) and list(watched.norms.values) == [10.0] * 3
        again = Spikes("skip", 2.0, 1.5)
        again.load_state_dict(watched.state_dict())
        assert again.state_dict() == watched.state_dict()


def test_spikes_between_usual_steps_are_not_counted_together() -> None:
    with few_values():
        watched = Spikes("skip", 2.0)
        found = [watched.found(norm, 1, (0, 1)) for norm in [1.0] * 4 + [10.0, 1.0] * (MOST_SKIPPED + 2)]
    assert found == [False] * 4 + [True, False] * (MOST_SKIPPED + 2)


def test_losses_are_compared_while_their_median_is_above_zero() -> None:
    with few_values():
        watched = Spikes("log", 0.0, 1.5)
        assert not any(watched.found(9.0, 1, (0, 1), loss) for loss in (-1.0, -2.0, -1.0, -1.0, 5.0))
        watched = Spikes("log", 0.0, 1.5)
        assert not any(watched.found(9.0, 1, (0, 1), loss) for loss in (3.0, 3.0, 2.0, 3.0, 4.4))
        assert watched.found(9.0, 1, (0, 4), 4.6) and watched.measure(1) == {
            "Train/Spike/loss": 4.6,
            "Train/Spike/step": 1.0,
            "Train/Spike/first_sample": 0.0,
        }
        assert watched.found(9.0, 2, (4, 8), math.nan) and not watched.found(9.0, 3, (8, 12), None), "an unknown loss is no spike"


@pytest.mark.parametrize("factor", [0.5, -1, "often"])
def test_a_factor_that_is_none_is_refused(factor: Any) -> None:
    with pytest.raises(ConfigError, match="hf_zero.spike_factor"):
        resolve({"train_batch_size": 1, "hf_zero": {"spike_factor": factor}})
