"""Test models whose parameters exchange memory, share it, leave the model for some steps or are replaced, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from hf_zero.utils import safe_get_full_fp32_param
from tests.support import ranks

STEPS = 5
Script = Callable[[nn.Sequential, int, list[nn.Module], torch.optim.Optimizer], None]


class _Three(nn.Module):
    """A unit of three layers, whose parameters are gathered alone at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(self.first(rows)).tanh())
        return found


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16), _Three(), _Three(), nn.Linear(16, 2))


def _gathered(model: nn.Module) -> hf_zero.zero.GatheredParameters:
    return hf_zero.zero.GatheredParameters(list(model.parameters()))


def _exchange(model: nn.Sequential, step: int, kept: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        with _gathered(model):
            for one, other in ((model[0].bias, model[3].bias), (model[2].weight, model[3].weight)):
                one.data, other.data = other.data, one.data


def _exchange_alone(model: nn.Sequential, step: int, kept: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        for one, other in ((model[4].first, model[5].third), (model[4].second, model[4].third)):
            with hf_zero.zero.GatheredParameters([one.weight, other.weight]):
                one.weight.data, other.weight.data = other.weight.data, one.weight.data


def _leave(model: nn.Sequential, step: int, kept: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        kept.append(model[2])
        model[2] = nn.Identity()
    if step == 3:
        model[2] = kept[0]


def _replace(model: nn.Sequential, step: int, kept: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        torch.manual_seed(9)
        new = nn.Linear(16, 16).to(next(model.parameters()).dtype)
        model[2] = new
        optimizer.add_param_group({"params": list(new.parameters())})


def _train(stage: int | None, script: Script, fp32: bool = True) -> list[torch.Tensor]:
    """Train with changes before each step's forward; without ``stage`` in plain PyTorch."""
    model, kept = _model(), list[nn.Module]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
    engine = None
    if stage is not None:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 20}
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero, "bf16": {"enabled": not fp32}}
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        script(model, step, kept, optimizer)
        rows = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
        if engine is None:
            model(rows.flatten(0, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(engine(rows[ranks.rank()].to(engine.optimizer.low_precision_dtype)).square().mean())
            engine.step()
    found = [param.detach().clone() if engine is None else safe_get_full_fp32_param(param) for param in model.parameters()]
    if engine is not None:
        engine.destroy()
    return found  # type: ignore[return-value]


def _as_in_plain_pytorch(script: Script) -> None:
    expected = _train(None, script)
    for stage, fp32 in ((0, True), (1, True), (2, False), (3, True), (3, False)):
        close = {"rtol": 0.0, "atol": 1e-6 if fp32 else 0.02}
        for value, wanted in zip(_train(stage, script, fp32), expected, strict=True):
            torch.testing.assert_close(value, wanted, **close, msg=lambda text, at=stage: f"stage {at}: {text}")


@pytest.mark.parametrize("script", [_exchange, _exchange_alone])
def test_parameters_that_exchange_their_memory(script: Script) -> None:
    """Copying values of one parameter after the other into units overwrote the memory of the second."""
    ranks.run_ranks(_as_in_plain_pytorch, 2, script)


def test_a_module_that_leaves_the_model_for_some_steps() -> None:
    """Plain PyTorch finds no gradients there: neither momentum nor weight decay apply."""
    ranks.run_ranks(_as_in_plain_pytorch, 2, _leave)


def test_a_block_whose_module_is_replaced() -> None:
    """At stage 3 the new module's parameters were divided where no hook gathers them."""
    ranks.run_ranks(_as_in_plain_pytorch, 2, _replace)


def _share(model: nn.Sequential, step: int, kept: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        with _gathered(model):
            model[2].weight.data = model[3].weight.data


def _share_alone(model: nn.Sequential, step: int, kept: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        with hf_zero.zero.GatheredParameters([model[4].first.weight, model[5].third.weight]):
            model[4].first.weight.data = model[5].third.weight.data


def _share_on_one_rank(model: nn.Sequential, step: int, kept: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if ranks.rank() == 1:
        _share(model, step, kept, optimizer)
    elif step == 1:
        with _gathered(model):
            pass


def _share_outside(model: nn.Sequential, step: int, kept: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if step == 1 and ranks.rank() == 1:
        model[2].weight.data = model[3].weight.data


def _shared(script: Script, stage: int) -> None:
    with pytest.raises(StateError, match=r"parameter .* was given the memory of [35].*weight|2.weight: written inside Gathered"):
        _train(stage, script)


@pytest.mark.parametrize(
    ("script", "stage"),
    [
        *((script, stage) for script in (_share, _share_alone, _share_on_one_rank) for stage in (0, 2, 3)),
        (_share_outside, 0),
        (_share_outside, 2),
    ],
)
def test_parameters_that_share_memory_are_an_error_on_all_ranks(script: Script, stage: int) -> None:
    ranks.run_ranks(_shared, 2, script, stage)
