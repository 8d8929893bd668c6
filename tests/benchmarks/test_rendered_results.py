"""docs/benchmarks.md as ``python -m tools.render`` writes it: contents by topic, and each shared sentence once."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common.tables import described, markdown
from tools import render


def result(title: str, text: str, **machine: Any) -> dict[str, Any]:
    """Return a result file of one cell."""
    where = {"device": "2 CPUs", "torch": "2", "python": "3", "when": "today", **machine}
    return {"title": title, "text": text, "command": "run", "columns": ["a"], "rows": [["b"]], "figure": "", "machine": where}


def test_a_sentence_of_the_section_before_becomes_a_link_to_the_section_that_has_it() -> None:
    texts = ["A model. Ten rounds.", "A model. *Bytes*: counted.", "A model. Ten rounds.", "Another one."]
    found = render.once([result(f"On {i}'s side", text) for i, text in enumerate(texts)])
    assert [one["text"] for one in found] == [
        "A model. Ten rounds.",
        "*Bytes*: counted. Otherwise as [above](#on-0s-side).",
        "Ten rounds. Otherwise as [above](#on-0s-side).",
        "Another one.",
    ]


def test_the_usual_machine_is_not_named_again() -> None:
    usual = described(result("A", "")["machine"])
    assert "\ntoday.\n" in markdown(result("A", "Text."), usual)
    assert "\nH100, torch 2, Python 3, today.\n" in markdown(result("A", "Text.", device="H100"), usual)


def test_contents_link_to_all_sections_by_topic() -> None:
    results = {"stores": result("Stores", ""), "offload": result("Offload", ""), "lora_gpu": result("LoRA on 1 x H100", "")}
    found = render.page(results)
    assert [line for line in found.splitlines() if line.startswith(("- **", "## "))] == [
        "- **Step time on one GPU**: [LoRA](#lora-on-1-x-h100)",
        "- **Offload**: [Offload](#offload)",
        "- **Checkpoints**: [Stores](#stores)",
        "## LoRA on 1 x H100",
        "## Offload",
        "## Stores",
    ]
    with pytest.raises(ValueError, match=r"\['new'\]: no topic of tools.render.TOPICS"):
        render.page({**results, "new": result("New", "")})
