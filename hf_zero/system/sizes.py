"""Parse sizes as people write them: 80GiB, 80GB."""

from __future__ import annotations

import re

from hf_zero.errors import ConfigError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(?:([kmgt])(i?))?b)?\s*", re.IGNORECASE)


def bytes_of(size: int | str, name: str, bare: bool = False) -> int:
    """Return the bytes of ``80GiB`` (powers of 1024) or ``80GB`` (powers of 1000), in upper or lower case.

    Args:
        size: As the user wrote it.
        name: Name of the setting, for the message.
        bare: Whether a number without unit is allowed and means bytes.

    Raises:
        ConfigError: It is not such a size.
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
