"""Scripts over accelerate that act between `accelerator.backward()` and `optimizer.step()`, and Accelerators with several models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks, trainers
from tests.support.rows import slow_but

STEPS, LR, WIDTH = 4, 0.3, 6
STAGES = (0, 1, 2, 3)


def _build(seed: int = 0, inputs: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 3)).to(ranks.device())


def _rows(step: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + (ranks.rank() if rank is None else rank))
    return torch.randn(4, WIDTH, generator=generator).to(ranks.device())


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": LR, "momentum": 0.9, **options})


@contextmanager
def _accelerator(stage: int, **keys: Any) -> Iterator[Any]:
    from accelerate import Accelerator, DeepSpeedPlugin

    with trainers.clean_state():
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero, **keys}
        yield Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            gradient_accumulation_steps=keys.get("gradient_accumulation_steps", 1),
        )


def _weights(model: Any) -> list[Tensor]:
    from hf_zero.zero import GatheredParameters

    with GatheredParameters(list(model.parameters())):
        return [param.detach().clone() for param in model.parameters()]


class _Plain:
    """The loop's objects in plain PyTorch: gradients are those of all ranks' rows."""

    def __init__(self) -> None:
        self.model = _build()
        self.optimizer = _sgd(self.model)
        self.seen: list[float] = []

    def backward(self, step: int) -> None:
        for rank in range(ranks.world()):
            (self.model(_rows(step, rank)).square().mean() / ranks.world()).backward()

    def clip(self, norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), norm))

    def gradients(self, factor: float) -> float:
        total = sum(float(param.grad.square().sum()) for param in self.model.parameters() if param.grad is not None)
        for param in self.model.parameters():
            param.grad = None if param.grad is None else param.grad * factor
        return total

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


class _Zero:
    """The same under accelerate; ``torchs`` clips by torch's function."""

    def __init__(self, accelerator: Any, torchs: bool) -> None:
        self.accelerator, self.torchs = accelerator, torchs
        model = _build()
        self.model, self.optimizer = accelerator.prepare(model, _sgd(model))
        self.seen: list[float] = []

    def backward(self, step: int) -> None:
        self.accelerator.backward(self.model(_rows(step)).square().mean())

    def clip(self, norm: float) -> float:
        clip = nn.utils.clip_grad_norm_ if self.torchs else self.accelerator.clip_grad_norm_
        return float(clip(self.model.parameters(), norm))

    def gradients(self, factor: float) -> float:
        from hf_zero.utils import safe_get_full_grad, safe_set_full_grad

        total = 0.0
        for param in self.model.parameters():
            grad = safe_get_full_grad(param)
            total += float(grad.square().sum())
            safe_set_full_grad(param, grad * factor)
        return total

    def weights(self) -> list[Tensor]:
        return _weights(self.model)


def _rate(loop: Any, step: int) -> None:
    loop.optimizer.zero_grad()
    loop.backward(step)
    for group in loop.optimizer.param_groups:
        group["lr"] = LR / (step + 1)
    loop.optimizer.step()


def _drop(loop: Any, step: int) -> None:
    loop.backward(step)
    loop.seen.append(loop.clip(1e6))
    if step != 1:
        loop.optimizer.step()
    loop.optimizer.zero_grad()


def _drop_first(loop: Any, step: int) -> None:
    loop.backward(step)
    if step:
        loop.optimizer.step()
    loop.optimizer.zero_grad()


def _leave_out(loop: Any, step: int) -> None:
    """The gradients of a step that is left out are added to the next ones."""
    loop.backward(step)
    if step != 1:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def _clip(loop: Any, step: int) -> None:
    loop.backward(step)
    loop.seen.append(loop.clip(0.01 * (step + 1)))
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def _edit(loop: Any, step: int) -> None:
    loop.backward(step)
    loop.seen.append(loop.gradients(0.5))
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def _look(loop: Any, step: int) -> None:
    loop.backward(step)
    before = loop.weights()
    loop.optimizer.step()
    loop.seen.append(sum(float((new - old).square().sum()) for new, old in zip(loop.weights(), before, strict=True)))
    loop.optimizer.zero_grad()


def _clip_and_edit(loop: Any, step: int) -> None:
    """Between clipping and the step, as in a Trainer's on_pre_optimizer_step: gradients are clipped, and clipped no more once changed."""
    loop.backward(step)
    loop.seen.append(loop.clip(0.01 * (step + 1)))
    loop.seen.append(loop.gradients(3.0))
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def _clip_and_change(loop: Any, step: int) -> None:
    loop.backward(step)
    loop.seen.append(loop.clip(0.01 * (step + 1)))
    for param in loop.model.parameters():
        loop.seen.append(float(param.grad.square().sum()))
        param.grad.mul_(3.0 if step < 2 else 1.0)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def _clip_some(loop: Any, step: int) -> None:
    """A call clips one update: the second is dropped, the third and fourth are not clipped."""
    loop.backward(step)
    if step < 2:
        loop.seen.append(loop.clip(0.02))
    if step != 1:
        loop.optimizer.step()
    loop.optimizer.zero_grad()


def _clip_twice(loop: Any, step: int) -> None:
    """A second call sees clipped gradients: the smaller number counts."""
    loop.backward(step)
    for norm in (1e6, 0.02, 0.01 if step % 2 else 0.5):
        loop.seen.append(loop.clip(norm))
    loop.optimizer.step()
    loop.optimizer.zero_grad()


LOOPS: tuple[Callable[[Any, int], None], ...] = (
    _rate, _drop, _drop_first, _leave_out, _clip, _edit, _look, _clip_and_edit, _clip_and_change, _clip_some,
    _clip_twice
)  # fmt: skip
_CLIPPING = (_clip, _drop, _clip_and_edit, _clip_and_change, _clip_some, _clip_twice)


def _close(found: list[Tensor], expected: list[Tensor], label: str) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, msg=lambda text: f"{label}: {text}")


def _between(stage: int) -> None:
    for body in LOOPS:
        for torchs in (False, True) if body is _clip else (False,):
            plain = _Plain()
            keys: dict[str, Any] = {"gradient_clipping": "auto"} if body in _CLIPPING and not torchs else {}
            with _accelerator(stage, **keys, hf_zero={"show_gradients": body is _clip_and_change}) as accelerator:
                loop = _Zero(accelerator, torchs)
                for step in range(STEPS):
                    body(plain, step)
                    body(loop, step)
                label = f"stage {stage}, {body.__name__}"
                torch.testing.assert_close(loop.seen, plain.seen, rtol=1e-5, atol=1e-7, msg=lambda text, at=label: f"{at}: {text}")
                _close(loop.weights(), plain.weights(), label)
                loop.model.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_what_a_script_does_before_the_step_counts(stage: int) -> None:
    ranks.run_ranks(_between, 2, stage)


def _adversaries(
    backward: Callable[[Tensor], None], first: Any, second: Any, steps: tuple[Any, Any], rows: Callable[[int], Tensor]
) -> None:
    """Train a generator and its critic, each with the other's help, and then the two together."""
    for step in range(3):
        steps[1].zero_grad()
        backward(second(first(rows(step)).detach()).square().mean() - second(rows(step + 50)[:, :3]).mean())
        steps[1].step()
        steps[0].zero_grad()
        backward(-second(first(rows(step))).square().mean())
        steps[0].step()
    for optimizer in steps:
        optimizer.zero_grad()
    backward(second(first(rows(9))).square().mean())
    for optimizer in steps:
        optimizer.step()


def _saves_beside_another_stage(stage: int) -> None:
    """A model that was prepared before one of stage 3 is saved by its own stage, though Accelerator keeps the last configuration."""
    from accelerate import Accelerator, DeepSpeedPlugin

    with trainers.clean_state():
        stages = (min(stage, 2), 3)
        config = {"train_micro_batch_size_per_gpu": 4}
        plugins = {str(own): DeepSpeedPlugin(hf_ds_config={**config, "zero_optimization": {"stage": own}}) for own in stages}
        accelerator = Accelerator(deepspeed_plugins=plugins)
        engines = []
        for own in stages:
            accelerator.state.select_deepspeed_plugin(str(own))
            model = _build()
            engines.append(accelerator.prepare(model, _sgd(model))[0])
        for own, engine in zip(stages, engines, strict=True):
            found = accelerator.get_state_dict(engine)
            assert (found is None) == (own == 3 and accelerator.process_index > 0)
            if found is not None:
                torch.testing.assert_close(found, _build().state_dict(), rtol=0, atol=0)
        for engine in engines:
            engine.destroy()


def _several_models(stage: int) -> None:
    from hf_zero.errors import StateError, UnsupportedError

    plain = _build(), _build(1, 3)
    rows = lambda step: torch.cat([_rows(step, rank) for rank in range(ranks.world())])  # noqa: E731
    _adversaries(lambda loss: loss.backward(), *plain, tuple(_sgd(model, lr=0.05) for model in plain), rows)
    with _accelerator(stage) as accelerator:
        pairs = [accelerator.prepare(model, _sgd(model, lr=0.05)) for model in (_build(), _build(1, 3))]
        (first, generator), (second, critic) = pairs
        _adversaries(accelerator.backward, first, second, (generator, critic), _rows)
        for model, expected in zip((first, second), plain, strict=True):
            _close(_weights(model), [param.detach() for param in expected.parameters()], f"stage {stage}")
        for model in (first, second):
            model.destroy()
    _saves_beside_another_stage(stage)
    # Of one model: an optimizer for each part is refused, one that was not prepared with it too, and a second one in its place trains.
    with _accelerator(stage) as accelerator:
        model = _build()
        prepared = [accelerator.prepare(part) for part in (model, _sgd(model))]
        with pytest.raises(StateError, match=r"prepared without an optimizer.*accelerator\.prepare\(model, optimizer\)"):
            accelerator.backward(prepared[0](_rows(0)).square().mean())
        prepared[0].destroy()
    with _accelerator(stage, gradient_accumulation_steps=2) as accelerator:
        model = _build()
        with pytest.raises(UnsupportedError, match=r"given 2 optimizers \(SGD, SGD\)"):
            accelerator.prepare(model, _sgd(model[0]), _sgd(model[2]))
        model[0].requires_grad_(False)
        engine, optimizer = accelerator.prepare(model, _sgd(model[2]))
        with pytest.raises(StateError, match=r"SGD\.step\(\): 2\.weight is trained by an engine"):
            accelerator.prepare(_sgd(model)).step()
        expected = _build()
        plain_optimizer = _sgd(expected[2])
        for micro_steps in (2, 3):  # the number changes while the engine trains
            accelerator.gradient_accumulation_steps = micro_steps
            accelerator.step = 0
            for micro in range(micro_steps):
                with accelerator.accumulate(engine):
                    accelerator.backward(engine(_rows(micro)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                (expected(rows(micro)).square().mean() / micro_steps).backward()
            plain_optimizer.step()
            expected.zero_grad()
        accelerator.gradient_accumulation_steps, accelerator.step = 2, 0
        model[0].requires_grad_(True)
        engine, optimizer = accelerator.prepare(accelerator.unwrap_model(engine), _sgd(model))
        plain_optimizer = _sgd(expected)
        for micro in range(2):
            with accelerator.accumulate(engine):
                accelerator.backward(engine(_rows(micro)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            (expected(rows(micro)).square().mean() / 2).backward()
        plain_optimizer.step()
        _close(_weights(engine), [param.detach() for param in expected.parameters()], f"stage {stage}, prepared again")
        engine.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_several_models_of_one_accelerator(stage: int) -> None:
    ranks.run_ranks(_several_models, 2, stage)


def _joint(models: tuple[Any, Any], rows: Tensor) -> Tensor:
    return models[0](rows).square().mean() + 3 * models[1](rows.flip(0)).square().mean()


def _clipped_together(stage: int) -> None:
    from hf_zero.errors import ConfigError, UnsupportedError

    plain, seen = (_build(), _build(1)), []
    steps = [_sgd(model) for model in plain]
    with _accelerator(stage, gradient_clipping="auto") as accelerator:
        pairs = [accelerator.prepare(model, _sgd(model)) for model in (_build(), _build(1))]
        models = (pairs[0][0], pairs[1][0])
        for step, norm in enumerate((0.05, 1e6, float("inf"), 0.01)):
            accelerator.backward(_joint(models, _rows(step)))
            for rank in range(ranks.world()):
                (_joint(plain, _rows(step, rank)) / ranks.world()).backward()
            found = accelerator.clip_grad_norm_([param for model in models for param in model.parameters()], norm)
            expected = nn.utils.clip_grad_norm_([param for model in plain for param in model.parameters()], norm)
            seen.append((float(found), float(expected)))
            for optimizer in [*steps, *(optimizer for _, optimizer in pairs)]:
                optimizer.step()
                optimizer.zero_grad()
        for found, expected in seen:
            assert found == pytest.approx(expected, rel=1e-5), f"stage {stage}"
        for model, other in zip(models, plain, strict=True):
            _close(_weights(model), [param.detach() for param in other.parameters()], f"stage {stage}, clipped together")
        some = [*models[0].parameters(), next(models[1].parameters())]
        with pytest.raises(UnsupportedError, match=r"of 2 models with engines.*Clip each model in its own call"):
            accelerator.clip_grad_norm_(some, 1.0)
        for model in models:
            model.destroy()
    with _accelerator(stage, gradient_clipping=0.5) as accelerator:
        models = tuple(accelerator.prepare(model, _sgd(model))[0] for model in (_build(), _build(1)))
        with pytest.raises(ConfigError, match=r"gradient_clipping is 0.5 in the configuration.*2 models to clip at 0.1 together"):
            accelerator.clip_grad_norm_([param for model in models for param in model.parameters()], 0.1)
        for model in models:
            model.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_models_that_a_script_clips_by_one_norm(stage: int) -> None:
    ranks.run_ranks(_clipped_together, 2, stage)


def _prepared_by_methods() -> None:
    from hf_zero.errors import StateError, UnsupportedError

    with _accelerator(2) as accelerator:
        with pytest.raises(UnsupportedError, match="makes no engine, so each rank would train by itself"):
            accelerator.prepare_model(_build())
        frozen = _build().requires_grad_(False)
        assert accelerator.prepare_model(frozen) is frozen and accelerator.prepare_model(_build(), evaluation_mode=True) is not None
        with pytest.raises(StateError, match=r"accelerator.backward\(\): no model has been prepared"):
            accelerator.backward(_build()(_rows(0)).mean())


def test_prepare_model_trains_no_rank_by_itself() -> None:
    """accelerate makes neither DDP nor an engine there: gradients were each rank's own."""
    ranks.run_ranks(_prepared_by_methods, 2)
