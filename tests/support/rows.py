"""Tables of cases: many small ones checked in one test, and the cells of a large one that the fast run uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(rows: Iterable[Any], check: Callable[[Any], None]) -> None:
    """Call ``check(row)`` for every row, and fail once, with every failed row and its error. An empty table fails as well."""
    count, wrong = 0, []
    for row in rows:
        count += 1
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{row!r}: {type(error).__name__}: {error}")
    assert count, "the table is empty"
    assert not wrong, f"{len(wrong)} of {count} rows failed:\n" + "\n".join(wrong[:20])


def thinned(whole: Any = 3, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test over all combinations; most of them are slow.

    The fast run takes every value of the other axes with one value of the first, ``whole`` (for stages the most complex one), and each
    other value of the first once. Without ``whole`` it takes a diagonal through all axes. Stage 1 is slow beside 2: they differ only in
    ``no_sync`` (``core/stages.py``), which the matrix, the traces and the protocols of accumulation cover.
    """
    first, *others = values = [list(axis) for axis in axes.values()]
    if whole is None:
        fast = _diagonal(values)
    else:
        rest = [value for value in first if value not in ((whole, 1) if {1, 2} <= set(first) else (whole,))]
        fast = _diagonal([[whole], *others]) + [(value, *(axis[i % len(axis)] for axis in others)) for i, value in enumerate(rest)]
    cells = [pytest.param(*cell, marks=() if cell in fast else pytest.mark.slow) for cell in itertools.product(*values)]
    return pytest.mark.parametrize(list(axes), cells)


def _diagonal(axes: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Return cells with every value of every axis at least once, in as few cells as possible."""
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the values for ``parametrize``, all slow except those in ``fast``."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
