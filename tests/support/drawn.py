"""How many examples a property is tried on."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def drawn(fast: int, slow: int, **options: Any) -> settings:
    """``fast`` examples, the same each time, in the fast run; ``slow`` new ones each time in the slow one (``tests/conftest.py``)."""
    return settings(max_examples=fast if settings.default.derandomize else slow, deadline=None, **options)
