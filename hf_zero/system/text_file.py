"""Small text files of others (configurations, hostfiles), read as a whole with a bound on their size."""

from __future__ import annotations

import os
from pathlib import Path

from hf_zero.errors import ConfigError

LIMIT_BYTES = 16 * 2**20


def read_text_file(path: str | os.PathLike[str], what: str, limit_bytes: int = LIMIT_BYTES) -> str:
    """The text of a UTF-8 file; a byte order mark at its beginning is dropped.

    Args:
        path: The file; a pipe is read to its end.
        what: What it is, for messages: "config file".
        limit_bytes: The largest size that is read.

    Raises:
        ConfigError: It cannot be read, is larger, or is no UTF-8; names ``what`` and ``path``.
    """
    name = f"The {what} {os.fspath(path)!r}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ConfigError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > limit_bytes:
        raise ConfigError(f"{name} is larger than {limit_bytes:,} bytes, which none is; give the path of another file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
