"""Assignments to names of the engine, its optimizer and its configuration take effect, or are an error that names the way."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hf_zero.deepspeed import replaced
from hf_zero.deepspeed.engine import Engine
from hf_zero.deepspeed.optimizer import DeepSpeedOptimizer
from hf_zero.deepspeed.pipe.engine import PipelineEngine
from hf_zero.errors import ConfigError, StateError
from hf_zero.utils import safe_get_full_fp32_param
from tests.support import ranks
from tests.support.parity import Run, initialize

_SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _rows(count: int) -> torch.Tensor:
    """Return (count, 2 ranks, 3 rows, 4), the inputs of ``count`` micro-steps."""
    return torch.randn(count, 2, 3, 4, generator=torch.Generator().manual_seed(1))


def _plain(windows: list[torch.Tensor], clip: float | None = None) -> nn.Module:
    """Train with plain PyTorch, one optimizer step for each (micro-steps, 2, 3, 4)."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in windows:
        model(rows.flatten(0, 2)).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _same(engine: Any, expected: nn.Module) -> None:
    for param, value in zip(engine.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(safe_get_full_fp32_param(param), value.detach())


def _micro_steps(engine: Any, rows: torch.Tensor) -> None:
    for row in rows:
        engine.backward(engine(row[ranks.rank()]).square().mean())
        engine.step()


def _an_epoch_that_ends_early(stage: int) -> None:
    """The loop of EVA and BEiT: each epoch begins with ``zero_grad()`` and ``micro_steps = 0``, and may end inside an accumulation."""
    rows = _rows(5)
    engine = initialize(_model(), Run(stage, accumulation=2, extra=_SGD))
    _micro_steps(engine, rows[:3])
    with pytest.raises(StateError, match=r"micro_steps was set to 0.*call engine.zero_grad\(\) before it"):
        engine.micro_steps = 0
    engine.zero_grad()
    engine.micro_steps = 0
    assert engine.micro_steps == 0 and not engine.is_gradient_accumulation_boundary()
    _micro_steps(engine, rows[3:])
    assert (engine.micro_steps, engine.global_steps) == (2, 2)
    _same(engine, _plain([rows[:2], rows[3:]]))
    engine.micro_steps += 1  # skips the first half of an accumulation
    assert engine.is_gradient_accumulation_boundary()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_accumulation_that_begins_again(stage: int) -> None:
    ranks.run_ranks(_an_epoch_that_ends_early, 2, stage)


def _counters_and_clipping(folder: Path) -> None:
    rows = _rows(2)
    engine = initialize(_model(), Run(2, clip=100.0, extra=_SGD))
    engine.global_steps = engine.global_samples = 40
    engine.skipped_steps += 1
    _micro_steps(engine, rows[:1])
    assert (engine.global_steps, engine.global_samples - engine.train_batch_size(), engine.skipped_steps) == (41, 40, 1)
    engine.save_checkpoint(folder)
    assert (folder / "latest").read_text() == "global_step41"
    engine.optimizer.clip_grad = 0.01
    assert engine.gradient_clipping() == engine.optimizer.clip_grad == 0.01
    _micro_steps(engine, rows[1:])
    expected = _plain([rows[:1]])
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    expected(rows[1].flatten(0, 1)).square().mean().backward()
    assert nn.utils.clip_grad_norm_(expected.parameters(), 0.01) > 0.02
    optimizer.step()
    _same(engine, expected)


def test_counters_and_clipping_take_effect(tmp_path: Path) -> None:
    ranks.run_ranks(_counters_and_clipping, 2, tmp_path)


class _Mpu:
    def get_data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD


def _other_assignments() -> None:
    assert initialize(_model(), Run(1, extra=_SGD)).mpu is None
    mpu = _Mpu()
    engine = initialize(_model(), Run(1, extra=_SGD), mpu=mpu)
    for name, way in (
        ("gradient_accumulation_steps", "set_train_batch_size"),
        ("train_micro_batch_size_per_gpu", "set_train_micro_batch_size"),
        ("gradient_clipping", "engine.optimizer.clip_grad"),
        ("is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary"),
        ("zero_optimization_stage", "`zero_optimization.stage`"),
        ("gradient_average", "gradient_allreduce_op"),
        ("enable_backward_allreduce", "param.grad"),
        ("communication_data_type", "`communication_data_type`"),
    ):
        with pytest.raises(StateError, match=f"engine.{name} was assigned 4.*{way}"):
            setattr(engine, name, 4)
    for holder, name in ((engine._config, "gradient_accumulation_steps"), (engine._config.zero_config, "stage")):
        with pytest.raises(ConfigError, match=f"{name} of a configuration was assigned 4"):
            setattr(holder, name, 4)
    with pytest.raises(TypeError):
        engine.global_steps = 1.5
    with pytest.raises(ConfigError, match="clip_grad was set to -1"):
        engine.optimizer.clip_grad = -1
    assert engine.communication_data_type == torch.float32 and engine.mpu is mpu
    engine.enable_backward_allreduce = engine.gradient_average = True  # as they are
    with pytest.raises(StateError, match="engine.allreduce_gradients was replaced by .*_other_assignments.*nothing here calls it"):
        engine.allreduce_gradients = lambda: None
    engine.monitor = engine.note = "a script's own"
    assert engine.monitor == engine.note == "a script's own"


def test_other_assignments_name_the_way() -> None:
    ranks.run_ranks(_other_assignments, 1)


def _left_out_steps(stage: int) -> None:
    """DeepSpeed-Chat's ``--align_overflow``: one model leaves out its step because the gradients of the other overflow."""
    settings = {**_SGD, "fp16": {"enabled": True, "initial_scale_power": 8}, "scheduler": {"type": "WarmupLR", "params": {}}}
    runs = []
    for skipped in (None, 1):
        engine = initialize(_model(), Run(stage, extra=settings))
        with pytest.raises(StateError, match="skip_step was set to True, but no gradients wait"):
            engine.optimizer.skip_step = True
        for step in range(3):
            if step == 1 and skipped is None:
                continue
            engine.backward(engine(_rows(3)[step][ranks.rank()].half()).float().square().mean())
            assert not engine.optimizer.check_overflow(external=True)
            engine.optimizer.skip_step = step == skipped
            engine.step()
        weights = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
        runs.append((weights, engine.get_lr(), engine.optimizer.cur_scale, engine.optimizer.overflow))
    assert all(map(torch.equal, runs[0][0], runs[1][0])) and runs[0][1:] == runs[1][1:]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_that_a_script_leaves_out(stage: int) -> None:
    ranks.run_ranks(_left_out_steps, 2, stage)


class _Wrapped:
    """A script's object in place of the engine's optimizer."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.steps = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> None:
        self.steps += 1
        self.inner.step()


def _a_replaced_step(stage: int) -> None:
    rows, calls = _rows(8), []
    engine = initialize(_model(), Run(stage, accumulation=2, extra=_SGD))
    optimizer = engine.optimizer
    original = optimizer.step

    def step(self: Any, *args: Any) -> Any:
        calls.append("before")
        result = original(*args)
        calls.append("after")
        return result

    optimizer.step = MethodType(step, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)  # replaces it once more
    _micro_steps(engine, rows[:2])
    assert calls == ["before", "after"]
    engine.backward(engine(rows[2][ranks.rank()]).square().mean())
    optimizer.step()
    engine.backward(engine(rows[3][ranks.rank()]).square().mean())
    optimizer.step()
    assert calls == ["before", "after"] * 3  # a script that calls it itself counts each call
    _same(engine, _plain([rows[:2], rows[2:4]]))

    optimizer.step = lambda: None
    engine.backward(engine(rows[4][ranks.rank()]).square().mean())
    engine.step()
    engine.backward(engine(rows[5][ranks.rank()]).square().mean())
    with pytest.raises(StateError, match=r"optimizer.step was replaced by .*<lambda>, which called the original step 0 times"):
        engine.step()
    del optimizer.step
    engine.optimizer = _Wrapped(optimizer)
    engine.step()
    assert engine.optimizer.steps == 1 and engine.global_steps == 3

    inherited = DeepSpeedOptimizer.step
    try:
        DeepSpeedOptimizer.step = lambda self: (calls.append("class"), inherited(self))  # type: ignore[method-assign,assignment]
        engine.optimizer = optimizer
        _micro_steps(engine, rows[6:])
    finally:
        del DeepSpeedOptimizer.step
    assert calls[-1] == "class"
    _same(engine, _plain([rows[:2], rows[2:4], rows[4:6], rows[6:]]))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_a_script_replaces(stage: int) -> None:
    ranks.run_ranks(_a_replaced_step, 2, stage)


def _loss_scale_of_a_script() -> None:
    rows = _rows(3)
    engine = initialize(_model(), Run(2, extra=_SGD | {"fp16": {"enabled": True, "initial_scale_power": 8}}))
    plain = initialize(_model(), Run(2, extra=_SGD | {"fp16": {"enabled": True, "loss_scale": 16}}))
    optimizer = engine.optimizer
    assert optimizer.loss_scale == 256
    optimizer.override_loss_scale(16)
    for one in (engine, plain):
        _micro_steps(one, rows[:1].half())
    for param, other in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(safe_get_full_fp32_param(param), safe_get_full_fp32_param(other))
    assert not optimizer.dynamic_loss_scale and optimizer.loss_scale == 16 and not optimizer.check_overflow()
    engine.backward(engine(rows[1][ranks.rank()].half()).square().mean() * (6e4 if ranks.rank() else 1))
    with pytest.raises(StateError, match=r"set to 32, but gradients that were scaled by 16 wait"):
        optimizer.override_loss_scale(32)
    assert optimizer.check_overflow(external=True) and optimizer.overflow  # rank 1 alone overflows
    engine.step()
    assert engine.skipped_steps == 1 and optimizer.loss_scale == 16
    optimizer.override_loss_scale(32)
    _micro_steps(engine, rows[2:].half())
    assert engine.global_steps == 3 and engine.skipped_steps == 1


def test_a_loss_scale_of_a_script() -> None:
    ranks.run_ranks(_loss_scale_of_a_script, 2)


def _replaced_on_classes() -> None:
    for one, name in ((Engine, "gradient_clipping"), (DeepSpeedOptimizer, "reduce_gradients"), (PipelineEngine, "_exec_reduce_grads")):
        made = vars(one).get(name)
        setattr(one, name, lambda self: None)
        try:
            with pytest.raises(StateError, match=rf"{one.__name__}\.{name} was .*<lambda>.*"):
                initialize(_model(), Run(1, extra=_SGD))
        finally:
            delattr(one, name) if made is None else setattr(one, name, made)
    original = Engine._broadcast_model
    Engine._broadcast_model = lambda self: None  # type: ignore[method-assign,assignment]
    Engine.helper = lambda self: 3  # type: ignore[attr-defined]
    told: list[str] = []
    try:
        with patch.object(replaced, "warn_once", told.append):
            engine = initialize(_model(), Run(1, extra=_SGD))
    finally:
        Engine._broadcast_model = original  # type: ignore[method-assign]
    assert len(told) == 1 and "Engine._broadcast_model was replaced by" in told[0] and engine.helper() == 3
    del Engine.helper  # type: ignore[attr-defined]


def test_methods_that_a_script_replaces_on_classes() -> None:
    ranks.run_ranks(_replaced_on_classes, 1)
