"""Loops over accelerate whose backwards accelerate does not make: `loss.backward()`, or `engine.backward(loss)`, and `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks, trainers
from tests.support.logged import messages_of_log
from tests.support.rows import slow_but

STEPS, WIDTH = 4, 6
STAGES = (0, 1, 2, 3)


def _build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)).to(ranks.device())


def _rows(step: int, everybody: bool) -> Tensor:
    draws = range(ranks.world()) if everybody else [ranks.rank()]
    return torch.cat([torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in draws]).to(
        ranks.device()
    )


class _Plain:
    """The objects of a loop in plain PyTorch: each backward has the rows of all ranks, and accelerate's divides by ``micro_steps``."""

    def __init__(self, micro_steps: int) -> None:
        self.models = [_build(0), _build(1)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9) for model in self.models]
        self.micro_steps, self.calls, self.syncs = micro_steps, 0, True
        self.norms: list[float] = []

    def loss(self, step: int, model: int = 0) -> Tensor:
        return self.models[model](_rows(step, everybody=True)).square().mean()

    def backward(self, loss: Tensor) -> None:
        (loss / self.micro_steps).backward()

    def by_engine(self, loss: Tensor) -> None:
        self.backward(loss)

    def clip(self, norm: float) -> None:
        self.norms.append(float(nn.utils.clip_grad_norm_(self.models[0].parameters(), norm)))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.calls += 1
        self.syncs = self.calls % self.micro_steps == 0
        yield

    def step(self, model: int = 0) -> None:
        if self.syncs:
            self.optimizers[model].step()

    def clear(self, model: int = 0) -> None:
        if self.syncs:
            self.optimizers[model].zero_grad()

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for model in self.models for param in model.parameters()]


class _Zero(_Plain):
    """The same under accelerate; ``both`` models are prepared, or the first one."""

    def __init__(self, micro_steps: int, stage: int, both: bool) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin

        super().__init__(micro_steps)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": "auto", "zero_optimization": zero}
        self.accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**config, "gradient_accumulation_steps": micro_steps}),
            gradient_accumulation_steps=micro_steps,
        )
        pairs = zip(self.models[: 1 + both], self.optimizers, strict=False)
        prepared = [self.accelerator.prepare(*pair) for pair in pairs]
        self.models[: 1 + both] = [model for model, _ in prepared]
        self.optimizers = [optimizer for _, optimizer in prepared]
        for model in self.models[: 1 + both]:
            model.optimizer.clip_grad = 0.0

    def loss(self, step: int, model: int = 0) -> Tensor:
        return self.models[model](_rows(step, everybody=False)).square().mean()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def by_engine(self, loss: Tensor) -> None:
        self.models[0].backward(loss)

    def clip(self, norm: float) -> None:
        self.norms.append(float(self.accelerator.clip_grad_norm_(self.models[0].parameters(), norm)))

    def accumulate(self) -> Any:
        return self.accelerator.accumulate(self.models[0])

    def step(self, model: int = 0) -> None:
        self.optimizers[model].step()

    def clear(self, model: int = 0) -> None:
        self.optimizers[model].zero_grad()

    def weights(self) -> list[Tensor]:
        from hf_zero.zero import GatheredParameters

        with GatheredParameters([param for model in self.models for param in model.parameters()]):
            return super().weights()


def _raw(loop: _Plain, step: int) -> None:
    loop.loss(step).backward()
    loop.step()
    loop.clear()


def _raw_cleared_first(loop: _Plain, step: int) -> None:
    """The gradients of a step that is left out are dropped."""
    loop.clear()
    loop.loss(step).backward()
    if step != 1:
        loop.step()


def _raw_kept(loop: _Plain, step: int) -> None:
    """Several backwards before a step, and one step left out whose gradients stay."""
    for part in range(2):
        loop.loss(2 * step + part).backward()
    if step != 1:
        loop.step()
        loop.clear()


def _raw_clipped(loop: _Plain, step: int) -> None:
    loop.loss(step).backward()
    loop.clip(0.05)
    loop.step()
    loop.clear()


def _raw_in_accumulate(loop: _Plain, step: int) -> None:
    with loop.accumulate():
        (loop.loss(step) / 2).backward()
        loop.step()
        loop.clear()


def _mixed(loop: _Plain, step: int) -> None:
    """Both kinds in one accumulation."""
    with loop.accumulate():
        if step in (0, 3):
            loop.backward(loop.loss(step))
        if step in (0, 1, 2):
            loop.loss(step + 20).backward()
        loop.step()
        loop.clear()


def _alternate(loop: _Plain, step: int) -> None:
    loss = loop.loss(step)
    loss.backward() if step % 2 else loop.backward(loss)
    loop.step()
    loop.clear()


def _by_engine(loop: _Plain, step: int) -> None:
    """DeepSpeed's method divides by the number of micro-steps, and accumulates without being told which is the last."""
    loop.by_engine(loop.loss(step))
    if step % loop.micro_steps == loop.micro_steps - 1:
        loop.clip(0.05)
        loop.step()
        loop.clear()


def _by_engine_dropped(loop: _Plain, step: int) -> None:
    """The gradients of an optimizer step that is left out are dropped."""
    loop.by_engine(loop.loss(step))
    if step % loop.micro_steps == loop.micro_steps - 1:
        if step >= loop.micro_steps:
            loop.step()
        loop.clear()


def _by_engine_dropped_in_accumulate(loop: _Plain, step: int) -> None:
    with loop.accumulate():
        loop.by_engine(loop.loss(step))
        if step != loop.micro_steps - 1:
            loop.step()
        loop.clear()


def _two(loop: _Plain, step: int) -> None:
    with loop.accumulate() if loop.micro_steps > 1 else nullcontext():
        loss = loop.loss(step) + loop.loss(step, 1)
        loss.backward() if step % 2 else loop.backward(loss)
        for model in range(2):
            loop.step(model)
            loop.clear(model)


LOOPS: tuple[tuple[Callable[[_Plain, int], None], tuple[int, ...]], ...] = (
    (_raw, (1, 2)),  # without accumulate() each optimizer.step() updates, whatever the number of micro-steps
    (_raw_cleared_first, (1, 2)),
    (_raw_kept, (1, 2)),
    (_raw_clipped, (1, 2)),
    (_raw_in_accumulate, (2,)),
    (_mixed, (2,)),
    (_alternate, (1, 2)),
    (_by_engine, (1, 2)),
    (_by_engine_dropped, (1, 2)),
    (_by_engine_dropped_in_accumulate, (1, 2)),
    (_two, (1, 2)),
)


def _equal(stage: int) -> None:
    for body, numbers in LOOPS:
        for micro_steps in numbers:
            with trainers.clean_state():
                plain, zero = _Plain(micro_steps), _Zero(micro_steps, stage, both=body is _two)
                for step in range(STEPS):
                    body(plain, step)
                    body(zero, step)
                label = f"stage {stage}, {body.__name__}, {micro_steps} micro-steps"
                torch.testing.assert_close(zero.norms, plain.norms, rtol=1e-5, atol=0, msg=lambda text, at=label: f"{at}: {text}")
                torch.testing.assert_close(
                    zero.weights(), plain.weights(), rtol=2e-5, atol=2e-6, msg=lambda text, at=label: f"{at}: {text}"
                )
                assert zero.models[0].global_steps > 0, label
                for model in zero.models[: len(zero.optimizers)]:
                    model.destroy()


def _by_engine_without_a_warning() -> None:
    with trainers.clean_state(), messages_of_log() as said:
        loop = _Zero(2, 1, both=False)
        for step in range(STEPS):
            with loop.accumulate():
                loop.by_engine(loop.loss(step))
                loop.step()
                loop.clear()
        assert loop.models[0].global_steps == STEPS // 2
        assert not [line for line in said if "several backwards" in line], said


def test_backwards_that_accumulate_announces_are_no_warning() -> None:
    ranks.run_ranks(_by_engine_without_a_warning, 2)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_backwards_of_the_script_train_as_under_ddp(stage: int) -> None:
    ranks.run_ranks(_equal, 2, stage)


def _several_before_the_first_step() -> None:
    """What a loop means that goes on to another forward before its first step is not known: the update is made there."""
    from hf_zero.errors import StateError

    with trainers.clean_state():
        loop = _Zero(1, 2, both=False)
        loop.backward(loop.loss(0))
        loop.loss(1).backward()
        with pytest.raises(StateError, match=r"backward was called several times before optimizer.step\(\).* 1 update\(s\)"):
            loop.step()


def test_a_script_backward_after_an_early_update_is_an_error() -> None:
    ranks.run_ranks(_several_before_the_first_step, 2)
