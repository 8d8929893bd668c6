"""Heads that do not divide by the ranks one by one: grouped and multi-query attention in every layout, on two and four ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_zero.tensor_parallel.planner import make_plan
from tests.support import ranks, zoo
from tests.tensor_parallel.breadth import Row, measure

GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
SIX = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4}
ONE = {"num_key_value_heads": 1}
FALCON_ONE = {"multi_query": True, "new_decoder_architecture": False}
FALCON_GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}

# 4 ranks: fewer key/value heads than ranks, or a number that does not divide; whether the attention must be split along the data flow.
FOUR: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", GROUPED),
    ("LlamaForCausalLM", SIX),
    ("LlamaForCausalLM", ONE),
    ("Olmo2ForCausalLM", {}),  # norms over all heads
    ("Qwen3ForCausalLM", {}),  # norms of each head
    ("Phi3ForCausalLM", {}),
    ("FalconForCausalLM", FALCON_ONE),
    ("FalconForCausalLM", FALCON_GROUPED),
    ("GPTBigCodeForCausalLM", {}),
]


def measure_all(cases: list[tuple[str, dict[str, Any]]]) -> list[Row]:
    return [replace(measure(name, changes), name=f"{name} {changes}") for name, changes in cases]


@pytest.mark.parametrize("cases", [FOUR[::2], pytest.param(FOUR[1::2], marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_fewer_key_value_heads_than_ranks(cases: list[tuple[str, dict[str, Any]]]) -> None:
    for rows in ranks.run_ranks(measure_all, 4, cases, timeout=150):
        for row in rows:
            assert row.exact, row
            assert row.flow > 0.6, row


@pytest.mark.slow  # fast: `test_fewer_key_value_heads_than_ranks`
def test_key_value_heads_are_held_by_the_ranks_that_read_them() -> None:
    plan = make_plan(zoo.build("LlamaForCausalLM", changes=GROUPED), 4)
    assert plan.parameters["model.layers.0.self_attn.k_proj.weight"].ranges == [[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]]
    assert plan.parameters["model.layers.0.self_attn.q_proj.weight"].ranges == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 32)]]
    plan = make_plan(zoo.build("LlamaForCausalLM", changes=ONE), 2)
    assert plan.modules["model.layers.0.self_attn.k_proj"].split == "whole"
    assert "model.layers.0.self_attn.k_proj.weight" in plan.summed
