"""The peak that a plan of CPUs tells beside the memory that processes which train have resident."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_resident import RETURNING, WORLD, combinations, name_of, processes, resident
from tests.support import planned

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell the peak of a part of a run"),
]


def test_memory_in_use_is_within_ten_percent() -> None:
    with processes(**RETURNING) as ranks:
        for case in (combinations()[1], combinations()[-1]):
            told = planned.plan(**case, world=WORLD).peaks["host"].nbytes
            for nbytes in resident(ranks, case):
                assert told == pytest.approx(nbytes, rel=0.1), name_of(case)
