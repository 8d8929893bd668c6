"""Test gradients that a script writes to ``param.grad`` itself, after a backward or instead of one, as in plain PyTorch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.rows import slow_but

STEPS, CLIP = 3, 0.5


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 2))


def _engine(stage: int, **config: Any) -> Any:
    sections = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        **config,
    }
    sections["zero_optimization"] = {"stage": stage, **config.get("zero_optimization", {})}
    return hf_zero.initialize(model=_model(), config=sections)[0]


def _grads(step: int, rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(param.shape, generator=draw) for param in _model().parameters()]


def _rows(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def _plain(world: int, some: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Return weights and norms of one process that averages the gradients that all ranks write; ``some``: the last layer keeps
    backward's.
    """
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        model(_rows(step)).square().mean().backward()
        means = [torch.stack(each).mean(0) for each in zip(*(_grads(step, rank) for rank in range(world)), strict=True)]
        for param, mean in list(zip(model.parameters(), means, strict=True))[: -2 if some else None]:
            param.grad = mean
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], norms


def _written(engine: Any, some: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Train the same through an engine; all gradients are written without a backward, or ``some`` after one."""
    norms = []
    for step in range(STEPS):
        if some:
            engine.backward(engine(_rows(step)).square().mean())
        for param, grad in list(zip(engine.parameters(), _grads(step, ranks.rank()), strict=True))[: -2 if some else None]:
            param.grad = grad
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        assert all(param.grad is None for param in engine.parameters())
    return [hf_zero.utils.safe_get_full_fp32_param(param) for param in engine.parameters()], norms


def _as_plain() -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    for stage, zero in ((0, {}), (1, {}), (2, {}), (2, offload)):
        for some in (False, True):
            expected = _plain(ranks.world(), some)
            engine = _engine(stage, zero_optimization=zero)
            found = _written(engine, some)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=partial("{2}: stage {0} {1}".format, stage, zero))
            engine.destroy()


@pytest.mark.fast_rows("2")
@pytest.mark.parametrize("world", [1, 2])
def test_written_gradients_are_those_of_the_step(world: int) -> None:
    ranks.run_ranks(_as_plain, world)


def _counts_micro_steps() -> None:
    """Take a step of two micro-steps: gradients written at the second replace those of the first backward."""
    for stage in (0, 1, 2):
        engine = _engine(stage, gradient_accumulation_steps=2)
        engine.backward(engine(_rows(0)).square().mean())
        engine.step()
        for param, grad in zip(engine.parameters(), _grads(0, 0), strict=True):
            param.grad = grad
        assert engine.global_steps == 0
        engine.step()
        assert engine.global_steps == 1, stage
        expected = torch.cat([grad.flatten() for grad in _grads(0, 0)]).norm()
        torch.testing.assert_close(torch.tensor(float(engine.get_global_grad_norm())), expected, msg=f"stage {stage}")
        engine.destroy()


def test_written_gradients_count_as_a_micro_step() -> None:
    ranks.run_ranks(_counts_micro_steps, 2)


def _overflows() -> None:
    """Write gradients multiplied by the loss scale, as DeepSpeed's own tests of dynamic loss scales do."""
    engine = _engine(1, fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}, gradient_clipping=0.0)
    for value, scale, norm in ((1.0, 16.0, 1 / 16), (1.0, 32.0, 1 / 16), (float("inf"), 16.0, None), (16.0, 16.0, 1.0)):
        count = sum(param.numel() for param in engine.parameters())
        for param in engine.parameters():
            param.grad = torch.full_like(param, value)
        engine.step()
        assert engine.optimizer.loss_scale == scale, value
        if norm is not None:
            assert abs(float(engine.get_global_grad_norm()) - norm * count**0.5) < 1e-3
    assert engine.skipped_steps == 1


def test_written_gradients_carry_the_loss_scale() -> None:
    ranks.run_ranks(_overflows, 2)


def _refused(stage: int, everywhere: bool) -> str:
    engine = _engine(stage)
    if everywhere or ranks.rank() == 1:
        engine.backward(engine(_rows(0)).square().mean()) if everywhere else None
        weight = next(param for param in engine.parameters() if param.numel() == 10)
        weight.grad = torch.ones_like(weight)
    with pytest.raises(StateError) as raised:
        engine.step()
    engine.destroy()
    return str(raised.value)


def _refused_while_empty() -> None:
    engine = _engine(3, zero_optimization={"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0})
    weight = next(iter(engine.parameters()))
    for _ in range(2):
        engine.backward(engine(_rows(0)).square().mean())
        assert weight.numel() == 0
        weight.grad = None
        with pytest.raises(StateError, match=r"0\.weight\.grad was given a gradient of shape \(10, 6\).*safe_set_full_grad"):
            weight.grad = torch.ones(10, 6)
        assert weight.grad is None
        hf_zero.utils.safe_set_full_grad(weight, torch.ones(10, 6))
        engine.step()
    with hf_zero.zero.GatheredParameters([weight]):
        assert type(weight) is nn.Parameter and type(copy.deepcopy(weight)) is nn.Parameter
        weight.grad = torch.ones(10, 6)
    with pytest.raises(StateError, match=r"0\.weight\.grad was written by the script.*safe_set_full_grad"):
        engine.step()
    weight.grad = None
    assert isinstance(copy.deepcopy(weight), nn.Parameter) and copy.deepcopy(weight).ds_shape == (10, 6)
    engine.destroy()


def test_what_cannot_be_taken_is_one_error_on_every_rank() -> None:
    ranks.run_ranks(_refused_while_empty, 2)
    for text in ranks.run_ranks(_refused, 2, 1, False):
        assert "0.bias.grad was written by the script on rank(s) 1 of 2 only" in text
    for text in ranks.run_ranks(_refused, 2, 3, True):
        assert "0.bias.grad was written by the script" in text and "safe_set_full_grad" in text


def _seen() -> None:
    """Check that ``safe_get_full_grad`` returns the gradient that the step uses: the mean of written ones, zero where one was removed."""
    for stage in (0, 1, 2):
        engine = _engine(stage, gradient_clipping=0.0)
        first, second, third = list(engine.parameters())[:3]
        engine.backward(engine(_rows(0)).square().mean())
        own = [torch.full(first.shape, float(rank)) for rank in range(ranks.world())]
        first.grad = own[ranks.rank()]
        mean = torch.stack(own).mean(0)
        torch.testing.assert_close(hf_zero.utils.safe_get_full_grad(first), mean, msg=f"stage {stage}")
        assert first.grad is own[ranks.rank()], "a look takes nothing away"
        with pytest.raises(StateError, match=r"0\.weight.*was written by the script.*safe_get_full_grad"):
            hf_zero.utils.safe_get_local_grad(first)
        hf_zero.utils.safe_update_full_grad_vectorized([first], lambda grad, _: grad * 2)
        torch.testing.assert_close(hf_zero.utils.safe_get_full_grad(first), 2 * mean, msg=f"stage {stage}")
        second.grad = None
        if stage == 0:
            assert not hf_zero.utils.safe_get_full_grad(second).any()
        hf_zero.utils.safe_set_full_grad(second, torch.ones(second.shape))
        third.grad = torch.ones_like(third)
        hf_zero.utils.safe_set_full_grad(third, torch.full(third.shape, 3.0))  # what is set last counts
        found = [hf_zero.utils.safe_get_full_grad(param) for param in engine.parameters()]
        for grad, value in zip(found[1:3], (1.0, 3.0), strict=True):
            torch.testing.assert_close(grad, torch.full_like(grad, value), msg=f"stage {stage}")
        engine.step()
        norm = torch.stack([grad.norm() for grad in found]).norm()
        torch.testing.assert_close(torch.tensor(float(engine.get_global_grad_norm())), norm, msg=f"stage {stage}")
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_written_gradient_is_seen(world: int) -> None:
    ranks.run_ranks(_seen, world)


def _seen_on_one_rank() -> str:
    engine = _engine(1)
    weight = next(engine.parameters())
    engine.backward(engine(_rows(0)).square().mean())
    if ranks.rank() == 1:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(StateError) as raised:
        hf_zero.utils.safe_get_full_grad(weight)
    engine.destroy()
    return str(raised.value)


def test_a_look_at_what_one_rank_has_written_is_one_error_on_every_rank() -> None:
    for text in ranks.run_ranks(_seen_on_one_rank, 2):
        assert "0.weight.grad was written by the script on rank(s) 1 of 2 only" in text


def _between(who: tuple[int, ...]) -> None:
    """Write between two micro-steps: plain PyTorch replaces the first's gradient and adds the second's to it."""
    for stage in (0, 1, 2):
        written, beside = (_engine(stage, gradient_accumulation_steps=2) for _ in range(2))
        weight = next(written.parameters())

        def train(engine: Any, step: int) -> None:
            engine.backward(engine(_rows(step)).square().mean())
            engine.step()

        train(written, 0)
        if ranks.rank() in who:
            weight.grad = torch.ones_like(weight)
        with pytest.raises(StateError, match=r"0\.weight\.grad was written by the script between micro-steps"):
            train(written, 1)
        written.zero_grad()
        for engine in (written, beside):
            train(engine, 2)
            train(engine, 3)
        assert written.global_steps == beside.global_steps == 1
        for mine, other in zip(written.parameters(), beside.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, msg=f"stage {stage}")
        written.destroy()
        beside.destroy()


def test_a_gradient_written_between_micro_steps_is_refused() -> None:
    ranks.run_ranks(_between, 1, (0,))
    for who in ((0, 1), (1,)):
        ranks.run_ranks(_between, 2, who)


def _after_zero_grad() -> None:
    """Check that without a backward since ``zero_grad`` the step uses written gradients and zeros, as plain PyTorch with zeros written."""
    for stage in (0, 1, 2):
        engine = _engine(stage, gradient_clipping=0.0)
        weight = next(engine.parameters())
        engine.backward(engine(_rows(0)).square().mean())
        engine.zero_grad()
        weight.grad = torch.full_like(weight, 2.0)
        torch.testing.assert_close(hf_zero.utils.safe_get_full_grad(weight), torch.full_like(weight, 2.0), msg=f"stage {stage}")
        engine.step()
        assert engine.global_steps == 1
        assert abs(float(engine.get_global_grad_norm()) - 2 * weight.numel() ** 0.5) < 1e-4, stage
        engine.destroy()


def test_a_gradient_written_after_zero_grad_counts_alone() -> None:
    ranks.run_ranks(_after_zero_grad, 2)


def _set_between() -> None:
    """Set a gradient between micro-steps: it replaces those of earlier micro-steps, reduced or not, and later ones are added."""
    for stage in (0, 1, 2, 3):
        for deferred in (False, True):
            engine = _engine(
                stage,
                gradient_clipping=0.0,
                gradient_accumulation_steps=2,
                optimizer={"type": "SGD", "params": {"lr": 0.5}},
                zero_optimization={"stage3_param_persistence_threshold": 0},
            )
            plain = _model()
            with engine.no_sync() if deferred and stage < 2 else nullcontext():
                engine.backward(engine(_rows(0)).square().mean())
            engine.step()
            weight = engine.module[2].weight
            value = torch.randn(10, 10, generator=torch.Generator().manual_seed(7))
            hf_zero.utils.safe_set_full_grad(weight, value)
            engine.backward(engine(_rows(1)).square().mean())
            torch.testing.assert_close(engine.global_steps, 0)
            engine.step()
            assert engine.global_steps == 1
            losses = [plain(_rows(step)).square().mean() / 2 for step in (0, 1)]
            losses[0].backward()
            plain[2].weight.grad = value
            losses[1].backward()
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
            for mine, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
                found = hf_zero.utils.safe_get_full_fp32_param(mine)
                torch.testing.assert_close(found, other.data, rtol=1e-5, atol=1e-6, msg=f"stage {stage}, deferred {deferred}")
            engine.destroy()


def test_a_gradient_set_between_micro_steps_replaces_those_before() -> None:
    ranks.run_ranks(_set_between, 2)


def _hooks_after_the_engine(stage: int) -> None:
    """Hooks that a script registers on parameters after ``initialize`` run before their gradients are taken, from the first backward on."""
    for accumulation in (1, 2):
        models = [CASES["mlp"].build().to(ranks.device()) for _ in range(2)]
        plain = torch.optim.SGD(models[0].parameters(), lr=0.1)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "zero_optimization": zero}
        config["gradient_clipping"] = 0.0
        optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
        engine = hf_zero.initialize(model=models[1], optimizer=optimizer, config=config)[0]
        seen: list[str] = []

        def halve(name: str, param: nn.Parameter, seen: list[str] = seen) -> None:
            assert param.grad is not None
            seen.append(name)
            param.grad.mul_(0.5)

        for name, param in models[1].named_parameters():
            if "bias" not in name:
                param.register_post_accumulate_grad_hook(partial(halve, name))
        for name, param in models[0].named_parameters():
            if "bias" not in name:
                param.register_hook(lambda grad: 0.5 * grad)
        for step in range(2):
            for micro in range(accumulation):
                for rank in range(ranks.world()):
                    (class_loss(models[0], CASES["mlp"].rows(step, micro, rank)) / ranks.world() / accumulation).backward()
                engine.backward(class_loss(engine, CASES["mlp"].rows(step, micro, ranks.rank())))
                engine.step()
            plain.step()
            plain.zero_grad()
        assert len(seen) == 2 * accumulation * sum("bias" not in name for name, _ in models[1].named_parameters())
        with hf_zero.zero.GatheredParameters(list(models[1].parameters())):
            torch.testing.assert_close(list(models[1].parameters()), list(models[0].parameters()), rtol=1e-5, atol=1e-6)
        engine.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but((0, 1, 2, 3), 2, 3))
def test_hooks_of_a_script_on_parameters(stage: int) -> None:
    ranks.run_ranks(_hooks_after_the_engine, 2, stage)


def _hook_with_a_result(stage: int) -> None:
    model = CASES["mlp"].build()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: param.grad)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    with pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
        engine.backward(class_loss(engine, CASES["mlp"].rows(0, 0, 0)))
    engine.destroy()


def test_a_hook_that_returns_a_value_gets_torchs_error() -> None:
    for stage in (0, 3):
        ranks.run_ranks(_hook_with_a_result, 1, stage)
