"""Report the exception or the exit that ends a rank to its launcher, and decide how much of it each rank prints.

[Note: the first failure] torchrun and accelerate report the failure that they take for the first: the one with the earliest time, in whole
seconds, among the files that ``TORCHELASTIC_ERROR_FILE`` names. A rank that dies breaks the network connections of its neighbours, which
fail within the same second. So an error that only says that other ranks are gone gets a later time, and is printed without its
traceback. Where all ranks end with the same exception, the first rank of each node prints it: the others find its file beside their own,
and print nothing. ``launcher_report`` describes what the launcher itself prints at the end.

[Note: exits] Python calls no hook for a ``SystemExit`` that ends a process, and has cleared it before exit handlers run. So ``sys.exit``,
``exit`` and ``quit`` keep the reason and the line of the last call of the main thread, and an exit handler reports them. A script that
catches the ``SystemExit`` and goes on ends in another way, and that way counts: a report by the hook, or the status 0, which makes the
launcher ignore the file. A plain ``raise SystemExit`` is not reported.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from hf_zero.errors import CollectiveError, ConfigError, HfZeroError, UnsupportedError
from hf_zero.observe import global_rank, logger, long_wait
from hf_zero.system import own_files
from hf_zero.system.failure import FOLLOWS, INTERRUPTED, OTHER, SETTINGS
from hf_zero.system.stacks import is_of_the_script
from hf_zero.system.text_file import SMALL_BYTES, read_text

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_LATER_SECONDS = 10  # longer than a launcher takes to notice a rank's death
_PATIENCE_SECONDS = 2.0
_SETTINGS_SECONDS = 15.0  # ranks read their settings before they meet, while another rank may still import
_PRINTING_SECONDS = 0.2  # a launcher ends all ranks soon after one has ended
MARK = "hf_zero"
"""Key of the entries that this module has written, with one of the kinds of ``failure``."""
_tells = False
_exits: _Exits | None = None


def report_to_launcher() -> None:
    """Report the exception or the exit that ends this process to the launcher; the former hook still prints. Only the first call has an
    effect.
    """
    global _tells, _exits
    if not _tells:
        _tells = True
        sys.excepthook = _Hook(sys.excepthook)
        if os.environ.get(_VARIABLE):
            _exits = _Exits()
            _exits.listen()


def ends_with_a_status() -> bool:
    """Return whether the last call of ``sys.exit`` under a launcher had a reason or a status other than 0; for exit handlers."""
    return _exits is not None and _exits.last is not None


def leave(text: str, where: str = "", seconds: float | None = None, kind: str = OTHER) -> None:
    """Write the reason for this process's end to the launcher's file, unless it has one; do nothing without a launcher that reads it.

    Args:
        text: The reason; ranks compare it.
        where: Lines to put before it in the launcher's report.
        seconds: Time of the failure, since the epoch; by default now.
        kind: Kind of the failure, which selects the launcher's report.
    """
    name = os.environ.get(_VARIABLE, "")
    if not name or os.path.exists(name):
        return
    extra = {"py_callstack": f"{where}{text}", "timestamp": str(int(time.time() if seconds is None else seconds)), MARK: kind}
    try:
        own_files.write_text(Path(name), json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError as error:
        logger.warning("the error of this rank could not be reported to the launcher: %s", error)


class _Hook:
    """Replacement of ``sys.excepthook``.

    Args:
        former: The former hook.
    """

    def __init__(self, former: Callable[..., Any]) -> None:
        self._former = former

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report the reason to the launcher, and print the parts that no other rank has printed."""
        frames = traceback.extract_tb(trace)
        own = next((frame for frame in reversed(frames) if is_of_the_script(frame.filename)), None)
        if isinstance(error, KeyboardInterrupt):
            place = f" in {own.filename}, line {own.lineno}" if own is not None else ""
            text = f"interrupted{place}"
            leave(text, kind=INTERRUPTED)
            if not _has_first():
                print(f"[hf_zero] rank {global_rank()}: {text}", file=sys.stderr, flush=True)
            return
        text, follows, now = f"{kind.__name__}: {error}", _follows(error), time.time()
        if follows and not isinstance(error, HfZeroError):  # a collective of the script
            reported = long_wait()
            text += f".{reported}" if reported else ""
        of_settings = isinstance(error, (ConfigError, UnsupportedError))
        # Lines in the script, and the line that raised; lines of hf_zero where a key is looked up do not help.
        shown = [frame for frame in (own, None if of_settings else frames[-1] if frames else None) if frame is not None]
        where = "".join(traceback.format_list(shown[:1] if shown[1:] == shown[:1] else shown))
        same = text if isinstance(error, HfZeroError) else f"{where}{text}"  # for hf_zero's errors the texts are enough
        if not follows and _is_reported_by_first(same, _SETTINGS_SECONDS if of_settings else _PATIENCE_SECONDS):
            leave(f"rank {global_rank()} ends with the same {kind.__name__} as the first rank here", seconds=now + _LATER_SECONDS)
            return
        leave(text, where, now + _LATER_SECONDS * follows, SETTINGS if of_settings else FOLLOWS if follows else OTHER)
        if follows and _report_of_first().get(MARK) == INTERRUPTED:
            return
        if of_settings or follows:
            at = f"{own.filename}:{own.lineno}: {own.line}\n" if own is not None else ""
            name = f"{kind.__module__}.{text}" if kind.__module__ != "builtins" else text
            print(f"{at}{name}", file=sys.stderr, flush=True)
            return
        self._former(kind, error, trace)


class _Exits:
    """Record of the calls that ask this process to end.

    Attributes:
        last: Reason, lines before it, and seconds since the epoch of the last call; None if that has the status 0, or there is none.
    """

    def __init__(self) -> None:
        self.last: tuple[str, str, float] | None = None

    def listen(self) -> None:
        """Keep each exit from now on, and report the last one when the process ends."""
        sys.exit = self._kept(sys.exit)
        site = sys.modules.get("_sitebuiltins")  # its class makes `exit` and `quit`; missing under `python -S`
        if site is not None:
            site.Quitter.__call__ = self._kept(site.Quitter.__call__)
        atexit.register(self._at_end)

    def _kept(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method``, whose last argument is the status, with a note of each call."""

        @functools.wraps(method)
        def leaving(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self._keep([*args, *kwargs.values()][-1:])
            return method(*args, **kwargs)

        return leaving

    def _keep(self, status: list[Any]) -> None:
        self.last = None
        if status and isinstance(status[0], (str, int, BaseException)) and status[0]:
            frames = [frame for frame in traceback.extract_stack() if is_of_the_script(frame.filename)]
            text = f"exit status {status[0]}" if isinstance(status[0], int) else str(status[0])
            self.last = f"SystemExit: {text}", "".join(traceback.format_list(frames[-1:])), time.time()

    def _at_end(self) -> None:
        if self.last is not None:
            leave(*self.last)


def _follows(error: BaseException | None) -> bool:
    """Return whether an error only says that another rank has gone."""
    while error is not None:
        if isinstance(error, CollectiveError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_first() -> bool:
    """Return whether another rank is the first that this node's launcher has started, which prints for all."""
    name, place = os.environ.get(_VARIABLE, ""), os.environ.get("LOCAL_RANK", "0")
    return bool(name) and place != "0" and Path(name).parent.name == place


def _is_reported_by_first(text: str, seconds: float) -> bool:
    """Return whether the report of local rank 0 ends with ``text``; wait up to ``seconds`` for the report."""
    if not _has_first():
        return False
    deadline = time.monotonic() + seconds
    while not (report := _report_of_first()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    time.sleep(_PRINTING_SECONDS)
    return str(report.get("py_callstack")).endswith(text)


def _report_of_first() -> dict[str, Any]:
    """Return the report of the first rank of this node; empty if there is none, or if this is the first rank."""
    path = Path(os.environ.get(_VARIABLE, ""))
    first = path.parent.parent / "0" / path.name
    if not _has_first() or not first.is_file():
        return {}
    try:
        return dict(json.loads(read_text(first, SMALL_BYTES))["message"]["extraInfo"])
    except (OSError, ValueError, LookupError, TypeError):
        return {"": ""}  # the file belongs to the launcher, or to a script that reports by itself
