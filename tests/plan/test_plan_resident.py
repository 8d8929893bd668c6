"""The peak that a plan of CPUs tells beside the memory that processes which train have resident."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan.plan_resident import WORLD, combinations, measured, name_of
from tests.support import planned
from tests.support.memory import heap_tells

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell the peak of a part of a run"),
    pytest.mark.skipif(not heap_tells(), reason="the C library does not tell what of its heap is in use"),
]


def test_plan_and_what_the_heap_keeps_are_within_ten_percent() -> None:
    for case in (combinations()[1], combinations()[-1]):
        told = planned.plan(**case, world=WORLD).peaks["host"].nbytes
        for rank in measured(case):
            rest = rank["resident"] - rank["used"]
            assert told + rest == pytest.approx(rank["resident"], rel=0.1), name_of(case)
