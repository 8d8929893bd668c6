"""As many inputs as are promised: 500 in the fast run, 20,000 in the slow one."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.guard import FAST, SLOW


def test_inputs_add_up() -> None:
    readers = sum(path.read_text().count(" = fuzzed(") for path in Path(__file__).parent.glob("test_fuzz_*.py") if path != Path(__file__))
    assert readers * FAST >= 500 and readers * SLOW >= 20_000
