"""The search for the longest sequence ends where it says, and its page shows what it has found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.common.tables import ResultTable
from benchmarks.long_sequences import context_parallel, longest
from benchmarks.long_sequences.longest import CLOSE, PAGE, RESULTS, STEP, Taken, Way


@pytest.mark.parametrize("most", [0, 1, 2, 13, 16, 17, 31, 32, 100, 1_000, 30_000])
@pytest.mark.parametrize("near", [0, 8, 40])
def test_a_search_ends_within_a_16th(monkeypatch: pytest.MonkeyPatch, most: int, near: int) -> None:
    """Memory is the larger of two lines over tokens; in whole models a little more than in what small ones say."""
    asked: list[int] = []

    def taken(model: Any, way: Way, ranks: int, length: int, whole: bool = False) -> Taken:
        asked.append(length)
        tokens = length / STEP
        return Taken(max(0.4 * most + 0.6 * tokens, 2 * tokens - most) + 0.01 * tokens * whole, 0.0)

    monkeypatch.setattr(longest, "taken", taken)
    tokens, peak = longest.longest({}, Way(), 8, most, near * STEP)
    assert tokens % STEP == 0 and len(asked) < 30
    assert tokens == 0 or peak.device <= most
    assert tokens / STEP * (1 + 1 / CLOSE) + 1 >= most * (1 - 2 / CLOSE)


def test_the_page_shows_the_results() -> None:
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert longest.page_with(ResultTable(**result), page) == page
    known = longest.saved(RESULTS)
    assert all(longest.tokens_of(text) > 0 or text == "-" for text in known.values())
    rows = [row[: longest.COLUMNS] for row in result["rows"]]
    assert rows == [[model, way] for model in longest.MODELS for way in longest.WAYS]


def test_bytes_by_formula_are_those_of_the_page() -> None:
    """For 4 ranks, 8 heads of width 32, 4 of them of keys, and 1024 tokens in fp32."""
    size = {"width": 256, "layers": 1, "heads": 8, "vocab": 1}
    keys = 1024 * 128 * 4 * 3 // 4
    assert context_parallel.sent_by_formula("context", size, 1024, 4) == 4 * keys
    assert context_parallel.sent_by_formula("ring", size, 1024, 4) == 4 * keys + 2 * 1024 * 128 * 4
    assert context_parallel.sent_by_formula("hf_zero", size, 1024, 4) == 2 * 1024 * 256 * 4 // 4 * 3 * 3 // 4
