"""Exception classes. Every message names the subject (key, parameter, unit, file), the value found, what is allowed and what to do."""

from __future__ import annotations


class HfZeroError(Exception):
    """Base of every error that hf_zero raises on purpose."""


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
