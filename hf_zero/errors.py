"""Exception classes. Every message names the subject (key, parameter, unit, file), the value found, what is allowed and what to do."""

from __future__ import annotations

import re
from typing import Any

# Control characters but newline and tab, marks that change the direction of a text, separators of lines, and halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb]")


def printable(text: str) -> str:
    r"""``text`` with what a terminal would obey written out, ``\x1b`` for an escape: names in files of others may hold anything."""
    return text if text.isascii() and text.isprintable() else _UNPRINTABLE.sub(_written_out, text)


class PrintableStream:
    """A stream of text that terminals obey nothing of: ``printable`` of all that is written; everything else as the stream has it.

    Args:
        stream: Where the text goes.

    Attributes:
        terminal: The stream itself, for code that writes colours of its own.
    """

    def __init__(self, stream: Any) -> None:
        self.terminal = stream

    def write(self, text: str) -> int:
        """Writes ``text``; returns how many characters that is."""
        self.terminal.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def _written_out(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


class HfZeroError(Exception):
    """Base of every error that hf_zero raises on purpose. Its text can be printed, whatever it names."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(HfZeroError, ValueError, AssertionError):
    """A value of the configuration, or an argument, is wrong. Names the dotted key, the value, what is allowed and the nearest known key.

    An ``AssertionError`` too, like ``StateError``: scripts that were written for engines which assert such things catch that.
    """


class CollectiveError(HfZeroError, RuntimeError):
    """A collective failed or timed out. Names the phase, the unit, the rank and the events that came before."""


class UnsupportedError(HfZeroError, NotImplementedError):
    """Something that exists elsewhere is not provided here. Names it and what to use instead."""


class CheckpointError(HfZeroError, RuntimeError):
    """A checkpoint cannot be written or read. Names the file, what was expected and what was found."""


class StateError(HfZeroError, RuntimeError, AssertionError):
    """A call came at a moment when it cannot be served (a released parameter, a destroyed engine, a step inside no_sync)."""


class HostMemoryError(HfZeroError, MemoryError):
    """Host memory is too small for what is to be offloaded. Names the bytes needed and free, whose limit it is, and what to do."""


class OffloadError(HfZeroError, OSError):
    """A file that holds offloaded state cannot be made, read or written. Names the path, the bytes and what the system said."""


PREEMPTED_STATUS = 75
"""Exit status of every rank that has saved because a signal asked it to end: that of BSD's sysexits for "try again later"."""


class Preempted(SystemExit):
    """The run ends with ``PREEMPTED_STATUS``: a signal asked for it, and all is saved. No error, so ``except Exception`` lets it by."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED_STATUS)
