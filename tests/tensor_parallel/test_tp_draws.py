"""Random numbers of ranks that hold layers together: the same in each forward that trains, or one error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import StateError
from tests.support import parity, ranks, zoo
from tests.support.experts import build, mixed, with_split_layers
from tests.support.parity import Run

NAME, SPLIT = "LlamaForCausalLM", 2


def _dropping(rate: float) -> nn.Module:
    """Return a model that drops elements of the hidden states, which all ranks of a group hold."""
    model = build(NAME)
    layer = model.model.layers[0]  # type: ignore[union-attr]
    layer.input_layernorm = nn.Sequential(layer.input_layernorm, nn.Dropout(rate))  # type: ignore[index,union-attr]
    return model.train()


def _step(engine: Any, step: int, micros: int = 1) -> None:
    group = ranks.rank() // SPLIT
    for micro in range(micros):
        engine.backward(zoo.loss(engine, mixed(NAME)(step, micro, group)))
        engine.step()


def _differs(seed: Any, rate: float, micros: int) -> list[str]:
    """Return the errors of steps before which ``seed(rank, step)`` seeds or draws; then check that copies of weights are equal."""
    torch.manual_seed(ranks.rank() // SPLIT)
    engine = parity.initialize(_dropping(rate), with_split_layers(Run(1, accumulation=micros), SPLIT))
    errors = []
    for step in range(4):
        seed(ranks.rank(), step)
        try:
            _step(engine, step, micros)
            errors.append("")
        except StateError as error:
            errors.append(str(error))
            engine.zero_grad()
    norm = engine.module.model.norm.weight.detach()
    found = [torch.empty_like(norm) for _ in range(ranks.world())]
    torch.distributed.all_gather(found, norm.contiguous())
    assert all(torch.equal(other, found[0]) for other in found)
    return errors


def by_rank(rank: int, step: int) -> None:
    if step == 2:
        torch.manual_seed(100 + rank)


def by_group(rank: int, step: int) -> None:
    torch.manual_seed(10 * step + rank // SPLIT)


def one_draws(rank: int, step: int) -> None:
    if step == 1 and rank == 1:
        torch.rand(3)


@pytest.mark.parametrize(("seed", "step"), [(by_rank, 2), (one_draws, 1)])
def test_other_numbers_in_a_group_are_an_error_on_all_ranks(seed: Any, step: int) -> None:
    """On 4 ranks only one of the two groups may differ; the step of the other is not taken either."""
    for errors in ranks.run_ranks(_differs, 4, seed, 0.2, 2):
        assert [bool(error) for error in errors] == [place == step for place in range(4)], errors
        assert "which hold layers together" in errors[step] and "the same seed" in errors[step]


def test_seeds_by_group_and_models_that_draw_nothing_train() -> None:
    for seed, rate in ((by_group, 0.2), (by_rank, 0.0), (one_draws, 0.0)):
        assert ranks.run_ranks(_differs, 4, seed, rate, 1) == [[""] * 4] * 4
