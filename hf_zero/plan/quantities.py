"""Rates as people write them, such as 400Gbit."""

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
