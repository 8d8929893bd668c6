"""Read files of other programs: any failure becomes one error that names the file.

A file may have any content. An error that a library raises about it (``KeyError``, ``RecursionError``, an overflow in C++) names neither
the file nor a remedy; ``reading`` adds both. Readers compare sizes with the bytes of the file before they allocate memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_zero.errors import HfZeroError
from hf_zero.system.object_store import Place
from hf_zero.system.text_file import LIMIT_BYTES, read_text

ADVICE = "It is damaged, or not what its name says: take another copy, or write it again"
MOST_VALUES = 250_000
_SHOWN = 200  # maximum number of characters of a library's message


@contextmanager
def reading(path: object, error: Callable[[str], HfZeroError], advice: str = ADVICE) -> Iterator[None]:
    """Turn any failure inside the ``with`` into ``error`` with ``path``, the failure, and ``advice``; hf_zero's own errors pass.

    Args:
        path: Name of the file in messages.
        error: Class of the error.
        advice: Sentence with the remedy.
    """
    try:
        yield
    except HfZeroError:
        raise
    except Exception as found:  # a broken file can make a library raise any error
        raise error(f"cannot read {path}: {_described(found)}. {advice}") from found


def _described(found: Exception) -> str:
    text = str(found).strip()
    if isinstance(found, RecursionError):
        return "it is nested too deep"
    if isinstance(found, MemoryError):
        return "it needs more memory than this machine has"
    if isinstance(found, KeyError):
        return f"{shown(found.args[0]) if found.args else 'a key'} is missing"
    described = text if isinstance(found, (OSError, ValueError)) and text else f"{type(found).__name__}: {text}"
    return (described if len(described) <= _SHOWN else described[:_SHOWN] + "...").rstrip(".")


def shown(data: Any) -> str:
    """Return ``data`` for a message, shortened if it is long."""
    try:
        text = repr(data)
    except Exception as error:  # nested too deep, or an object whose repr fails
        return f"a {type(data).__name__} ({type(error).__name__})"
    return text if len(text) < 80 else text[:77] + "..."


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON (a key that occurs twice, of which readers use different ones, ``NaN`` and ``Infinity`` are not
            JSON either), or it has far more values than a meaningful text of its length.
    """
    require_few_values(text)
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)


def require_few_values(text: str | bytes, most: int | None = None) -> None:
    """Refuse a text whose values would take many times its own size: an empty block is 2 bytes in a file and 64 in memory.

    Args:
        text: JSON, or a similar format.
        most: Maximum number of values; None allows 250,000, and one per 8 bytes for larger texts.

    Raises:
        ValueError: The text has more values.
    """
    allowed = MOST_VALUES + len(text) // 8 if most is None else most
    if len(text) > allowed:
        found = sum(text.count(mark.encode()) if isinstance(text, bytes) else text.count(mark) for mark in (",", "[", "{"))
        if found > allowed:
            raise ValueError(f"it has about {found:,} values, more than the {allowed:,} that are read")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} comes twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def read_json(path: Path, error: Callable[[str], HfZeroError], limit_bytes: int = LIMIT_BYTES) -> Any:
    """Return the value of a JSON file; see ``reading``, ``parse_json`` and ``text_file.read_bytes``."""
    with reading(path, error):
        return parse_json(read_text(path, limit_bytes))


def whole_json(path: Place, limit_bytes: int = LIMIT_BYTES) -> Any:
    """Return the value of a JSON file of any content; None if it cannot be read or is not JSON."""
    try:
        return parse_json(read_text(path, limit_bytes))
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
