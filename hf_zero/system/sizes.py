"""Sizes in bytes as people write and read them: 80GiB, 80GB."""

from __future__ import annotations

import re

from hf_zero.errors import ConfigError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(?:([kmgt])(i?))?b)?\s*", re.IGNORECASE)


def bytes_of(size: int | str, name: str, bare: bool = False) -> int:
    """Return the bytes of ``80GiB`` (powers of 1024) or ``80GB`` (powers of 1000), in upper or lower case.

    Args:
        size: The size as the user wrote it.
        name: Name of the setting, for the message.
        bare: Allow a number without unit, which means bytes.

    Raises:
        ConfigError: ``size`` is no such text or number.
    """
    whole = isinstance(size, int) and not isinstance(size, bool)
    text = str(size) if whole or isinstance(size, str) else ""
    found = _SIZE.fullmatch(text)
    nbytes = float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[(found[2] or "").lower()] if found else 0
    if nbytes < 1 or not (bare or text.rstrip()[-1].isalpha()):
        alone = "a number of bytes, or one" if bare else "a number"
        raise ConfigError(
            f"{name} is {size!r}; {alone} with B, kB, MB, GB, TB (powers of 1000) or kiB, MiB, GiB, TiB is allowed, such as 80GiB"
        )
    return int(nbytes)


def size_text(nbytes: float, number: str = ".2f", unit: str = "") -> str:
    """Return ``nbytes`` as text such as ``12.30 GiB``.

    Args:
        nbytes: Bytes.
        number: Format of the number; ignored for the unit B, whose numbers are whole.
        unit: B, KiB, MiB, GiB or TiB; by default the largest unit that is not larger than ``nbytes``.
    """
    unit = unit or next((name for name, size in _UNITS.items() if abs(nbytes) < 1024 * size), "TiB")
    return f"{nbytes / _UNITS[unit]:{'.0f' if unit == 'B' else number}} {unit}"


def gib(nbytes: float) -> str:
    """Return ``nbytes`` as text in GiB, or in MiB below a quarter of a GiB."""
    return size_text(nbytes, unit="GiB") if nbytes >= 2**28 else size_text(nbytes, ".1f", "MiB")
