"""The configuration as users hand it over (path, mapping, JSON text, base64 text) -> one raw dictionary."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError

_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])', re.DOTALL)


def read_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Read a configuration without interpreting any key.

    Args:
        source: A mapping (its blocks and lists are copied), a path, JSON text, or JSON text in base64 (URL-safe or plain), as launchers
            pass it through environment variables. Files may hold comments (`//`, `#`, `/* */`) and trailing commas.

    Returns:
        A new dictionary; no block or list in it is shared with `source`.

    Raises:
        ConfigError: `source` is none of these, the text is no JSON, a key stands twice in one block, or the top level is no block.
    """
    if isinstance(source, Mapping):
        return {key: _copied(value) for key, value in source.items()}
    if isinstance(source, os.PathLike):
        return _read_file(Path(source))
    if not isinstance(source, str):
        raise ConfigError(f"A config is a path, a dict, JSON text or base64 text, not {type(source).__name__}: {source!r}")
    if source.lstrip().startswith("{"):
        return _parse(source, "the JSON text")
    if os.path.exists(source):
        return _read_file(Path(source))
    decoded = _from_base64(source)
    if decoded is None:
        short = source if len(source) <= 120 else source[:117] + "..."
        raise ConfigError(
            f"The config {short!r} is no existing file, no JSON text and no base64 text. Give the path of a JSON file or a dict."
        )
    return _parse(decoded, "the base64 text")


def _copied(value: Any) -> Any:
    """Blocks and lists anew, everything else as it is: a config in code may hold objects that cannot be copied (process groups)."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"The config file {str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The config file {str(path)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return _parse(text, f"the file {str(path)!r}")


def _from_base64(text: str) -> str | None:
    """The decoded text, or None when `text` is not base64 of a JSON block."""
    compact = "".join(text.split()).replace("-", "+").replace("_", "/")
    try:
        decoded = base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        relaxed = _without_comments(text)
        if relaxed == text:
            raise _not_json(name, error) from error
        try:
            data = json.loads(relaxed, object_pairs_hook=_no_duplicates)
        except json.JSONDecodeError as second:
            raise _not_json(name, second) from second
    if not isinstance(data, dict):
        raise ConfigError(f"A config is one block {{...}}, but {name} holds a {type(data).__name__}")
    return data


def _not_json(name: str, error: json.JSONDecodeError) -> ConfigError:
    return ConfigError(f"The config in {name} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})")


def _without_comments(text: str) -> str:
    """JSON with comments blanked and trailing commas removed; line and column numbers stay the same."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _STRING_OR_TRAILING_COMMA.sub(blank, _STRING_OR_COMMENT.sub(blank, text))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block: dict[str, Any] = {}
    for key, value in pairs:
        if key in block:
            raise ConfigError(f"The key `{key}` stands twice in one block, as {block[key]!r} and {value!r}; keep one")
        block[key] = value
    return block
