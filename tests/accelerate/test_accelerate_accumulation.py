"""Loops over accelerate that accumulate gradients: inside `accumulate()`, by themselves, with `no_sync()`; the weights of DDP from each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import ranks, trainers
from tests.support.parity import LIMITS

UPDATES, LR, WIDTH = 3, 1e-2, 6
STAGES = (0, 1, 2, 3)


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)).to(ranks.device())


def _part(update: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of 4 samples of which some do not count, as many as the place asks for."""
    generator = torch.Generator().manual_seed(1000 * update + 10 * micro + rank)
    inputs, targets = torch.randn(4, WIDTH, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    targets[: (update + micro + 2 * rank) % 4] = -100
    return inputs.to(ranks.device()), targets.to(ranks.device())


def _sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, ignore_index=-100, reduction="sum")


def _expected(
    steps: int, skipped: int | None = None, last: int | None = None, updates: int = UPDATES
) -> tuple[list[torch.Tensor], list[float]]:
    """Weights and norms of one process that sees the samples of all ranks at once; ``last`` micro-steps in the last update."""
    model = _build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    norms = []
    for update in range(updates):
        micros = last if last is not None and update == UPDATES - 1 else steps
        parts = [_part(update, micro, rank) for micro in range(micros) for rank in range(ranks.world())]
        items = sum(int(targets.ne(-100).sum()) for _, targets in parts)
        optimizer.zero_grad()
        (sum(_sum(model(inputs), targets) for inputs, targets in parts) / items).backward()
        norms.append(float(nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])))
        if update != skipped:
            optimizer.step()
    return [param.detach().clone() for param in model.parameters()], norms


@dataclass
class Loop:
    """What a loop works with."""

    accelerator: Any
    model: Any
    optimizer: Any
    steps: int

    def parts(self, update: int, steps: int | None = None) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        """This rank's batches of an update, and the samples of all ranks that count."""
        parts = [_part(update, micro, ranks.rank()) for micro in range(self.steps if steps is None else steps)]
        items = sum(targets.ne(-100).sum() for _, targets in parts)
        return parts, int(self.accelerator.gather(items).sum().item())


def _guide(loop: Loop) -> None:
    """accelerate's guide, "gradient accumulation on training samples of variable size"; the last update has fewer micro-steps."""
    accelerator, model, optimizer = loop.accelerator, loop.model, loop.optimizer
    for update in range(UPDATES):
        parts, num_items_in_batch = loop.parts(update, max(loop.steps - 1, 1) if update == UPDATES - 1 else None)
        for i, (inputs, targets) in enumerate(parts):
            ctx = model.no_sync if (i < len(parts) - 1 and accelerator.num_processes > 1) else contextlib.nullcontext
            with ctx():
                loss = _sum(model(inputs), targets)
                loss = (loss * loop.steps * accelerator.num_processes) / num_items_in_batch
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def _unsaid(loop: Loop) -> None:
    """The same without ``no_sync``, with a norm asked for before each step and the second update left out."""
    accelerator, model, optimizer = loop.accelerator, loop.model, loop.optimizer
    norms = []
    for update in range(UPDATES):
        parts, items = loop.parts(update)
        for inputs, targets in parts:
            accelerator.backward(_sum(model(inputs), targets) * loop.steps * accelerator.num_processes / items)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e6)))
        if update != 1:
            optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(norms, _expected(loop.steps, skipped=1)[1], rtol=1e-5, atol=0)


def _accumulate(loop: Loop) -> None:
    accelerator, model, optimizer = loop.accelerator, loop.model, loop.optimizer
    for update in range(UPDATES):
        parts, items = loop.parts(update)
        for inputs, targets in parts:
            with accelerator.accumulate(model):
                accelerator.backward(_sum(model(inputs), targets) * loop.steps * accelerator.num_processes / items)
                optimizer.step()
                optimizer.zero_grad()


def _said_by_blocks(no_sync: Callable[[Loop], Any]) -> Callable[[Loop], None]:
    """accelerate's concept guide: the loop divides by itself, and a block says which backwards are not the last."""

    def run(loop: Loop) -> None:
        accelerator, model, optimizer = loop.accelerator, loop.model, loop.optimizer
        norms: list[float] = []
        for update in range(UPDATES):
            parts, items = loop.parts(update)
            for i, (inputs, targets) in enumerate(parts):
                with no_sync(loop) if i < len(parts) - 1 else contextlib.nullcontext():
                    accelerator.backward(_sum(model(inputs), targets) * accelerator.num_processes / items)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e6)))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norms, _expected(loop.steps)[1], rtol=1e-5, atol=0)

    return run


def _set_by_hand(calls_step: bool) -> Callable[[Loop], None]:
    """LLaMA-Factory's new trainer sets `accelerator.sync_gradients` itself; with DeepSpeed it never calls `optimizer.step()`."""

    def run(loop: Loop) -> None:
        accelerator, model, optimizer = loop.accelerator, loop.model, loop.optimizer
        norms: list[float] = []
        for update in range(UPDATES):
            parts, items = loop.parts(update)
            for i, (inputs, targets) in enumerate(parts):
                accelerator.sync_gradients = i == len(parts) - 1
                accelerator.backward(_sum(model(inputs), targets) * loop.steps * accelerator.num_processes / items)
            norms.append(float(model.get_global_grad_norm()))
            if calls_step:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(norms, _expected(loop.steps)[1], rtol=1e-5, atol=0)

    return run


@contextlib.contextmanager
def _prepared(stage: int, steps: int) -> Iterator[Loop]:
    from accelerate import Accelerator, DeepSpeedPlugin

    with trainers.clean_state():
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": stage}}
        accelerator = Accelerator(gradient_accumulation_steps=steps, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = _build()
        engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
        assert engine.gradient_accumulation_steps() == steps
        yield Loop(accelerator, engine, optimizer, steps)
        engine.destroy()


def _weights(engine: Any) -> list[torch.Tensor]:
    from hf_zero.zero import GatheredParameters

    with GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


def _loops(every: bool) -> None:
    blocks = (lambda loop: loop.model.no_sync(), lambda loop: loop.accelerator.no_sync(loop.model))
    for stage, steps in itertools.product(STAGES, (1, 2, 4)) if every else ((0, 2), (2, 1), (3, 4)):
        tried = [(_guide, steps, {"last": max(steps - 1, 1)}), (_accumulate, steps, {})]
        tried += [(_said_by_blocks(block), 1, {}) for block in blocks] if steps > 1 else []
        tried += [(_unsaid, steps, {"skipped": 1})] if steps > 1 else []
        tried += [(_set_by_hand(calls_step), steps, {}) for calls_step in (False, True)]
        for run, said, differs in tried:
            with _prepared(stage, said) as loop:
                loop.steps = steps
                run(loop)
                made = UPDATES - ("skipped" in differs)
                assert loop.model.global_steps == made, (stage, steps, run, loop.model.global_steps)
                expected, _ = _expected(steps, **differs)
                torch.testing.assert_close(_weights(loop.model), expected, rtol=0, atol=LIMITS["fp32"].weights)


@pytest.mark.parametrize(("world", "every"), [(2, False), *(pytest.param(world, True, marks=pytest.mark.slow) for world in (1, 2))])
def test_loops_that_accumulate_have_the_weights_of_ddp(world: int, every: bool) -> None:
    ranks.run_ranks(_loops, world, every)


def _saves(folder: Path) -> None:
    for stage, steps in ((1, 1), (3, 2)):
        with _prepared(stage, steps) as loop:
            accelerator, model = loop.accelerator, loop.model
            parts, items = loop.parts(0)
            for i, (inputs, targets) in enumerate(parts):
                accelerator.sync_gradients = i == len(parts) - 1
                accelerator.backward(_sum(model(inputs), targets) * steps * accelerator.num_processes / items)
            if stage == 1:
                found = list(accelerator.get_state_dict(model).values())
            else:
                accelerator.save_state(str(folder))
                found = _weights(model)
                accelerator.load_state(str(folder))
                torch.testing.assert_close(_weights(model), found, rtol=0, atol=0)
            expected, _ = _expected(steps, updates=1)
            torch.testing.assert_close(found, expected, rtol=0, atol=LIMITS["fp32"].weights)
            assert model.global_steps == 1


def test_a_loop_that_never_steps_saves_the_weights_after_its_first_update(tmp_path: Path) -> None:
    """DeepSpeed updates in backward; here the first update waits until the loop goes on, and a save must not leave it out."""
    ranks.run_ranks(_saves, 2, tmp_path)


def _updates_of_several_backwards() -> None:
    """A loop of which accelerate does not know what it means, with an update per backward, is an error that says what to write."""
    from hf_zero.errors import StateError

    with _prepared(2, 1) as loop:
        parts, items = loop.parts(0, 2)
        for inputs, targets in parts:
            loop.accelerator.backward(_sum(loop.model(inputs), targets) / items)
        with pytest.raises(
            StateError,
            match=r"before optimizer.step\(\), and accelerator.backward\(\) has made 2 .*Accelerator\(gradient_accumulation_steps=N\)",
        ):
            loop.optimizer.step()
    with _prepared(2, 2) as loop:
        with pytest.raises(StateError, match=r"9 times and optimizer.step\(\) never.*gradient_accumulation_steps is 2"):
            for _ in range(9):
                loop.accelerator.backward(_sum(loop.model(inputs), targets) / items)
        assert loop.model.global_steps == 0


def test_an_update_in_each_of_several_backwards_is_an_error() -> None:
    ranks.run_ranks(_updates_of_several_backwards, 2)
