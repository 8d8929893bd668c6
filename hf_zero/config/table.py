"""Tables of configuration keys: the rows that `hf-zero explain` prints, and the reference page docs/config.md.

    python -m hf_zero.config.table --write docs/config.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hf_zero.config.keys import Key, all_keys, spellings_of
from hf_zero.config.problems import show
from hf_zero.config.schema.fields import Section


class Row(NamedTuple):
    """One line of `explain`: a key, its value as JSON text, where that came from, its fate and its effect."""

    key: str
    value: str
    source: str
    fate: str
    effect: str


def rows_of(resolved: dict[str, Any], origin: dict[str, str], everything: bool = False) -> list[Row]:
    """Rows in the order of the schema.

    Args:
        resolved: Nested values with canonical names; keys that are absent have their default.
        origin: Dotted key -> source.
        everything: All keys, not only those that were set, filled or derived.
    """
    values = dict(_leaves(resolved, ""))
    keys = all_keys()
    rows = []
    for path, key in keys.items():
        if key.is_section or path.endswith("*") or "<" in path or "[]" in path:
            continue
        if path in values or path in origin or everything:
            value = values.pop(path, key.default)
            rows.append(Row(path, show(value), origin.get(path, "default"), key.fate, key.effect))
    for path, value in values.items():  # keys under names of the user's own: constructor arguments, metrics, groups
        pattern = _pattern(path, keys)
        rows.append(Row(path, show(value), origin.get(path, "file"), pattern.fate, pattern.effect))
    return rows


def _leaves(block: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    keys = all_keys()
    for name, value in block.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value and (here not in keys or keys[here].is_section):
            yield from _leaves(value, here)
        elif not (here in keys and keys[here].is_section):
            yield here, value


def _pattern(path: str, keys: dict[str, Key]) -> Key:
    """The row of the key list for a path under a user's own name: the nearest section above it, or its `*` row."""
    while path:
        path = path.rpartition(".")[0]
        for candidate in (f"{path}.*", path):
            if candidate in keys:
                return keys[candidate]
    raise KeyError(path)
