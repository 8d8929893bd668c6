"""The faults that `tools/mutants.py` plants: each must fit the sources, or nothing would be planted."""

from __future__ import annotations

from tools.mutants import wrong_places


def test_every_fault_fits() -> None:
    assert not wrong_places()
