"""Test optimizer states of single parameters, read and written while other parameters of their unit have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from hf_zero.utils import (
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from tests.support import ranks

ADAM = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.0}


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 2))


def _rows() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def _engine(stage: int, offload: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **offload},
    }
    return hf_zero.initialize(model=_model(), config=config)[0]


def _plain(frozen: tuple[str, ...]) -> dict[str, torch.Tensor | None]:
    model = _model()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    model(_rows()).square().mean().backward()
    optimizer.step()
    return {name: optimizer.state.get(param, {}).get("exp_avg") for name, param in model.named_parameters()}


def _beside_what_rests(frozen: tuple[str, ...]) -> None:
    """Check a parameter that was frozen before its first step: it has no state; states of the others are read and written as usual."""
    expected = _plain(frozen)
    for stage, offload in ((0, {}), (1, {}), (2, {"offload_optimizer": {"device": "cpu"}}), (3, {})):
        engine = _engine(stage, offload)
        for param in engine.module.parameters():
            assert safe_get_full_optimizer_state(param, "exp_avg") is None
            with pytest.raises(StateError, match="there is no optimizer state 'exp_avg'"):  # on all ranks, wherever it lies
                safe_set_full_optimizer_state(param, torch.ones(param.ds_shape if stage == 3 else param.shape), "exp_avg")
        for name in frozen:
            engine.module.get_parameter(name).requires_grad_(False)
        engine.backward(engine(_rows()).square().mean())
        engine.step()
        for name, param in engine.module.named_parameters():
            label = f"{name}, stage {stage}"
            found, wanted = safe_get_full_optimizer_state(param, "exp_avg"), expected[name]
            assert (found is None) == (wanted is None), label
            if found is None or wanted is None:
                with pytest.raises(StateError, match="there is no optimizer state 'exp_avg'"):
                    safe_set_full_optimizer_state(param, torch.ones(_model().get_parameter(name).shape), "exp_avg")
                continue
            torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-7, msg=label)
            own = safe_get_local_optimizer_state(param, "exp_avg")
            assert own is not None, label
            safe_set_local_optimizer_state(param, own * 2, "exp_avg")
            torch.testing.assert_close(safe_get_full_optimizer_state(param, "exp_avg").cpu(), 2 * wanted, rtol=1e-5, atol=1e-7, msg=label)
            safe_set_full_optimizer_state(param, wanted * 3, "exp_avg")
            torch.testing.assert_close(safe_get_full_optimizer_state(param, "exp_avg").cpu(), 3 * wanted, rtol=1e-5, atol=1e-7, msg=label)
        engine.destroy()


@pytest.mark.fast_rows("frozen0-2", "frozen2-2")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("frozen", [("0.bias",), ("2.weight", "3.bias"), ("0.weight", "2.bias", "3.weight", "3.bias")])
def test_a_state_is_there_beside_parameters_that_rest(world: int, frozen: tuple[str, ...]) -> None:
    ranks.run_ranks(_beside_what_rests, world, frozen)
