"""Describe where the threads of this process are: file, line and function, without values."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_OWN = str(Path(__file__).parents[1])
_NOT_THE_SCRIPT = (os.path.dirname(os.__file__), _OWN, "<frozen", "<string>")  # dataclasses generate methods in "<string>"
_COLLECTS_INSIDE = sys.version_info < (3, 12)
_COMMANDS = os.path.realpath(os.path.dirname(sys.executable))


def is_of_the_script(filename: str) -> bool:
    """Return whether ``filename`` belongs neither to Python, nor to an installed library or its commands, nor to hf_zero."""
    if filename.startswith(_NOT_THE_SCRIPT) or f"{os.sep}site-packages{os.sep}" in filename:
        return False
    return filename.endswith(".py") or os.path.realpath(os.path.dirname(filename)) != _COMMANDS


@contextmanager
def threads_of_others() -> Iterator[list[FrameType]]:
    """Give the innermost frame of each thread except the caller's, the main thread's first; frames are read in the context only.

    [Note: frames and garbage] Before 3.12, Python can collect garbage wherever it makes an object, and it makes frames when they are asked
    for. A destructor, such as that of a tensor, may then let the observed thread run on: its frames are gone when the call continues, which
    corrupts memory. If a thread ends meanwhile, the process can stop forever (python/cpython#106883). So the context collects nothing. The
    sleep gives this thread a new share of the processor, so that hardly any other thread runs until the collector is on again.
    """
    collects = _COLLECTS_INSIDE and gc.isenabled()
    if collects:
        time.sleep(0)
        gc.disable()
    try:
        frames, main = sys._current_frames(), threading.main_thread().ident
        frames.pop(threading.get_ident(), None)
        yield [frames[ident] for ident in sorted(frames, key=lambda ident: ident != main)]
    finally:
        if collects:
            gc.enable()


def outer_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield ``frame`` and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def moment(frame: FrameType) -> tuple[tuple[int, int], ...]:
    """Return a thread's instruction and those of its callers: equal at two times if the thread has not moved, or has come back."""
    return tuple((id(one.f_code), one.f_lasti) for one in outer_frames(frame))


def values_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of ``frame``, by name."""
    return dict(frame.f_locals)


def line_of(frame: FrameType) -> str:
    """Return the text of the line at which ``frame`` is; "" if its file cannot be read."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()


def place(frame: FrameType) -> str:
    """Return a thread's innermost line, and the script's line if that is another, such as ``train/data.py:12 in read``."""
    own = next((one for one in outer_frames(frame) if is_of_the_script(one.f_code.co_filename)), None)
    if own is None or own is frame:
        return _words(frame)
    return f"{_words(own)} (in {_words(frame)})"


def _words(frame: FrameType) -> str:
    name = os.sep.join(frame.f_code.co_filename.split(os.sep)[-2:])
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
