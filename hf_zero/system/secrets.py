"""Mask secrets in texts that people may publish: values under names of secrets, and credentials inside URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_LEVELS = 64
_NAME = re.compile("pass|pwd|cred|auth|token|secret|key|signature|bearer", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^\s/?#]*@")
_QUERY = re.compile(r"(?<=[?&#;])([^\s=&?#;]+)=[^\s&#;]*")


def is_secret(name: str) -> bool:
    """Return whether a variable or key of this name may hold a secret: by words like PASS, CRED, AUTH, TOKEN, SECRET
    and KEY, in any case.
    """
    return _NAME.search(name) is not None


def without_credentials(text: str) -> str:
    """Return ``text`` with user names, passwords and the values of the query masked in every URL."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1={MASK}", _USER.sub(f"{MASK}@", text))


def hidden(value: Any, levels: int = _LEVELS) -> Any:
    """Return a copy of ``value`` for display: texts under names of secrets are masked at every depth, and so are credentials in URLs.

    Args:
        value: Value of a configuration.
        levels: Depth of nested blocks and lists to show; deeper ones are shown as "...".
    """
    if isinstance(value, (Mapping, list, tuple)) and levels <= 0:
        return "..."
    if isinstance(value, Mapping):
        return {key: hidden_under(key, item, levels - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [hidden(item, levels - 1) for item in value]
        return tuple(items) if type(value) is tuple else items
    return without_credentials(value) if isinstance(value, str) else value


def hidden_under(name: Any, value: Any, levels: int = _LEVELS) -> Any:
    """Return a copy of ``value`` for display, masked if ``name`` is the name of a secret; numbers and booleans are shown (``max_tokens``),
    and an empty text is not masked.
    """
    if isinstance(value, (str, bytes)) and value and isinstance(name, str) and is_secret(name):
        return MASK
    return hidden(value, levels)
