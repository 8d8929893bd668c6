"""Sizes and rates as people write them: 80GiB, 80GB, 400Gbit."""

from __future__ import annotations

import re

from hf_zero.errors import ConfigError

_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)bit(?:/s)?")


def bytes_of(text: str, flag: str) -> int:
    """Bytes of ``80GiB`` (powers of 1024) or ``80GB`` (powers of 1000).

    Args:
        text: As the user wrote it.
        flag: Whose value it is, for the message.

    Raises:
        ConfigError: It is no such size.
    """
    found = _SIZE.fullmatch(text.strip())
    nbytes = float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]] if found else 0
    if found is None or nbytes < 1 or (found[3] and not found[2]):
        raise ConfigError(
            f"{flag} is {text!r}; a number with B, kB, MB, GB, TB (powers of 1000) or kiB, MiB, GiB, TiB is allowed, such as 80GiB"
        )
    return int(nbytes)


def bytes_per_second_of(text: str, flag: str) -> float:
    """Bytes per second of ``400Gbit``.

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
