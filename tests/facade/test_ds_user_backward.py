"""Scripts that call ``loss.backward()`` themselves, or several backwards over one forward, as DeepSpeed from 0.18 on allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import Forward, Run, check_bitwise, check_training, initialize, train
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)
CASE = CASES["gpt2"]


def own_backward(engine: Any, batch: Batch, forward: Forward, _micro: int) -> float:
    """The loop of a script that knows ``loss.backward()`` only; ``scale`` does nothing without a loss scale."""
    loss = forward(engine, batch)
    engine.scale(loss).backward()
    engine.step()
    return loss.item()


def _own_backward(run: Run) -> None:
    check_training(CASE.build, CASE.rows, CASE.forward, run, micro_step=own_backward, label="loss.backward()")


@pytest.mark.parametrize("run", [Run(stage, accumulation=2, clip=1.0) for stage in STAGES] + [Run(1, "fp16"), Run(3, "fp16")], ids=str)
def test_a_backward_of_the_user_trains(run: Run) -> None:
    ranks.run_ranks(_own_backward, 2, run)


def _forgotten_scale() -> None:
    engine = initialize(CASE.build(), Run(3, "fp16"))
    for _ in range(2):  # the refusal leaves the engine as it was
        loss = CASE.forward(engine, CASE.rows(0, 0, ranks.rank()))
        with pytest.raises(RuntimeError, match=r"engine.scale\(loss\).backward\(\)"):
            loss.backward()
    engine.scale(loss := CASE.forward(engine, CASE.rows(0, 0, ranks.rank()))).backward()
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied(), loss


def test_a_backward_without_loss_scale_is_refused() -> None:
    ranks.run_ranks(_forgotten_scale, 2)


def _checkpointed(run: Run, reentrant: bool) -> None:
    case = CASES["llama"]

    def build() -> nn.Module:
        model: Any = case.build()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    check_training(build, case.rows, case.forward, run, micro_step=own_backward, label="recomputation")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_recomputed_blocks_in_a_backward_of_the_user(stage: int, reentrant: bool) -> None:
    ranks.run_ranks(_checkpointed, 2, Run(stage, accumulation=2, steps=2), reentrant)


class Layers(nn.Module):
    """Two blocks and two losses over one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum(), x.square().sum()


def layers(seed: int) -> Layers:
    torch.manual_seed(seed)
    return Layers()


def points(step: int, rank: int) -> Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    import hf_zero

    found = {name: hf_zero.utils.safe_get_full_grad(param) for name, param in model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def expected_gradients(model: nn.Module, which: int, world: int) -> dict[str, Tensor]:
    loss = torch.stack([model(points(0, rank))[which] for rank in range(world)]).mean()
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def _two_losses(stage: int, own: bool) -> None:
    engine = initialize(layers(0), Run(stage))
    losses = engine(points(0, ranks.rank()))
    for which in (0, 1):
        engine.zero_grad()
        if own:
            engine.scale(losses[which], retain_graph=which == 0).backward(retain_graph=which == 0)
        else:
            engine.backward(losses[which], retain_graph=which == 0)
        torch.testing.assert_close(gradients(engine.module), expected_gradients(layers(0), which, ranks.world()))
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 1)


@pytest.mark.parametrize("own", [False, True], ids=["engine", "own"])
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_two_backwards_over_one_forward_and_zero_grad_between(stage: int, own: bool) -> None:
    ranks.run_ranks(_two_losses, 2, stage, own)


def _sum_of_two_backwards(stage: int) -> None:
    engine = initialize(layers(0), Run(stage))
    first, second = engine(points(0, ranks.rank()))
    engine.backward(first, retain_graph=True)
    engine.backward(second)
    wanted = [expected_gradients(layers(0), which, ranks.world()) for which in (0, 1)]
    torch.testing.assert_close(gradients(engine.module), {name: grad + wanted[1][name] for name, grad in wanted[0].items()})


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_two_backwards_over_one_forward_add_up(stage: int) -> None:
    ranks.run_ranks(_sum_of_two_backwards, 2, stage)


def _two_engines(run: Run, how: str) -> None:
    """Loss of two engines; both must learn the same from the sum as each alone from its part."""
    engines = [initialize(layers(seed), run) for seed in (1, 2)]
    alone = [initialize(layers(seed), run) for seed in (1, 2)]
    for step in range(2 * run.accumulation):
        x = points(step, ranks.rank()).to(torch.float16 if run.dtype == "fp16" else torch.float32)
        losses = [engine(x)[1] for engine in engines]
        if how == "own":
            sum(losses).backward()
        else:
            engines[0].backward(sum(losses))
        for engine in engines:
            engine.step()
            engine.optimizer.zero_grad()
        for engine in alone:
            engine.backward(engine(x)[1])
            engine.step()
    for engine, single in zip(engines, alone, strict=True):
        assert engine.global_steps == 2
        check_bitwise(*(train(each, CASE.rows, CASE.forward, Run(steps=0)) for each in (engine, single)), label=how)


@pytest.mark.parametrize(
    ("run", "how"), [(Run(2, accumulation=2), "own"), (Run(3), "own"), (Run(3, accumulation=2), "engine"), (Run(1, "fp16"), "engine")]
)
def test_one_backward_through_two_engines(run: Run, how: str) -> None:
    ranks.run_ranks(_two_engines, 2, run, how)
