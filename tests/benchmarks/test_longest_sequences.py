"""The search for the longest sequence ends where it says, and its page shows what it has found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.common.tables import ResultTable
from benchmarks.long_sequences import context_parallel, fsdp2, longest
from benchmarks.long_sequences.longest import CLOSE, PAGE, RESULTS, STEP, Taken, Way
from hf_zero.plan.inputs import ModelWish
from hf_zero.plan.models import build_model
from tests.support import ranks


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


def peaks_of_fsdp2(settings: dict[str, Any], cases: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """Return bytes on device and host at the peak for each (ranks, tokens, optimizer on the host)."""
    return [
        fsdp2.peaks(build_model(ModelWish("llama", settings, checkpointing=True)), count, length, host=host)
        for count, length, host in cases
    ]


def test_memory_of_fsdp2_is_counted_with_its_shards() -> None:
    """Two ranks keep a half of parameters, gradients and two moments in fp32, and half of a sequence; four ranks a quarter."""
    settings = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 64, "max_position_embeddings": 8192}  # fmt: skip
    count = sum(param.numel() for param in build_model(ModelWish("llama", settings)).module.parameters())
    cases = [(2, 4096, True), (2, 4096, False), (4, 8192, True), (2, 8192, True)]
    away, here, four, long = ranks.run_alone(peaks_of_fsdp2, settings, cases)  # the process keeps its pretended device
    assert 16 * count / 2 <= away[1] < 1.1 * 16 * count / 2  # AdamW's intermediate values beside
    assert here[0] - away[0] >= 12 * count / 2 and here[1] < count
    assert away[0] <= four[0] < 1.25 * away[0]  # keys and values of the whole sequence are gathered
    assert long[0] > 1.8 * away[0]
