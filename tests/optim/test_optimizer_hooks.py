"""The engine's optimizer takes the hooks that every torch optimizer takes: once for each real step, in torch's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, initialize

MLP = CASES["mlp"]


def _steps(engine: Any, optimizer: Any, steps: int, accumulation: int) -> None:
    for step in range(steps):
        for micro in range(accumulation):
            engine.backward(class_loss(engine, MLP.rows(step, micro, ranks.rank())))
            engine.step()


def _hooks_at(stage: int) -> None:
    engine = initialize(MLP.build(), Run(stage, accumulation=2))
    optimizer, seen = engine.optimizer, []

    def before(found: Any, args: Any, kwargs: Any) -> None:
        seen.append("before")
        assert found is optimizer and args == (optimizer,) and kwargs == {}
        found.param_groups[0]["lr"] = 0.0 if len(seen) > 2 else 0.1

    weight = engine.module.head.bias
    values = []

    def after(found: Any, args: Any, kwargs: Any) -> None:
        from hf_zero.utils import safe_get_full_fp32_param

        seen.append("after")
        values.append(safe_get_full_fp32_param(weight).clone())

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    _steps(engine, optimizer, 3, 2)
    assert seen == ["before", "after"] * 3
    assert torch.equal(values[1], values[2]), "the learning rate that a hook sets is that of its step"
    for handle in handles:
        handle.remove()
    _steps(engine, optimizer, 1, 2)
    assert len(seen) == 6
    with pytest.raises(RuntimeError, match="other arguments"):
        optimizer.register_step_pre_hook(lambda *_: ((), {"closure": None}))
        _steps(engine, optimizer, 1, 2)
    engine.destroy()


def _hooks() -> None:
    for stage in (0, 1, 3):
        _hooks_at(stage)


def _hooks_of_states() -> None:
    engine = initialize(MLP.build(), Run(1))
    optimizer, seen = engine.optimizer, []
    _steps(engine, optimizer, 1, 1)
    optimizer.register_state_dict_pre_hook(lambda found: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda found, state: {**state, "mine": 1})
    state = optimizer.state_dict()
    assert state["mine"] == 1 and seen == ["save"]

    def without_mine(found: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append("load")
        return {key: value for key, value in given.items() if key != "mine"}

    optimizer.register_load_state_dict_pre_hook(without_mine)
    optimizer.register_load_state_dict_post_hook(lambda found: seen.append("loaded"))
    optimizer.load_state_dict(state)
    assert seen == ["save", "load", "loaded"] and "mine" in state
    engine.destroy()


def _no_step_no_hook() -> None:
    engine = initialize(MLP.build(), Run(1, dtype="fp16"))
    seen: list[int] = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(0))
    engine.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    batch = MLP.rows(0, 0, ranks.rank())
    loss = class_loss(engine, {**batch, "inputs": batch["inputs"].half()})
    engine.backward(loss * float("inf"))
    engine.step()
    assert not seen, "a step that overflows is none"
    engine.destroy()


def test_step_hooks_are_called_once_for_each_real_step() -> None:
    ranks.run_ranks(_hooks, 2)
    ranks.run_ranks(_no_step_no_hook, 2)


def test_hooks_of_state_dicts() -> None:
    ranks.run_ranks(_hooks_of_states, 2)
