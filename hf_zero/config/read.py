"""Read a configuration in any form (path, mapping, JSON text, base64 text) as one raw dictionary."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from hf_zero.config.problems import show
from hf_zero.errors import ConfigError
from hf_zero.system.reading import MOST_VALUES, require_few_values
from hf_zero.system.secrets import MASK, is_secret
from hf_zero.system.text_file import read_text_file

# Each alternative matches as much as it can and cannot fail after its beginning: an unclosed string or comment matches up to the end of
# the text at once, so the time is proportional to the length of the text.
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*["\\]?'
_STRING_OR_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/)?", re.DOTALL)
_STRING_OR_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)
_MOST_HJSON = 1 << 20  # characters; the Hjson reader is slow
_MOST_LEVELS = 64
"""Maximum nesting of blocks; no configuration needs ten levels."""


def read_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Read a configuration without interpreting any key.

    Args:
        source: A mapping (its blocks and lists are copied), a path, JSON text, or JSON text in base64 (URL-safe or plain), as launchers
            pass it through environment variables. Files may have comments (`//`, `#`, `/* */`) and trailing commas, and may be Hjson where
            `hjson` is installed.

    Returns:
        A new dictionary; no block or list in it is shared with `source`.

    Raises:
        ConfigError: `source` is none of these, the text is no JSON, a block has a key twice, blocks are nested without end, or the top
            level is no block.
    """
    if isinstance(source, Mapping):
        return {_text(key): _copied(value, 1) for key, value in source.items()}
    if isinstance(source, os.PathLike):
        return _read_file(source)
    if not isinstance(source, str):
        raise ConfigError(f"A config is a path, a dict, JSON text or base64 text, not {type(source).__name__}: {source!r}")
    if source.lstrip().startswith("{"):
        return _parse(source, "the JSON text")
    if os.path.exists(source):
        return _read_file(source)
    decoded = _from_base64(source)
    if decoded is None:
        short = source if len(source) <= 120 else f"{source[:20]}... ({len(source)} characters)"
        raise ConfigError(f"The config {short!r} is neither an existing file nor JSON or base64 text. Give the path of a JSON file.")
    return _parse(decoded, "the base64 text")


def _copied(value: Any, level: int) -> Any:
    """Copy blocks and lists, but keep all other values: a config in code may have objects that cannot be copied (process groups)."""
    if level > _MOST_LEVELS:
        raise ConfigError(f"The config has blocks or lists nested more than {_MOST_LEVELS} deep; its own keys need fewer than ten levels")
    if isinstance(value, Mapping):
        return {_text(key): _copied(item, level + 1) for key, item in value.items()}
    if isinstance(value, str):
        return _text(value)
    return [_copied(item, level + 1) for item in value] if isinstance(value, list) else value


def _text(value: Any) -> Any:
    """Return `value`; raise a ``ConfigError`` for a text that cannot be encoded."""
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ConfigError(
            f"The config has an incomplete Unicode character (a lone surrogate) in the text {ascii(value[:80])}; write the whole character"
        )
    return value


def _read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    return _parse(read_text_file(path, "config file"), f"the file {os.fspath(path)!r}")


def _from_base64(text: str) -> str | None:
    """Return the decoded text; None when `text` is not base64 of a JSON block."""
    compact = "".join(text.split()).replace("-", "+").replace("_", "/")
    try:
        decoded = base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        require_few_values(text, MOST_VALUES)
        data = _load(text, name)
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        data = _relaxed(text, name, error)
    except ValueError as error:
        raise ConfigError(f"The config in {name} is not JSON that can be a config: {error}. No config needs that") from error
    if not isinstance(data, dict):
        raise ConfigError(f"A config is one block {{...}}, but {name} holds a {type(data).__name__}")
    return {_text(key): _copied(value, 1) for key, value in data.items()}


def _relaxed(text: str, name: str, error: json.JSONDecodeError) -> Any:
    """Return the content of a ``text`` that is not plain JSON: JSON with comments and trailing commas, or Hjson."""
    if sum(text.count(mark) for mark in ('"', "/", "#", ",")) > 2 * MOST_VALUES:  # each of these marks may begin a match
        raise _not_json(name, error) from error
    relaxed = _without_comments(text)
    if relaxed != text:
        try:
            return _load(relaxed, name)
        except json.JSONDecodeError as second:
            error = second
    data = _as_hjson(text)
    if data is None:
        raise _not_json(name, error) from error
    return data


def _as_hjson(text: str) -> Any:
    """Return the content of ``text`` as Hjson (no quotes, no commas), which DeepSpeed accepts; None if it is not Hjson, or hjson is not
    installed.
    """
    if len(text) > _MOST_HJSON:
        return None
    try:
        import hjson
    except ImportError:
        return None
    try:
        return hjson.loads(text, object_pairs_hook=_no_duplicates)
    except (hjson.HjsonDecodeError, RecursionError):
        return None


def _load(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ConfigError(f"The config in {name} has blocks or lists nested more than {_MOST_LEVELS} deep") from None
    except ValueError as error:
        if isinstance(error, (json.JSONDecodeError, ConfigError)):
            raise
        raise ConfigError(f"The config in {name} has a number with thousands of digits; no key takes one") from None


def _not_json(name: str, error: json.JSONDecodeError) -> ConfigError:
    lines = error.doc.splitlines()
    line = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
    found = f": {show(line)[1:-1]}" if line else ""
    return ConfigError(f"The config in {name} is not JSON: {error.msg} (line {error.lineno}, column {error.colno}){found}")


def _without_comments(text: str) -> str:
    """Return JSON with comments blanked and trailing commas removed; line and column numbers stay the same."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        unclosed = found.startswith("/*") and not (len(found) >= 4 and found.endswith("*/"))
        return found if unclosed or found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _STRING_OR_TRAILING_COMMA.sub(blank, _STRING_OR_COMMENT.sub(blank, text))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block: dict[str, Any] = {}
    for key, value in pairs:
        if key in block:
            first, second = (MASK if is_secret(key) else show(found) for found in (block[key], value))
            raise ConfigError(f"The key `{show(key)[1:-1]}` occurs twice in one block, as {first} and {second}; keep one")
        block[key] = value
    return block
