"""Every causal language model of transformers trains exactly under context parallelism or is refused by name; a few here."""

from __future__ import annotations

from functools import partial

import pytest

from tests.sequence_parallel.breadth import causal, row_of
from tests.sequence_parallel.compared import PAGE, each_of, measure_all
from tests.sequence_parallel.context_breadth import START, STOP, measure, saved, table
from tests.support import ranks

pytest.importorskip("transformers", minversion="5.0")

SOME = ["Cohere2ForCausalLM", "RobertaForCausalLM", "MixtralForCausalLM", "MambaForCausalLM", "XGLMForCausalLM"]


def test_published_results_are_exact_or_refused_and_on_the_page() -> None:
    rows = saved()
    assert sum(row.exact for row in rows) >= 106
    assert [row.name for row in rows if not (row.exact or row.refused)] == ["BltForCausalLM"]  # does not train on one rank either
    page = PAGE.read_text(encoding="utf-8")
    assert table(rows).splitlines()[4:] == (START + page.split(START)[1].split(STOP)[0] + STOP).splitlines()[4:]


def test_some_are_what_was_published() -> None:
    known = {row.name: row for row in saved()}
    for row in ranks.run_ranks(partial(each_of, measure), 2, SOME)[0]:
        assert (row.exact, bool(row.refused)) == (known[row.name].exact, bool(known[row.name].refused)), row


@pytest.mark.slow
def test_all_are_exact_or_refused() -> None:
    rows = measure_all(measure, causal(), row_of)
    assert [row for row in rows if not (row.exact or row.refused or row.name == "BltForCausalLM")] == []
