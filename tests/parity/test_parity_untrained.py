"""Parameters that require a gradient and are in no param group of the engine: ``param.grad`` is the mean over ranks, as under
DistributedDataParallel. A script clips by the norm of all gradients, and trains a part of the model with an optimizer of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import hf_zero
from tests.support import ranks
from tests.support.parity import SMALL_MODEL
from tests.support.rows import slow_but, thinned


class _Net(nn.Module):
    """A body, a branch that one rank skips, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor, branches: bool) -> torch.Tensor:
        hidden = self.body(inputs)
        hidden = hidden + self.branch(hidden) if branches else hidden
        return self.head(hidden).square().mean()


def _built() -> _Net:
    torch.manual_seed(5)
    return _Net().to(ranks.device())


def _rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(ranks.device())


def _two_optimizers(stage: int, accumulation: int) -> None:
    """Clip by the norm of all gradients; the script's SGD trains the body, and the engine the head. Another rank has a gradient."""
    plain, model = _built(), _built()
    bodies = [torch.optim.SGD([*net.body.parameters(), *net.branch.parameters()], lr=0.3) for net in (plain, model)]
    heads = [torch.optim.SGD(net.head.parameters(), lr=0.3, momentum=0.9) for net in (plain, model)]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **SMALL_MODEL},
    }
    engine = hf_zero.initialize(model=model, optimizer=heads[1], config=config)[0]
    world = ranks.world()
    for step in range(3):
        for micro in range(accumulation):
            number = step * accumulation + micro
            for rank in range(world):
                (plain(_rows(number, rank), rank > 0) / world / accumulation).backward()
            engine.backward(engine(_rows(number, ranks.rank()), ranks.rank() > 0))
            if micro + 1 == accumulation:
                mine = [param for net in (model.body, model.branch) for param in net.parameters()]
                theirs = [param for net in (plain.body, plain.branch) for param in net.parameters()]
                torch.testing.assert_close([param.grad for param in mine], [param.grad for param in theirs])
                found, expected = (clip_grad_norm_(net.parameters(), 0.05) for net in (model, plain))
                torch.testing.assert_close(found, expected)
                for net in (model, plain):
                    clip_grad_value_(net.parameters(), 0.01)
                with hf_zero.zero.GatheredParameters(mine, modifier_rank=0 if stage == 3 else None):
                    bodies[1].step()
            engine.step()
        bodies[1].zero_grad()
        for optimizer in (bodies[0], heads[0]):
            optimizer.step()
            optimizer.zero_grad()
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    engine.destroy()


def _kept(stage: int) -> None:
    """A gradient that nothing clears grows as in torch, and ``safe_get_full_grad`` returns it."""
    plain, model = _built(), _built()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.0)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **SMALL_MODEL}}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(3):
        for rank in range(ranks.world()):
            (plain(_rows(step, rank), True) / ranks.world()).backward()
        engine.backward(engine(_rows(step, ranks.rank()), True))
        torch.testing.assert_close(model.body.weight.grad, plain.body.weight.grad)
        torch.testing.assert_close(hf_zero.utils.safe_get_full_grad(model.body.weight), plain.body.weight.grad)
        engine.step()
    assert model.body.weight.grad is not None
    engine.zero_grad()
    assert model.body.weight.grad is None
    engine.destroy()


def _over_accelerate(stage: int) -> None:
    """``Accelerator.clip_grad_norm_(model.parameters())`` of a model whose head alone trains."""
    from accelerate import Accelerator, DeepSpeedPlugin

    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **SMALL_MODEL}}
    plain, model = _built(), _built()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    ours, optimizer = accelerator.prepare(model, torch.optim.SGD(model.head.parameters(), lr=0.5))
    reference = torch.optim.SGD(plain.head.parameters(), lr=0.5)
    for step in range(3):
        for rank in range(ranks.world()):
            (plain(_rows(step, rank), True) / ranks.world()).backward()
        accelerator.backward(ours(_rows(step, ranks.rank()), True))
        norm = accelerator.clip_grad_norm_(ours.parameters(), 0.05)
        torch.testing.assert_close(torch.as_tensor(norm, dtype=torch.float32), clip_grad_norm_(plain.parameters(), 0.05).cpu())
        for one, net in ((optimizer, ours), (reference, plain)):
            one.step()
            net.zero_grad()
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@thinned(stage=range(4), accumulation=(1, 2))
def test_parameters_of_another_optimizer(stage: int, accumulation: int) -> None:
    ranks.run_ranks(_two_optimizers, 2, stage, accumulation)


@pytest.mark.parametrize("stage", slow_but(range(4), 0, 2))
def test_gradients_that_nothing_clears(stage: int) -> None:
    ranks.run_ranks(_kept, 2, stage)


@pytest.mark.parametrize("stage", slow_but(range(4), 0, 3))
def test_accelerators_clipping_of_a_model_whose_head_trains(stage: int) -> None:
    ranks.run_ranks(_over_accelerate, 2, stage)
