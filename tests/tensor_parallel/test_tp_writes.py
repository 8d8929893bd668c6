"""Values that a script writes to parameters under tensor parallelism: compared over the ranks that hold the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_zero
from tests.support import parity, ranks
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.ranks import RankError, run_ranks

NORM, SPLIT = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"
Change = Callable[[Any], None]


def engine_over(stage: int, axes: dict[str, Any], case: str = "llama", **arguments: Any) -> Any:
    return parity.initialize(CASES[case].build(), Run(stage, extra=axes), **arguments)


def step(engine: Any, case: str = "llama") -> None:
    engine.backward(engine(**CASES[case].rows(0, 0, 0)).loss)
    engine.step()


def written_inside(stage: int, name: str, everywhere: bool) -> float:
    """Return the change of the parameter's first element by a write inside a context, on all ranks or on rank 0 alone."""
    engine = engine_over(stage, {"tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}})
    param = engine.module.get_parameter(name)
    before = hf_zero.utils.safe_get_full_fp32_param(param).flatten()[0].item()
    with hf_zero.zero.GatheredParameters([param]), torch.no_grad():
        if everywhere or ranks.rank() == 0:
            param.add_(0.5)
    step(engine)
    return hf_zero.utils.safe_get_full_fp32_param(param).flatten()[0].item() - before


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_write_to_a_copy_on_one_rank_is_an_error_on_all(stage: int) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(written_inside, 2, stage, NORM, False)
    assert all(f"parameter {NORM} was written on rank(s) 0 of 2" in outcome.text for outcome in error.value.outcomes)


@pytest.mark.parametrize("name", [NORM, SPLIT])
def test_equal_writes_on_all_ranks_take_effect(name: str) -> None:
    for stage in (0, 3):
        assert run_ranks(written_inside, 2, stage, name, True) == pytest.approx([0.5, 0.5])


def written_by_rank_0(axes: dict[str, Any], case: str, name: str) -> None:
    engine = engine_over(1, axes, case)
    with hf_zero.zero.GatheredParameters([engine.module.get_parameter(name)], modifier_rank=0):
        pass


@pytest.mark.parametrize(
    ("axes", "case", "name"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "llama", SPLIT),
        ({"pipeline": {"stages": 2}}, "llama", NORM),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "mixtral", "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_rank_without_all_values_cannot_write_them_for_all(axes: dict[str, Any], case: str, name: str) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(written_by_rank_0, 2, axes, case, name)
    assert f"rank 0 does not have all values of {name}" in error.value.outcomes[0].text
    assert all("rank 0 does not have all values of " in outcome.text for outcome in error.value.outcomes)


def second_optimizer(by_rank: bool) -> None:
    """Update norms, which are in no group of the engine, by an optimizer of the script's own."""
    model = CASES["llama"].build()
    rest = [param for name, param in model.named_parameters() if "norm" not in name]
    engine = parity.initialize(
        model, Run(1, extra={"tensor_parallel": {"autotp_size": 2}, "zero_allow_untested_optimizer": True}), model_parameters=rest
    )
    param = engine.module.get_parameter(NORM)
    own = torch.optim.SGD([param], lr=0.1)
    engine.backward(engine(**CASES["llama"].rows(0, 0, 0)).loss)
    param.grad = torch.full_like(param, 0.1 * (ranks.rank() if by_rank else 1))
    own.step()
    engine.step()


def test_second_optimizer_that_differs_between_ranks_is_an_error_on_all() -> None:
    run_ranks(second_optimizer, 2, False)
    with pytest.raises(RankError) as error:
        run_ranks(second_optimizer, 2, True)
    assert all(f"parameter {NORM} was written on rank(s)" in outcome.text for outcome in error.value.outcomes)


def own_parts_loaded(stage: int) -> list[float]:
    """Return the largest change of a copied and of a divided parameter after weights that were overwritten have been loaded back."""
    engine = engine_over(stage, {"tensor_parallel": {"autotp_size": 2}})
    params = [engine.module.get_parameter(name) for name in (NORM, SPLIT)]
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
        kept = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        for param in params:
            param.fill_(7.0)
    engine.load_module_state_dict(kept)
    with hf_zero.zero.GatheredParameters(params):
        return [float((param - kept[name]).abs().max()) for name, param in zip((NORM, SPLIT), params, strict=True)]


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_loads_the_parts_that_it_holds(stage: int) -> None:
    assert run_ranks(own_parts_loaded, 2, stage) == [[0.0, 0.0]] * 2
