"""Layers divided over the stages of a pipeline train like plain PyTorch."""

from __future__ import annotations

import pytest

from tests.support import ranks
from tests.support.parity import Run
from tests.support.pipelines import check
from tests.support.tp_training import zoo_case


def check_stages(name: str, stages: int, zero: list[int]) -> None:
    case = zoo_case(name, {})
    for stage in zero:
        check(case, Run(stage, accumulation=2, clip=0.1), stages)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_two_stages(name: str) -> None:
    ranks.run_ranks(check_stages, 2, name, 2, [0, 1])


def check_four(dtype: str) -> None:
    case = zoo_case("LlamaForCausalLM", {"num_hidden_layers": 4, "tie_word_embeddings": True})
    check(case, Run(1, clip=0.1), 4)
    check(case, Run(0, clip=0.1), 2)
    check(case, Run(2, accumulation=2, clip=0.1), 2)
    check(case, Run(1, clip=0.1), 2, tp=2)


def test_four_ranks() -> None:
    ranks.run_ranks(check_four, 4, "fp32")
