"""Print the cause when the ranks of torchrun or accelerate have ended, instead of the launcher's own traceback.

Both launchers call ``torch.distributed.launcher.api.launch_agent`` in the process that starts ranks, which is replaced here. Nothing
changes for code that catches its exceptions, for the exit status, and for ranks of other libraries: the report replaces the traceback only
where an exception ends the process and hf_zero wrote the files of the ranks (``last_words``). On a node of `hf-zero launch` over ssh the
report goes to the launcher, which prints the cause of all nodes once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from hf_zero.system import launcher_folders
from hf_zero.system.failure import INTERRUPTED, PIPE, describe, is_handed_over
from hf_zero.system.last_words import MARK
from hf_zero.system.text_file import SMALL_BYTES, read_text

_FILES = "*/attempt_*/*/error.json"  # below torch's folder of logs
_MOST_LINES = 15  # lines of a cause, so that report and launcher's lines fit in twenty


def launch_agent(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch's function that starts the ranks of this machine and waits for them; report the cause of an exception, and remove the
    snapshots of the ranks.

    Args:
        method: The function itself.
        *args: Its arguments, of which the first is the launcher's configuration.
        **kwargs: Its keyword arguments.
    """
    config, start = (args[0] if args else kwargs.get("config")), time.time()
    try:
        return method(*args, **kwargs)
    except BaseException as error:
        sys.excepthook = _Report(sys.excepthook, error, getattr(getattr(config, "logs_specs", None), "root_log_dir", None), start)
        raise
    finally:
        launcher_folders.remove_own()


class _Report:
    """Replacement of a launcher's ``sys.excepthook``.

    Args:
        former: The former hook.
        error: The exception to report.
        folder: Folder of the ranks' files; None if unknown.
        start: Earliest time of a file of this run, in seconds since the epoch.
    """

    def __init__(self, former: Callable[..., Any], error: BaseException, folder: Any, start: float) -> None:
        self._former, self._error, self._folder, self._start = former, error, folder, start

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the cause, or hand it over, if the ranks have reported one; otherwise call the former hook."""
        failure = self._failure() if error is self._error else None
        if failure is None:
            self._former(kind, error, trace)
        elif not is_handed_over(failure) and failure["kind"] != INTERRUPTED:  # a rank has printed that
            print(describe(failure), file=sys.stderr, flush=True)

    def _failure(self) -> dict[str, Any] | None:
        """Return the failure as a JSON object; None if hf_zero wrote no report."""
        name = type(self._error).__name__
        if name == "SignalException":  # on a node over ssh the launcher has sent it, and tells the reason
            told_by_rank = any(kind == INTERRUPTED for kind in self._kinds())
            return {"kind": INTERRUPTED} if told_by_rank or os.environ.get(PIPE) else None
        if name != "ChildFailedError":
            return None
        rank, failure = self._error.get_first_failure()  # type: ignore[attr-defined]
        message = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
        told = message.get("extraInfo") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(told, dict) or MARK not in told:
            return None
        cause = str(told.get("py_callstack", "")).splitlines()
        left_out = [f"  ... {len(cause) - _MOST_LINES} more lines above"] if len(cause) > _MOST_LINES else []
        return {
            "kind": told[MARK],
            "rank": rank,
            "status": failure.exitcode,
            "error": str(message["message"]).partition(":")[0],
            "cause": [*cause[:_MOST_LINES], *left_out],
        }

    def _kinds(self) -> Iterator[str]:
        """Yield the kinds of failure that hf_zero has recorded in the files of the ranks of this run."""
        for path in Path(self._folder).glob(_FILES) if self._folder else ():
            try:
                if path.stat().st_mtime >= self._start - 1:
                    yield str(json.loads(read_text(path, SMALL_BYTES))["message"]["extraInfo"].get(MARK, ""))
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                continue  # file of another library
