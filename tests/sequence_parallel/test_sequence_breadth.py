"""Every causal language model of transformers trains exactly over slices or is refused by name; a few here, all with ``--slow``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.sequence_parallel.breadth import START, STOP, Row, causal, measure, row_of, saved, table
from tests.sequence_parallel.compared import LOSS, PAGE, each_of, measure_all
from tests.support import ranks

pytest.importorskip("transformers", minversion="5.0")

SOME = ["Cohere2ForCausalLM", "MixtralForCausalLM", "Zamba2ForCausalLM", "KimiLinearForCausalLM", "BartForCausalLM", "XLMWithLMHeadModel"]


def test_published_results_are_exact_or_refused_and_on_the_page() -> None:
    rows = saved()
    assert sum(row.exact for row in rows) >= 171
    assert [row.name for row in rows if not (row.exact or row.refused)] == ["BltForCausalLM", "xLSTMForCausalLM"]  # nor on one rank
    page = PAGE.read_text(encoding="utf-8")
    rendered = table(rows)
    assert rendered.splitlines()[4:] == (START + page.split(START)[1].split(STOP)[0] + STOP).splitlines()[4:]


@pytest.mark.slow  # fast: `test_architectures_over_two_ranks` of test_context_training.py
def test_some_are_what_was_published() -> None:
    known = {row.name: row for row in saved()}
    for row in ranks.run_ranks(partial(each_of, measure), 2, SOME)[0]:
        assert (row.exact, bool(row.refused)) == (known[row.name].exact, bool(known[row.name].refused)), row


@pytest.fixture(scope="module")
def everything() -> Iterator[list[Row]]:
    yield measure_all(measure, causal(), row_of)


@pytest.mark.slow
def test_all_are_exact_or_refused(everything: list[Row]) -> None:
    known = {row.name for row in saved() if not (row.exact or row.refused)}
    assert [row for row in everything if not (row.exact or row.refused or row.name in known)] == []
    assert LOSS <= 1e-5
