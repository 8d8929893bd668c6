"""Every text mixture of transformers with its experts over 2 and over 4 ranks equals one process, or is refused by name."""

from __future__ import annotations

import pytest

from tests.support.ep_breadth import PAGE, WORLDS, measure_all, mixtures, saved, table

# Interleaved and transposed weights with biases, a list in a dict with dropout beside it, a norm after the experts.
KINDS = ["GptOssForCausalLM", "NllbMoeForConditionalGeneration", "Gemma4ForCausalLM"]


def test_the_page_has_no_wrong_number() -> None:
    rows = saved()
    assert len(rows) > 100 and table(rows) in PAGE.read_text(encoding="utf-8")
    assert not [row for row in rows.values() if not row.exact and not row.error.startswith("UnsupportedError")]
    assert sum(row.exact for row in rows.values()) >= 112


@pytest.mark.slow
def test_kinds_of_experts_are_exact() -> None:
    for row in measure_all(KINDS, 2):
        assert row.exact, row


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world", WORLDS)
def test_every_mixture_is_exact_or_refused(world: int) -> None:
    expected = saved()
    for row in measure_all(mixtures(), world):
        assert row.exact or row.error.startswith("UnsupportedError"), row
        assert row.exact or not expected[row.name, world].exact, row
