"""A norm that is asked for between backward and step: it is taken once, unless some rank changes a gradient after it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from hf_zero.core.step import step
from hf_zero.deepspeed.safe_values import safe_get_local_grad, safe_set_local_grad
from hf_zero.utils import safe_get_full_grad, safe_set_full_grad
from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start
from tests.support.models import CLASSES, LENGTH, class_loss


def _backward(engine: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + ranks.rank())
    inputs = torch.randn(2, LENGTH, generator=generator)
    engine.backward(class_loss(engine, {"inputs": inputs, "labels": torch.randint(0, CLASSES, (2,), generator=generator)}))


def _measured(stage: int) -> None:
    asked, plain = start(stage), start(stage)
    trained = [param for param in asked.module.parameters() if param.requires_grad]
    with (
        mock.patch.object(step, "global_norm", wraps=step.global_norm) as norms,
        mock.patch.object(step, "agree", wraps=step.agree) as votes,
    ):

        def counted(engine: Any) -> tuple[int, int]:
            before = norms.call_count, votes.call_count
            engine.step()
            return norms.call_count - before[0], votes.call_count - before[1]

        for seed in range(2):
            _backward(plain, seed)
            assert counted(plain) == (1, 1)
            _backward(asked, seed)
            before = norms.call_count, votes.call_count
            norm = asked.stepper.measure()
            assert (norms.call_count, votes.call_count) == (before[0] + 1, before[1] + (not stage))
            assert counted(asked) == ((0, 1) if stage else (1, 1))
            assert norm == asked.get_global_grad_norm() == plain.get_global_grad_norm()
        assert differences(full_state(asked), full_state(plain)) == []
        # Every rank takes the norm again if one rank has changed a gradient.
        for change in ("all", "one", "data"):
            _backward(asked, 2)
            norm = asked.stepper.measure()
            if change == "all":
                safe_set_full_grad(trained[0], 3 * safe_get_full_grad(trained[0]))
            elif change == "data":  # no counter shows it
                for part in asked.optimizer.averaged_gradients[0] if ranks.rank() == 0 and stage else ():
                    part.data.mul_(5)
            elif ranks.rank() == 0 and stage:
                for one in trained:
                    own = safe_get_local_grad(one)
                    assert own is not None
                    safe_set_local_grad(one, 5 * own)
            assert counted(asked) == (1, 1)
            assert asked.get_global_grad_norm() > norm or not stage
        # Dropped gradients have no norm that a later step could use.
        _backward(asked, 3)
        asked.stepper.measure()
        asked.zero_grad()
        _backward(asked, 4)
        _backward(plain, 4)
        assert counted(asked) == (1, 1)


def test_a_norm_between_backward_and_step_is_the_norm_of_the_step() -> None:
    for stage in (0, 1, 3):
        ranks.run_ranks(_measured, 2, stage)
