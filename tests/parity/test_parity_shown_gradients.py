"""Test ``param.grad`` after a backward: the mean over ranks at stage 0, as scripts read and change it; at stages 1 to 3 None with a
warning, or with ``hf_zero.show_gradients`` the mean over ranks too.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.core.schedule import read_gradients
from hf_zero.core.units.sharded_parameter import ShardedParameter
from hf_zero.errors import StateError
from tests.support import ranks

STEPS, CLIP = 3, 0.05


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 2))


def _engine(stage: int = 0, **config: Any) -> Any:
    sections = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        **config,
    }
    return hf_zero.initialize(model=_model(), config=sections)[0]


def _rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(_rows(step, rank).to(next(model.parameters()).dtype)).float().square().mean()


def _plain_grads(steps: list[int], model: nn.Module) -> list[torch.Tensor]:
    for step in steps:
        for rank in range(ranks.world()):
            (_loss(model, step, rank) / ranks.world() / len(steps)).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def _shown(engine: Any) -> list[torch.Tensor | None]:
    return [param.grad for param in engine.parameters()]


def _all_none(engine: Any) -> bool:
    return all(grad is None for grad in _shown(engine))


def _is_shown() -> None:
    for precision, scale, tolerance in (
        ({}, 1.0, 1e-6),
        ({"bf16": {"enabled": True}}, 1.0, 2e-2),
        ({"fp16": {"enabled": True}}, 2.0**16, 4e-3),
    ):
        engine = _engine(gradient_accumulation_steps=2, **precision)
        for step in (0, 1):
            assert _all_none(engine), "a micro-step in the middle shows nothing"
            engine.backward(_loss(engine, step, ranks.rank()))
            engine.step() if step == 0 else None
        found = [grad / scale for grad in _shown(engine) if grad is not None]
        torch.testing.assert_close(found, _plain_grads([0, 1], _model()), rtol=tolerance, atol=tolerance, msg=str(precision))
        for param, grad in zip(engine.parameters(), found, strict=True):
            assert torch.equal(hf_zero.utils.safe_get_full_grad(param), grad)
        norm = torch.stack([grad.norm() for grad in found]).norm()
        engine.step()
        torch.testing.assert_close(torch.tensor(engine.get_global_grad_norm()), norm)
        assert _all_none(engine)
        if hasattr(torch.Tensor, "grad_dtype"):
            assert {param.grad_dtype for param in engine.parameters()} == {engine.module[0].weight.dtype}
        engine.destroy()


def _is_taken() -> None:
    """Clip a gradient in place, set it to None, and run a second backward before the step: results are plain PyTorch's."""
    model, engine = _model(), _engine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    for step in range(STEPS):
        for again in range(1 + step % 2):  # the second one is summed up with the first
            _plain_grads([step + again], model)
            engine.backward(_loss(engine, step + again, ranks.rank()))
        for params in (list(model.parameters()), list(engine.parameters())):
            params[-1].grad = None
            nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    torch.testing.assert_close(list(engine.parameters()), list(model.parameters()), rtol=1e-5, atol=1e-6)
    engine.backward(_loss(engine, 0, ranks.rank()))
    engine.zero_grad()
    assert _all_none(engine)
    engine.destroy()


def _is_moved() -> None:
    """Give gradients other memory, as Grokfast does (``grad.data = value``), before a look, a forward, a clip: as in plain PyTorch."""
    for stage in (0, 1, 3):
        model, engine = _model(), _engine(stage, hf_zero={"show_gradients": True})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
        for step in range(STEPS):
            _plain_grads([step], model)
            engine.backward(_loss(engine, step, ranks.rank()))
            for params in (list(model.parameters()), list(engine.parameters())):
                for param in params:
                    moved = param.grad.data * 2 + 0.1  # type: ignore[union-attr]
                    if step == 1:
                        param.grad.set_(moved)  # type: ignore[union-attr]
                    else:
                        param.grad.data = moved  # type: ignore[union-attr]
                if step < 2:
                    nn.utils.clip_grad_norm_(params, CLIP)
            if step == 0:
                for param, plain in zip(engine.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(hf_zero.utils.safe_get_full_grad(param), plain.grad, msg=str(stage))
            elif step == 2 and stage == 0:
                with torch.no_grad():
                    _loss(engine, step, ranks.rank())
            if step == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the engine's own
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
        found = [hf_zero.utils.safe_get_full_fp32_param(param) for param in engine.parameters()]
        torch.testing.assert_close(found, [param.detach() for param in model.parameters()], rtol=1e-5, atol=1e-6, msg=str(stage))
        engine.destroy()


def _is_none_elsewhere() -> None:
    for stage in (0, 1, 2, 3):
        engine = _engine(stage, gradient_accumulation_steps=2)
        for told in ("in the middle of a gradient accumulation", '"show_gradients": true'):
            engine.backward(_loss(engine, 0, ranks.rank()))
            if stage == 0 and "show" in told:  # shown at the boundary
                engine.step()
                continue
            with mock.patch.object(read_gradients, "warn_once") as warned:
                nn.utils.clip_grad_norm_(engine.parameters(), 1e6) if "show" in told else None  # torch's function asks in vain, unnoticed
                nn.Module.zero_grad(nn.Linear(2, 2))
                assert not warned.call_args_list
                assert all(param.grad is None for param in engine.module.parameters()), stage
            (text,) = [call.args[0] for call in warned.call_args_list]
            assert text.startswith("0.weight.grad is None") and told in text
            engine.step()
        assert {type(param) for param in engine.parameters()} <= {nn.Parameter, ShardedParameter}
        engine.destroy()


@torch.no_grad()
def _perturb(params: list[nn.Parameter], step: int) -> None:
    """Change gradients in all the ways that scripts know."""
    first, bias, second, *_, last = params
    if step == 0:
        for param in params:  # noise
            if param.grad is not None:
                param.grad.add_(torch.randn(param.grad.shape, generator=torch.Generator().manual_seed(param.grad.numel())), alpha=0.1)
    elif step == 1:  # centralized by assignment, scaled through data, dropped
        first.grad = first.grad - first.grad.mean(dim=1, keepdim=True)
        bias.grad.data.mul_(0.5)
        held = second.grad.view(-1)
        last.grad = None
        held[3:] = 0.25
    elif step == 2:
        nn.utils.clip_grad_value_(params, 0.01)
    else:
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        torch._foreach_mul_([param.grad for param in params], 0.5 / float(norm))
        nn.utils.clip_grad_norm_(params, CLIP)
        params[0].grad.mul_(2)


def _attack(params: list[nn.Parameter], model: Any, step: int, gathered: bool) -> None:
    """Move a weight along its gradient, as adversarial training does."""
    weight = params[0]
    with hf_zero.zero.GatheredParameters([weight], enabled=gathered):
        if weight.grad is not None:
            weight.data.add_(weight.grad / weight.grad.norm(), alpha=0.1)


def _is_served(stage: int, persist: int) -> None:
    model = _model()
    zero = {"stage": stage, "stage3_param_persistence_threshold": persist}
    engine = _engine(stage, zero_optimization=zero, gradient_clipping=0.0, hf_zero={"show_gradients": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    plain, own = list(model.parameters()), list(engine.parameters())
    for step in range(5):
        _plain_grads([step], model)
        engine.backward(_loss(engine, step, ranks.rank()))
        if step == 4:
            _attack(plain, model, step, gathered=False)
            _attack(own, engine, step, gathered=stage == 3)
            _plain_grads([step], model)
            engine.backward(_loss(engine, step, ranks.rank()))
        else:
            _perturb(plain, step)
            _perturb(own, step)
        for param, expected in zip(own, plain, strict=True):
            shown = torch.zeros_like(expected) if expected.grad is None else expected.grad
            torch.testing.assert_close(
                hf_zero.utils.safe_get_full_grad(param), shown, msg=lambda text, step=step: f"{stage} {step}: {text}"
            )
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        for param, expected in zip(own, plain, strict=True):
            torch.testing.assert_close(hf_zero.utils.safe_get_full_fp32_param(param), expected.data, rtol=1e-5, atol=1e-6)
    engine.backward(_loss(engine, 0, ranks.rank()))
    with pytest.raises(StateError, match=r"rank 0: read 0\.weight\.grad; rank 1: step\(\)"):
        engine.module[0].weight.grad if ranks.rank() == 0 else engine.step()
    engine.destroy()


def _are_served() -> None:
    for stage, persist in ((1, 0), (2, 0), (3, 0), (3, 10**5)):
        _is_served(stage, persist)


def _is_replaced_in_16_bit() -> None:
    """Assign a function of the shown gradient, which is wider than its parameter, at each stage."""
    found = []
    for stage, persist in ((0, 0), (1, 0), (3, 0), (3, 10**5)):
        zero = {"stage": stage, "stage3_param_persistence_threshold": persist}
        engine = _engine(bf16={"enabled": True}, zero_optimization=zero, hf_zero={"show_gradients": True})
        for step in range(2):
            engine.backward(_loss(engine, step, ranks.rank()))
            for param in engine.parameters():
                if param.grad is not None:
                    param.grad = param.grad - param.grad.mean()
            engine.step()
        found.append([hf_zero.utils.safe_get_full_fp32_param(param) for param in engine.parameters()])
        if hasattr(torch.Tensor, "grad_dtype"):
            assert {param.grad_dtype for param in engine.parameters()} == {torch.bfloat16}
        engine.destroy()
    for weights in found[1:]:
        torch.testing.assert_close(weights, found[0], rtol=1e-5, atol=1e-6)


def _is_never_added_to() -> None:
    engine = _engine()
    for _ in range(2):  # a forward that may train hides what the last backward has left
        (engine.module(_rows(0, 0))).sum().backward()
    plain = _model()
    (2 * plain(_rows(0, 0)).sum()).backward()
    torch.testing.assert_close(engine.module[0].weight.grad, plain[0].weight.grad)
    with pytest.raises(StateError, match=r"0\.weight: a second backward before step\(\)"):
        nn.functional.linear(_rows(0, 0), engine.module[0].weight).sum().backward()


def test_it_is_the_mean_over_ranks_at_a_boundary() -> None:
    ranks.run_ranks(_is_shown, 2)


def test_what_a_script_does_to_it_counts() -> None:
    ranks.run_ranks(_is_taken, 2)


def test_a_gradient_with_other_memory_counts() -> None:
    ranks.run_ranks(_is_moved, 2)


def test_there_is_none_where_gradients_are_sharded() -> None:
    ranks.run_ranks(_is_none_elsewhere, 2)


def test_it_is_served_where_gradients_are_sharded() -> None:
    ranks.run_ranks(_are_served, 2)


def test_it_can_be_replaced_in_16_bit() -> None:
    ranks.run_ranks(_is_replaced_in_16_bit, 2)


def test_no_backward_adds_to_it() -> None:
    ranks.run_ranks(_is_never_added_to, 1)
