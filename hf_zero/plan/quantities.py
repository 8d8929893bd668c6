"""Parse rates in the form of command-line flags, such as 400Gbit."""

from __future__ import annotations

import re

from hf_zero.errors import ConfigError

_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)bit(?:/s)?")


def bytes_per_second_of(text: str, flag: str) -> float:
    """Return the bytes per second of a rate such as ``400Gbit``.

    Args:
        text: The value of the flag.
        flag: Name of the flag, for the message.

    Raises:
        ConfigError: ``text`` is not a positive rate in kbit, Mbit, Gbit or Tbit.
    """
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) * 1000 ** _POWERS[found[2]] / 8 if found else 0
    if found is None or rate <= 0:
        raise ConfigError(f"{flag} is {text!r}; a number of bits per second with kbit, Mbit, Gbit or Tbit is allowed, such as 400Gbit")
    return rate
