"""Exception classes. Every message names the subject (key, parameter, unit, file), the value found, what is allowed and what to do."""

from __future__ import annotations

import re
from typing import Any, NoReturn

# Control characters but newline and tab, marks that change the direction of a text, separators of lines, and halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb]")


def printable(text: str) -> str:
    r"""Write out characters of ``text`` that a terminal would obey, ``\x1b`` for an escape: names in files of others may hold anything."""
    return text if text.isascii() and text.isprintable() else _UNPRINTABLE.sub(_written_out, text)


class PrintableStream:
    """Wrap a stream of text: all that is written goes through ``printable``; everything else is the stream's.

    Args:
        stream: Where the text goes.

    Attributes:
        terminal: The stream itself, for code that writes colours of its own.
    """

    def __init__(self, stream: Any) -> None:
        self.terminal = stream

    def write(self, text: str) -> int:
        """Write ``text``; return the number of its characters."""
        self.terminal.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def _written_out(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


class HfZeroError(Exception):
    """Stand above every error that hf_zero raises on purpose. Its text can be printed, whatever it names."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(HfZeroError, ValueError, AssertionError):
    """Report a wrong value of the configuration or a wrong argument. Names the dotted key, value, allowed values and nearest known key.

    An ``AssertionError`` too, like ``StateError``: scripts that were written for engines which assert such things catch that.
    """


class CollectiveError(HfZeroError, RuntimeError):
    """Report a collective that failed or timed out. Names the phase, the unit, the rank and the events that came before."""


class UnsupportedError(HfZeroError, NotImplementedError):
    """Report a feature that exists elsewhere and is not provided here. Names it and a replacement."""


class CheckpointError(HfZeroError, RuntimeError):
    """Report a checkpoint that cannot be written or read. Names the file, the expected and the found value."""


class CheckpointArgumentError(CheckpointError, ValueError):
    """Report an argument that names no place for a checkpoint. A ``ValueError`` too, which scripts for other engines catch."""


class StateError(HfZeroError, RuntimeError, AssertionError):
    """Report a call that cannot be served at this moment (a released parameter, a destroyed engine, a step inside no_sync)."""


class HostMemoryError(HfZeroError, MemoryError):
    """Report that host memory is too small for offload. Names the bytes needed and free, the source of the limit, and remedies."""


class OffloadError(HfZeroError, OSError):
    """Report a file of offloaded state that cannot be made, read or written. Names the path, the bytes and the system's error."""


PREEMPTED_STATUS = 75
"""Exit status of every rank that has saved because a signal asked it to end: that of BSD's sysexits for "try again later"."""


class Preempted(SystemExit):
    """End the run with ``PREEMPTED_STATUS`` after a signal and a complete save. ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED_STATUS)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs: the class alone, because it takes no arguments."""
        return type(self), ()


def saved_without_values(name: str, shape: tuple[int, ...], dtype: str) -> NoReturn:
    """Raise, because a file is loaded that has no values of a parameter; files name this function in place of the values.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"{name}, {dtype} of shape {shape}, has no values in this file: when its state dict was saved, the parameter was divided over the "
        "ranks (ZeRO stage 3). Load the file that the run wrote with all ranks (engine.save_16bit_model, GatheredParameters, "
        "save_checkpoint)"
    )
