"""Every text architecture of transformers, split over 2 and over 4 ranks, equals one rank: a few kinds in `make test`, all when slow."""

from __future__ import annotations

import pytest

from tests.tensor_parallel.breadth import WORLDS, buildable, measure_all, saved

# One of each kind: grouped heads, fused projections, ALiBi, shared position tables, experts, state space, norms over all heads, a module
# that hands its input through, code that asks which experts were chosen, code that counts values past a threshold.
KINDS = ["DebertaV2ForMaskedLM", "BambaForCausalLM", "Phi3ForCausalLM", "SwitchTransformersForConditionalGeneration", "BltForCausalLM"]
SLOW_KINDS = ["BloomForCausalLM", "Olmo2ForCausalLM", "ApertusForCausalLM", "MobileBertForMaskedLM"]


@pytest.mark.slow  # fast: `test_two_ranks_hold_one_model` of test_tp_training.py
@pytest.mark.parametrize("names", [KINDS, pytest.param(SLOW_KINDS, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_kinds_of_architectures_are_exact_and_mostly_split(names: list[str]) -> None:
    for row in measure_all(names, 3):
        assert row.exact, row
        assert row.share >= 0.4, row


@pytest.mark.slow  # fast: test_tp_heads.py
def test_key_value_heads_of_several_ranks_are_repeated_as_often_as_padded_rows_need() -> None:
    """Two key/value heads on four ranks: one model that runs with made-up tokens, and one that does not."""
    for row in measure_all(["LlamaForCausalLM", "DbrxForCausalLM"], world=4, padded=True):
        assert row.exact, row


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_every_architecture_that_the_page_calls_exact(world: int, padded: bool) -> None:
    """And no new wrong number: what cannot be split says so."""
    expected = {row.name: row for row in saved(world)}
    rows = measure_all(buildable(), world=world, padded=padded)
    worse = [row for row in rows if row.name in expected and expected[row.name].exact and not row.exact]
    assert not worse
    known = {name for name, row in expected.items() if not row.error and not row.exact}
    assert not [row for row in rows if not row.error and not row.exact and row.name not in known]
