"""Whether this process only plans: tensors have sizes and no values, and the other ranks are not there.

`hf-zero plan` runs the engine itself on such tensors. What reaches past torch (kernels, pages of the kernel, files, peers) asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DEVICE = "planned"
"""torch's name of the accelerator that a plan pretends."""

_depth = 0
_place = ""


def planning() -> bool:
    """Whether it does."""
    return _depth > 0


@contextmanager
def only_planning() -> Iterator[None]:
    """Inside, this process only plans."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def placed(tier: str) -> Iterator[None]:
    """What is allocated inside stands for memory of ``tier``, whatever device it names."""
    global _place
    before, _place = _place, tier
    try:
        yield
    finally:
        _place = before


def place() -> str:
    """The tier that ``placed`` names now; "" where none does."""
    return _place
