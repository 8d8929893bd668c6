"""Show the progress of a plan or a search on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

_LINE_SECONDS = 10.0  # between two lines, where no bar is shown
Show = Callable[[str, float | None], None]
"""Function that shows a text and the progress from 0 to 1; None if the progress is unknown."""


@contextmanager
def shown(title: str, text: str) -> Iterator[Show]:
    """Show a progress bar inside the ``with`` block if stderr is a terminal; otherwise print a line to it every ``_LINE_SECONDS``.

    Args:
        title: The command, with which each line begins.
        text: Text until the first call of the yielded function.

    Yields:
        Function that changes the text and the progress.
    """
    with _bar(text) if sys.stderr.isatty() else _lines(title, text) as show:
        yield show


@contextmanager
def _bar(text: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda text, done: progress.update(task, description=text, completed=done, total=None if done is None else 1.0)


@contextmanager
def _lines(title: str, text: str) -> Iterator[Show]:
    texts, began, over = [text], time.monotonic(), Event()

    def tell() -> None:
        while not over.wait(_LINE_SECONDS):
            with suppress(OSError, ValueError):  # nobody reads stderr any more
                print(f"{title}, {time.monotonic() - began:.0f} s: {texts[-1]}", file=sys.stderr, flush=True)

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield lambda text, _: texts.append(text)
    finally:
        over.set()
        thread.join()


class SearchBar:
    """Progress of a search. The number of plans of a part is unknown, so each plan fills a quarter of the rest of the part.

    Args:
        show: Function that shows a text and the progress.
    """

    def __init__(self, show: Show) -> None:
        self._show, self._text, self._done, self._next, self._plans = show, "", 0.0, 0.0, 0

    def begin(self, text: str, done: float, after: float) -> None:
        """Begin the part ``text`` of the search, from progress ``done`` to ``after`` (0 to 1); the bar never goes back."""
        self._text, self._done, self._next = text, max(done, self._done), after
        self._say()

    def advance(self) -> None:
        """Advance the bar after a plan."""
        self._plans += 1
        self._done += max(0.0, self._next - self._done) / 4
        self._say()

    def _say(self) -> None:
        self._show(f"{self._text}, {self._plans} plans" if self._plans else self._text, self._done)
