"""Number of examples of a property."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def drawn(fast: int, slow: int, **options: Any) -> settings:
    """Return settings with ``fast`` equal examples per fast run, or ``slow`` new ones per slow run (``tests/conftest.py``)."""
    return settings(max_examples=fast if settings.default.derandomize else slow, deadline=None, **options)
