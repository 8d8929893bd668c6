"""Every text mixture of transformers with its experts over ranks, beside split layers too, equals one process, or is refused by name."""

from __future__ import annotations

import re

import pytest
import transformers

from tests.expert_parallel.breadth import COLUMNS, PAGE, measure_all, mixtures, saved, table

# Interleaved and transposed weights with biases, a list in a dict with dropout beside it, a norm after the experts.
KINDS = ["GptOssForCausalLM", "NllbMoeForConditionalGeneration", "Gemma4ForCausalLM"]


def test_the_page_has_no_wrong_number() -> None:
    rows = saved()
    published = re.sub(r"of transformers [0-9.]+", f"of transformers {transformers.__version__}", PAGE.read_text(encoding="utf-8"))
    assert len(rows) > 150 and table(rows) in published
    assert not [row for row in rows.values() if not row.exact and not row.error.startswith("UnsupportedError")]
    assert sum(row.exact for row in rows.values()) >= 168


@pytest.mark.slow
def test_kinds_of_experts_are_exact() -> None:
    for split in (False, True):
        for row in measure_all(KINDS, 2, split):
            assert row.exact, row


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("world", "split"), COLUMNS)
def test_every_mixture_is_exact_or_refused(world: int, split: bool) -> None:
    expected = saved()
    for row in measure_all(mixtures(), world, split):
        assert row.exact or row.error.startswith("UnsupportedError"), row
        assert row.exact or not expected[row.name, world, split].exact, row
