"""Who holds a unit unsharded, so that nobody reshards it."""

from __future__ import annotations


class Pins:
    """One entry for each holder, the innermost last; false when there is none."""

    def __init__(self) -> None:
        self._modifier_ranks: list[int | None] = []

    def __bool__(self) -> bool:
        return bool(self._modifier_ranks)

    def add(self, modifier_rank: int | None) -> None:
        """Adds a holder; before it lets go it broadcasts the changes of ``modifier_rank``, unless that is None."""
        self._modifier_ranks.append(modifier_rank)

    def remove(self) -> None:
        """Removes the innermost holder."""
        self._modifier_ranks.pop()

    @property
    def modifier_of_outer(self) -> int | None:
        """The modifier rank of a holder outside the innermost one, if any has one."""
        return next((rank for rank in self._modifier_ranks[:-1] if rank is not None), None)
