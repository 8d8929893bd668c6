"""Which tokens of a sequence a rank holds where context parallelism divides it, and the two ways between slices and whole sequences.

[Note: head and tail] In causal attention a token attends to those before it, so the last part of a sequence costs most. Of 2N equal parts
the rank with number r of N holds part r and part 2N-1-r: the two together cost the same on every rank. With sequence parallelism inside,
the ranks of each place divide what that place holds, in its order, and attention sees it whole.
"""

from __future__ import annotations

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.sequence_parallel.exchange import join_slices


class Layout:
    """Division of sequences over the ranks of one group.

    Attributes:
        collectives: The group: ``places * inside`` ranks.
        places: Ranks, or groups of ranks that trade heads, with other tokens each; context parallelism.
        inside: Ranks of one place; sequence parallelism.
        place: This rank's place.
    """

    def __init__(self, collectives: Collectives, inside: int = 1) -> None:
        self.collectives = collectives
        self.inside = inside
        self.places = collectives.world // self.inside
        self.place, self._turn = divmod(collectives.rank, self.inside)

    @property
    def multiple(self) -> int:
        """Return the number that a sequence's length has to be a multiple of."""
        return 2 * self.places * self.inside

    def parts(self, length: int, place: int | None = None) -> list[tuple[int, int]]:
        """Return the two runs of tokens of a place, as (first, end).

        Args:
            length: Tokens of a whole sequence; a multiple of ``multiple``.
            place: The place; None is this rank's.
        """
        place, width = self.place if place is None else place, length // (2 * self.places)
        return [(first * width, (first + 1) * width) for first in (place, 2 * self.places - 1 - place)]

    def tokens_of_place(self, length: int, place: int | None = None) -> torch.Tensor:
        """Return the numbers of the tokens that a place holds, (length / places,); arguments as ``parts``."""
        return torch.cat([torch.arange(first, end) for first, end in self.parts(length, place)])

    def tokens(self, length: int) -> torch.Tensor:
        """Return the numbers of this rank's tokens among the ``length`` of whole sequences, (length / ranks,)."""
        return self.tokens_of_place(length).chunk(self.inside)[self._turn]

    def in_order(self, by_place: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a tensor whose dimension ``dim`` has the tokens of all places, one place after the other, in the order of sequences."""
        halves = by_place.unflatten(dim, (self.places, 2, -1))
        head, tail = halves.select(dim + 1, 0), halves.select(dim + 1, 1).flip(dim)
        return torch.cat([head, tail], dim).flatten(dim, dim + 1)

    def by_place(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the inverse of ``in_order``."""
        head, tail = whole.unflatten(dim, (2, self.places, -1)).unbind(dim)
        return torch.stack([head, tail.flip(dim)], dim + 1).flatten(dim, dim + 2)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor that has whole sequences along ``dim``."""
        return whole.index_select(dim, self.tokens(whole.shape[dim]).to(whole.device))

    def join(self, part: torch.Tensor, dim: int, what: str) -> torch.Tensor:
        """Return the tensor of whole sequences of which every rank holds its part along ``dim``, without gradient; collective.

        Args:
            part: This rank's part, of one shape on all ranks.
            dim: The sequence's dimension.
            what: Name for labels.
        """
        dim %= part.dim()
        return self.in_order(join_slices(self.collectives, part, dim, what), dim)
