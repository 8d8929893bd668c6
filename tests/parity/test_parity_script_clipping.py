"""`torch.nn.utils.clip_grad_norm_` between backward and step: all gradients, some, and those of the optimizer's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_  # as many scripts import it, before there is an engine

import hf_zero
from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import SMALL_MODEL
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)
MLP = CASES["mlp"]
Clip = Callable[[nn.Module, torch.optim.Optimizer, int], list[torch.Tensor]]


def _all(model: nn.Module, _optimizer: Any, step: int) -> list[torch.Tensor]:
    return [clip_grad_norm_(model.parameters(), 0.1 / (step + 1))]


def _parts(model: nn.Module, _optimizer: Any, _step: int) -> list[torch.Tensor]:
    first, *others = list(model.parameters())
    return [clip_grad_norm_(first, 0.01), nn.utils.clip_grad_norm_(others[-2:], 0.02), clip_grad_norm_(others, 1e6)]


def _in_two_calls(model: nn.Module, _optimizer: Any, _step: int) -> list[torch.Tensor]:
    """The norm is that of the gradients that the script sees: none, where they are sharded."""
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return [norm]


def _groups(_model: nn.Module, optimizer: torch.optim.Optimizer, _step: int) -> list[torch.Tensor]:
    return [clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 0.05)]


def _train(stage: int, clip: Clip, accumulation: int, offload: bool) -> None:
    models = [MLP.build().to(ranks.device()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in models]
    zero: dict[str, Any] = {"stage": stage, **SMALL_MODEL}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0}
    engine = hf_zero.initialize(model=models[1], optimizer=optimizers[1], config={**config, "zero_optimization": zero})[0]
    for step in range(3):
        for micro in range(accumulation):
            for rank in range(ranks.world()):
                (class_loss(models[0], MLP.rows(step, micro, rank)) / ranks.world() / accumulation).backward()
            engine.backward(class_loss(engine, MLP.rows(step, micro, ranks.rank())))
            if micro == accumulation - 1:
                expected, found = (clip(model, optimizer, step) for model, optimizer in zip(models, optimizers, strict=True))
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
            engine.step()
        optimizers[0].step()
        optimizers[0].zero_grad()
    with hf_zero.zero.GatheredParameters(list(models[1].parameters())):
        label = f"stage {stage}, {clip.__name__}"
        torch.testing.assert_close(
            list(models[1].parameters()), list(models[0].parameters()), rtol=1e-5, atol=2e-6, msg=lambda text: f"{label}: {text}"
        )
    assert float(clip_grad_norm_(models[1].parameters(), 1.0)) == 0.0, "no gradients wait"
    engine.destroy()


def _in_another_default_dtype(model: nn.Module, optimizer: Any, step: int) -> list[torch.Tensor]:
    """The norm has the type of the gradients, not the one that the script gives to new tensors."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return _all(model, optimizer, step)
    finally:
        torch.set_default_dtype(torch.float32)


def _clipped(stage: int) -> None:
    from hf_zero.errors import StateError, UnsupportedError

    for clip in (_all, _parts, _groups, _in_two_calls, _in_another_default_dtype):
        _train(stage, clip, 1, False)
    _train(stage, _all, 2, stage > 0)
    if stage == 0:  # param.grad is visible, and torch clips it
        return
    model = MLP.build()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage, **SMALL_MODEL}}
    engine, optimizer = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[:2]
    engine.backward(class_loss(engine, MLP.rows(0, 0, ranks.rank())))
    with pytest.raises(StateError, match="in the middle of a gradient accumulation"):
        clip_grad_norm_(model.parameters(), 1.0)
    engine.step()
    engine.backward(class_loss(engine, MLP.rows(0, 1, ranks.rank())))
    with pytest.raises(UnsupportedError, match=r"norm_type=inf"):
        clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    with pytest.raises(UnsupportedError, match="some of the tensors in optimizer.param_groups"):
        clip_grad_norm_(optimizer.param_groups[0]["params"][:1], 1.0)
    with pytest.raises(UnsupportedError, match="was called with the norm 1e"):
        clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(1e6))
    other = nn.Parameter(torch.ones(2, device=ranks.device()))
    other.grad = torch.ones_like(other)
    with pytest.raises(UnsupportedError, match="together with others"):
        clip_grad_norm_([*model.parameters(), other], 1.0)
    assert float(clip_grad_norm_(other, 0.5)) == pytest.approx(2**0.5)
    engine.step()
    for micro_step in range(2):
        engine.backward(class_loss(engine, MLP.rows(0, micro_step, ranks.rank())) * float("nan"))
        if micro_step == 0:
            engine.step()
    with pytest.raises(RuntimeError, match=r"error_if_nonfinite=True\): the norm of order 2 .* is nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    engine.zero_grad()
    engine.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 1, 3))
def test_torchs_clipping_of_sharded_gradients(stage: int) -> None:
    ranks.run_ranks(_clipped, 2, stage)


def _value(model: nn.Module, _optimizer: Any, step: int) -> list[torch.Tensor]:
    nn.utils.clip_grad_value_(model.parameters(), 0.01 * (step + 1))
    return []


def _largest(model: nn.Module, _optimizer: Any, _step: int) -> list[torch.Tensor]:
    return [clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))]


def _in_two_visible_calls(model: nn.Module, _optimizer: Any, _step: int) -> list[torch.Tensor]:
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return [norm]


def _half_precision(stage: int, clip: Clip) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the norms and weights of three steps in fp16 at a loss scale of 1024, in fp32 at stage -1."""
    model = MLP.build()
    fp16 = {"enabled": stage >= 0, "loss_scale": 1024, "auto_cast": True}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": max(stage, 0), **SMALL_MODEL}}
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine, optimizer = hf_zero.initialize(model=model, optimizer=sgd, config={**config, "fp16": fp16})[:2]
    norms = []
    for step in range(3):
        engine.backward(class_loss(engine, MLP.rows(step, 0, ranks.rank())))
        norms += [norm.float() for norm in clip(model, optimizer, step)]
        engine.step()
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        weights = [param.detach().float().clone() for param in model.parameters()]
    engine.destroy()
    return norms, weights


def _with_loss_scale() -> None:
    for clip in (_all, _parts, _groups, _value, _largest, _in_two_visible_calls):
        norms, weights = _half_precision(-1, clip)
        for stage in (0, 2) if clip not in (_largest, _in_two_visible_calls) else (0,):
            label = f"{clip.__name__}, stage {stage}"
            found = _half_precision(stage, clip)
            torch.testing.assert_close(found, (norms, weights), rtol=2e-2, atol=4e-3, msg=lambda text, label=label: f"{label}: {text}")
    with pytest.raises(RuntimeError, match="non-finite"):
        _half_precision(0, lambda model, _optimizer, _step: [clip_grad_norm_(_infinite(model), 1.0, error_if_nonfinite=True)])


def _infinite(model: nn.Module) -> list[nn.Parameter]:
    params = list(model.parameters())
    assert params[0].grad is not None
    params[0].grad.fill_(float("inf"))
    return params


def test_clipping_of_visible_gradients_with_a_loss_scale() -> None:
    ranks.run_ranks(_with_loss_scale, 2)


def _of_two_engines(stages: tuple[int, int]) -> None:
    models = [[MLP.build().to(ranks.device()) for _ in range(2)] for _ in range(2)]  # plain ones and those of engines
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for pair in models for model in pair]
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    engines = [
        hf_zero.initialize(model=model, optimizer=optimizer, config={**config, "zero_optimization": {"stage": stage, **SMALL_MODEL}})[0]
        for model, optimizer, stage in zip(models[1], optimizers[2:], stages, strict=True)
    ]
    for step in range(3):
        for factor, plain, engine in zip((1, 3), models[0], engines, strict=True):
            for rank in range(ranks.world()):
                (factor * class_loss(plain, MLP.rows(step, 0, rank)) / ranks.world()).backward()
            engine.backward(factor * class_loss(engine, MLP.rows(step, 0, ranks.rank())))
        if step < 2:
            expected, found = (clip_grad_norm_([param for model in pair for param in model.parameters()], 0.05) for pair in models)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        else:
            for pair in models:
                nn.utils.clip_grad_value_([param for model in pair for param in model.parameters()], 0.01)
        for update in (*engines, *optimizers[:2]):
            update.step()
        for optimizer in optimizers[:2]:
            optimizer.zero_grad()
    with hf_zero.zero.GatheredParameters([param for model in models[1] for param in model.parameters()]):
        for plain, model in zip(*models, strict=True):
            torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-5, atol=2e-6)
    for engine in engines:
        engine.destroy()


@pytest.mark.parametrize("stages", slow_but([(2, 2), (3, 0), (0, 0), (3, 3)], (3, 0)))
def test_clipping_of_two_engines_by_one_norm(stages: tuple[int, int]) -> None:
    ranks.run_ranks(_of_two_engines, 2, stages)
