"""What a rank that ends with an exception leaves to its launcher, and how much of it the ranks print.

[Note: the first failure] torchrun and accelerate end with the failure that they take for the first: the one with the earliest time among
the files that ``TORCHELASTIC_ERROR_FILE`` names, in whole seconds. A rank that dies tears the network from under its neighbours, which fail
within the same second, so an error that only says that others are gone is dated later. Where all ranks end with one and the same error, the
first of each node prints it: the others find its file beside their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from hf_zero.errors import CollectiveError, ConfigError, HfZeroError, UnsupportedError
from hf_zero.observe import global_rank, logger
from hf_zero.system import own_files
from hf_zero.system.stacks import is_of_the_script
from hf_zero.system.text_file import SMALL_BYTES, read_text

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_LATER_SECONDS = 10  # more than what lies between a rank's death and the moment at which its launcher looks
_PATIENCE_SECONDS = 2.0
_PRINTING_SECONDS = 0.2  # a launcher ends all ranks as soon as one has ended
_tells = False


def tell_launcher() -> None:
    """Has an exception that ends this process tell the launcher why; the hook that is there still prints. Only the first call does so."""
    global _tells
    if not _tells:
        _tells = True
        sys.excepthook = _Hook(sys.excepthook)


def leave(text: str, where: str = "", seconds: float | None = None) -> None:
    """Writes why this process ends where its launcher looks, unless somebody has; does nothing without a launcher that does.

    Args:
        text: The reason, which is compared over ranks.
        where: Lines in front of it for the launcher's report.
        seconds: When it happened, since the epoch; now.
    """
    name = os.environ.get(_VARIABLE, "")
    if not name or os.path.exists(name):
        return
    extra = {"py_callstack": f"{where}{text}", "timestamp": str(int(time.time() if seconds is None else seconds))}
    try:
        own_files.write_text(Path(name), json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError as error:
        logger.warning("the launcher cannot be told why this rank ends: %s", error)


class _Hook:
    """Stands in for ``sys.excepthook``.

    Args:
        former: The one that was there.
    """

    def __init__(self, former: Callable[..., Any]) -> None:
        self._former = former

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Leaves the reason, and prints it as far as it says anything new."""
        frames = traceback.extract_tb(trace)
        own = next((frame for frame in reversed(frames) if is_of_the_script(frame.filename)), None)
        if isinstance(error, KeyboardInterrupt):
            place = f" in {own.filename}, line {own.lineno}" if own is not None else ""
            print(f"[hf_zero] rank {global_rank()}: interrupted{place}", file=sys.stderr, flush=True)
            return
        text, follows, now = f"{kind.__name__}: {error}", _follows(error), time.time()
        if isinstance(error, HfZeroError) and not follows and _is_told_by_first(text):
            same = f"rank {global_rank()} ends with the same {kind.__name__} as the first rank here"
            leave(same, seconds=now + _LATER_SECONDS)
            print(f"[hf_zero] {same}", file=sys.stderr, flush=True)
            return
        # In the script, and where it was raised; where in this package a key is looked at tells nothing.
        of_settings = isinstance(error, (ConfigError, UnsupportedError))
        shown = [frame for frame in (own, None if of_settings else frames[-1] if frames else None) if frame is not None]
        leave(text, "".join(traceback.format_list(shown[:1] if shown[1:] == shown[:1] else shown)), now + _LATER_SECONDS * follows)
        if of_settings:
            at = f"{own.filename}:{own.lineno}: {own.line}\n" if own is not None else ""
            print(f"{at}{kind.__module__}.{text}", file=sys.stderr, flush=True)
            return
        self._former(kind, error, trace)


def _follows(error: BaseException | None) -> bool:
    """Whether an error only says that another rank is gone."""
    while error is not None:
        if isinstance(error, CollectiveError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_told_by_first(text: str) -> bool:
    """Whether local rank 0 ends with the same error; waits a moment for it."""
    name, place = os.environ.get(_VARIABLE, ""), os.environ.get("LOCAL_RANK", "0")
    path = Path(name)
    if not name or place == "0" or path.parent.name != place:
        return False
    first, deadline = path.parent.parent / "0" / path.name, time.monotonic() + _PATIENCE_SECONDS
    while not first.is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    time.sleep(_PRINTING_SECONDS)
    try:
        return bool(json.loads(read_text(first, SMALL_BYTES))["message"]["message"] == text)
    except (OSError, ValueError, LookupError, TypeError):
        return False  # another's file: of the launcher, or of a script that tells by itself
