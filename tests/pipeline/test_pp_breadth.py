"""Every text architecture of transformers over 2 and over 4 stages equals one process: all are slow."""

from __future__ import annotations

import pytest

from tests.pipeline.breadth import STAGES, Row, buildable, measure, measure_each, saved
from tests.support.rows import each

# One of each kind: decoder, tied head, encoder with a head of its own, two towers with biases that blocks hand on and without, one layer
# called many times, experts whose auxiliary loss is off, layers that keep keys and values for others.
KINDS = [
    ("LlamaForCausalLM", 4, 1), ("GPT2LMHeadModel", 2, 1), ("BertForMaskedLM", 2, 1), ("T5ForConditionalGeneration", 4, 4),
    ("BartForConditionalGeneration", 4, 2), ("AlbertForMaskedLM", 4, 1), ("MixtralForCausalLM", 2, 1), ("Gemma3nForCausalLM", 2, 3),
]  # fmt: skip


@pytest.mark.slow  # `test_kinds_of_models`, `test_shared_keys_and_values_stay_in_one_stage` have these kinds
def test_kinds_of_architectures_are_exact() -> None:
    def check(kind: tuple[str, int, int]) -> None:
        name, stages, crossings = kind
        row = measure(name, stages)
        assert row.exact, row
        assert row.crossings == crossings, row

    each(KINDS, check)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stages", STAGES)
def test_every_architecture_is_exact_or_refused(stages: int) -> None:
    expected = {row.name: row for row in saved() if row.stages == stages}
    rows = measure_each(buildable(), stages)
    assert not [row for row in rows if row.wrong]

    def no_worse(row: Row) -> None:
        assert row.exact or row.name not in expected or not expected[row.name].exact, row

    each(rows, no_worse)
