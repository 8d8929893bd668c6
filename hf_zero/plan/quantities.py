"""Rates as people write them, such as 400Gbit, and sizes as they are told."""

from __future__ import annotations

import re

from hf_zero.errors import ConfigError

_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)bit(?:/s)?")


def bytes_per_second_of(text: str, flag: str) -> float:
    """Return bytes per second of ``400Gbit``.

    Args:
        text: As the user wrote it.
        flag: Whose value it is, for the message.

    Raises:
        ConfigError: It is no such rate.
    """
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) * 1000 ** _POWERS[found[2]] / 8 if found else 0
    if found is None or rate <= 0:
        raise ConfigError(f"{flag} is {text!r}; a number of bits per second with kbit, Mbit, Gbit or Tbit is allowed, such as 400Gbit")
    return rate


def size_text(nbytes: float) -> str:
    """``nbytes`` for people: ``12.3 GiB``."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
