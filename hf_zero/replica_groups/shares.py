"""Give numbered batches to replica groups, so that none is lost or taken twice when groups die and return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_zero.errors import StateError


class Shares:
    """The batches of a run by their numbers: each is taken, or given to one group, or given back, or not yet given.

    Every group has the same object: it changes only when the groups agree (``give`` at the begin of a step, ``take`` at its end), and a
    group that receives the state of another one receives this too. A group is given batches some steps ahead, because loaders read ahead.

    Attributes:
        next: The first number that was never given.
        back: Numbers that were given to groups that have died, in order.
        held: For each group the numbers that it was given and that are not taken, in the order in which its loader reads them.
    """

    def __init__(self) -> None:
        self.next = 0
        self.back: list[int] = []
        self.held: dict[int, list[int]] = {}

    def give(self, members: Sequence[int], ahead: int) -> None:
        """Take back the numbers of groups that take no part any more, and give each member new ones until it has ``ahead``.

        A group that died and is a member again keeps its numbers: none of them was taken.

        Args:
            members: Numbers of the groups that take part in the coming step, the same on all of them.
            ahead: Batches that each group is given in advance.
        """
        for gone in [group for group in self.held if group not in members]:
            self.back += self.held.pop(gone)
        self.back.sort()
        for group in members:
            self.held.setdefault(group, [])
        while short := [group for group in sorted(members) if len(self.held[group]) < ahead]:
            for group in short:
                number = self.back.pop(0) if self.back else self.next
                self.held[group].append(number)
                self.next = max(self.next, number + 1)

    def take(self, members: Sequence[int], count: int) -> dict[int, list[int]]:
        """Count the first ``count`` numbers of each member as taken by an optimizer step; return them by group.

        Raises:
            StateError: A member was given fewer.
        """
        short = [group for group in members if len(self.held.get(group, ())) < count]
        if short:
            raise StateError(f"the optimizer step took {count} batches of replica group {short[0]}, which was given fewer")
        taken = {group: self.held[group][:count] for group in members}
        for group in members:
            del self.held[group][:count]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"next": self.next, "back": list(self.back), "held": {str(group): list(own) for group, own in self.held.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.next, self.back = state["next"], list(state["back"])
        self.held = {int(group): list(own) for group, own in state["held"].items()}
