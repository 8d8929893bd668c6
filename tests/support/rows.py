"""Tables of many small rows checked in one test: a test case of its own for each of thousands would cost more than the check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(rows: Iterable[Any], check: Callable[[Any], None]) -> None:
    """Calls ``check(row)`` for every row, and fails once, with every row that failed and why. No row at all fails as well."""
    count, wrong = 0, []
    for row in rows:
        count += 1
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{row!r}: {type(error).__name__}: {error}")
    assert count, "the table is empty"
    assert not wrong, f"{len(wrong)} of {count} rows failed:\n" + "\n".join(wrong[:20])
