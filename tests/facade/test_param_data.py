"""``param.data = value`` outside of any gather: the parameter has that value from then on, or an error says how to give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero import observe
from hf_zero.core.units.unit import find_unit
from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.logged import messages_of_log
from tests.support.models import CASES, class_loss
from tests.support.parity import DTYPES, Run, cast_model, collect, initialize, prepare
from tests.support.parity import Trace as Trained
from tests.support.rows import slow_but

MLP = CASES["mlp"]


def _halve(model: nn.Module) -> None:
    """Averages of weights are swapped in and out like this, and clipped."""
    for param in model.parameters():
        param.data = param.data.clone() * 0.5


def _plain(run: Run, steps: int) -> nn.Module:
    model = cast_model(MLP.build(), DTYPES[run.dtype])
    masters = [param.detach().float().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)
    for step in range(steps):
        if step == 1:
            _halve(model)
            for master, param in zip(masters, model.parameters(), strict=True):
                master.copy_(param.detach().float())
        class_loss(model, prepare(MLP.rows(step, 0, 0), DTYPES[run.dtype])).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        for master, param in zip(masters, model.parameters(), strict=True):
            param.data.copy_(master)
    return model


def _assigns(run: Run) -> None:
    engine = initialize(MLP.build(), run)
    for step in range(3):
        if step == 1:
            _halve(engine.module)
        engine.backward(class_loss(engine, prepare(MLP.rows(step, 0, 0), DTYPES[run.dtype])))  # the same on all ranks
        engine.step()
    found, wanted = collect(engine, Trained()).weights, dict(_plain(run, 3).named_parameters())
    for name, value in found.items():
        torch.testing.assert_close(value.float(), wanted[name].detach().float(), rtol=1e-2 if run.dtype == "bf16" else 1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize(
    "run",
    slow_but([Run(stage, dtype) for stage in (0, 1, 2) for dtype in ("fp32", "bf16")], Run(0, "fp32"), Run(1, "bf16"), Run(2, "fp32")),
    ids=str,
)
def test_whole_parameters_take_the_value(run: Run) -> None:
    ranks.run_ranks(_assigns, 2, run)


def _refused() -> None:
    engine: Any = initialize(MLP.build(), Run(3))
    loss = class_loss(engine, MLP.rows(0, 0, 0))
    engine.backward(loss)
    engine.step()
    param = next(param for param in engine.module.parameters() if not param.numel())
    param.data = torch.ones(param.ds_shape)
    with pytest.raises(RuntimeError, match=r"was given data while it was divided .*modifier_rank=0"):
        engine(*[value for name, value in MLP.rows(1, 0, 0).items() if name != "labels"])


def _parts(dtype: str) -> None:
    run = Run(3, dtype, extra={"zero_optimization": {"stage3_param_persistence_threshold": 0}})
    engine: Any = initialize(MLP.build(), run)
    params = dict(engine.module.named_parameters())
    values = {name: torch.randn(param.ds_shape, generator=torch.Generator().manual_seed(1)) for name, param in params.items()}
    for name, param in params.items():
        whole = values[name].to(param.dtype).flatten()
        owned = find_unit(param)[0].layout.slots[find_unit(param)[1]].range.intersect(find_unit(param)[0].owned)
        start = owned.start - find_unit(param)[0].layout.slots[find_unit(param)[1]].offset
        param.ds_tensor.data = whole[start : start + owned.numel]
        assert torch.equal(param.ds_tensor, whole[start : start + owned.numel])
    for name, value in collect(engine, Trained()).masters.items():
        torch.testing.assert_close(value, values[name].to(DTYPES[dtype]).float(), rtol=0, atol=0)
    for name, param in params.items():
        with hf_zero.zero.GatheredParameters([param]):
            assert torch.equal(param, values[name].to(param.dtype))
            with pytest.raises(StateError, match="is unsharded now"):
                param.ds_tensor.data = param.ds_tensor.clone()
        with pytest.raises(StateError, match=r"of .* was given a tensor of shape \(7, 7, 7\)"):
            param.ds_tensor.data = torch.ones(7, 7, 7)
    engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_parts_take_values(dtype: str) -> None:
    ranks.run_ranks(_parts, 2, dtype)


def test_a_divided_parameter_says_where_to_set_it() -> None:
    ranks.run_ranks(_refused, 2)


def _converted(stage: int) -> None:
    """The values that ``model.to(dtype)`` rounds count, the types stay, and one warning says so."""
    run = Run(stage)
    plain, engine = MLP.build(), initialize(MLP.build(), run)
    masters = list(plain.parameters())
    optimizer = torch.optim.AdamW(masters, lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)
    observe._warned.clear()
    for step, dtype in enumerate((None, torch.float32, torch.bfloat16, torch.float64)):
        class_loss(plain, MLP.rows(step, 0, 0)).backward()
        with messages_of_log() as lines:
            engine.backward(class_loss(engine, MLP.rows(step, 0, 0)))
            if dtype is not None:
                with hf_zero.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
                    engine.module.to(dtype)
                with torch.no_grad():
                    for param in masters:
                        param.copy_(param.to(dtype))
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
        warned = [line for line in lines if "were converted" in line]
        assert len(warned) == (dtype not in (None, torch.float32)), lines
        assert all(f"from torch.float32 to {dtype} after initialize()" in line for line in warned)
    weights = collect(engine, Trained()).weights
    assert {value.dtype for value in weights.values()} == {torch.float32}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-4)  # at stage 0 gradients are rounded too
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_is_converted_keeps_its_types_with_a_warning(stage: int) -> None:
    ranks.run_ranks(_converted, 1, stage)
