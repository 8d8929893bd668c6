"""Several engines in one backward, as the two halves of a GAN: one after the other, in the order in which backward reaches them."""

from __future__ import annotations

from typing import Protocol


class Participant(Protocol):
    """The runtime of an engine."""

    def close(self) -> None:
        """Issues what is left of this backward's gathers and reductions, whether gradients have come or not; collective."""


# [Note: engines in one backward] A rank that skips blocks of one engine would join their gathers when backward ends, behind those of the
# engine that comes next; the other ranks issue them before. So an engine is closed when backward reaches another, which is when the
# gradient of the other's output is known: the same moment on every rank. At the end all are closed before any of them asks for a vote.
_begun: list[Participant] = []
_reached: list[Participant] = []


def begin(engine: Participant) -> None:
    """``engine`` takes part in the backward that runs."""
    if engine not in _begun:
        _begun.append(engine)


def reach(engine: Participant) -> None:
    """Backward comes to ``engine``'s module; collective, if it has been in another's before."""
    if _reached and _reached[-1] is engine:
        return
    for other in _reached:
        if other is not engine:
            other.close()
    if engine in _reached:
        _reached.remove(engine)
    _reached.append(engine)


def close_all() -> None:
    """Backward is over: closes those it has reached, in that order, then the others; collective."""
    for engine in (*_reached, *(other for other in _begun if other not in _reached)):
        engine.close()


def leave(engine: Participant) -> None:
    """``engine`` has ended its part; local."""
    for known in (_begun, _reached):
        if engine in known:
            known.remove(engine)
