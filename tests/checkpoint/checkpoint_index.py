"""An index of a checkpoint of which a test says only what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import CHUNK_BYTES


def make_index(**changes: Any) -> Index:
    """An empty one of one rank, with ``changes``."""
    empty = Index("0", "t", 1, 1, 0, CHUNK_BYTES, (), (), {}, {}, {}, (), None, None, {}, {}, {}, {})
    return replace(empty, **changes)
