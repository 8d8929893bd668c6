"""Ranks as coordinates on named axes, as scripts of pipelines ask for them."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from hf_zero.errors import ConfigError


class ProcessTopology:
    """A Cartesian grid of ranks. The last axis runs fastest: in axes (x, y) the neighbour of rank (x, y) is (x, y + 1).

    Args:
        axes: Their names, from the outside in.
        dims: How many ranks each has.

    Attributes:
        axes: As given.
        dims: As given.
        ProcessCoord: The named tuple that coordinates are.

    Raises:
        ConfigError: Names are doubled, or a size is missing or below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = [int(size) for size in dims]
        if len(self.axes) != len(self.dims) or len(set(self.axes)) != len(self.axes) or min(self.dims, default=1) < 1:
            raise ConfigError(
                f"ProcessTopology(axes={self.axes}, dims={self.dims}): each axis has a name of its own and a size of at least 1"
            )
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # noqa: PYI024

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate, which names every axis: ``get_rank(pipe=1, data=0)``.

        Raises:
            ConfigError: An axis is missing or unknown (``filter_match`` takes a part), or there is no rank at it.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ConfigError(
                f"get_rank({_shown(coord_kwargs)}): the axes are {self.axes}, each of them once; use filter_match() for slices"
            )
        rank = 0
        for axis, size in zip(self.axes, self.dims, strict=True):
            place = coord_kwargs[axis]
            if not 0 <= place < size:
                raise ConfigError(f"get_rank({_shown(coord_kwargs)}): axis {axis} goes from 0 to {size - 1}")
            rank = rank * size + place
        return rank

    def get_coord(self, rank: int) -> Any:
        """Return where ``rank`` is: a named tuple with its place on every axis.

        Raises:
            ConfigError: The grid has no such rank.
        """
        self._require(rank)
        places = []
        for size in reversed(self.dims):
            rank, place = divmod(rank, size)
            places.append(place)
        return self.ProcessCoord(*reversed(places))

    def get_axis_names(self) -> list[str]:
        """Return names of the axes, from the outside in."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks of ``axis``; 0 where there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank_repr(self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-") -> str:
        """Return a text for file names: ``get_rank_repr(3)`` of pipe 2 x data 1 x model 2 is ``model_01``; empty if no axis is left."""
        omitted, coord = set(omit_axes), self.get_coord(rank)
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in self.axes if axis not in omitted)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lines of ranks along ``axis``, one for each place on the others; none where there is no such axis.

        Axes (pipe, data, model) of 2 each along pipe: ``[[0, 4], [1, 5], [2, 6], [3, 7]]``.
        """
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        return [
            self.filter_match(**dict(zip(others, places, strict=True)))
            for places in product(*(range(self.get_dim(name)) for name in others))
        ]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return, in rising order, the ranks whose coordinates match: ``filter_match(pipe=0, data=1)``.

        Raises:
            ConfigError: There is no such axis.
        """
        unknown = set(filter_kwargs) - set(self.axes)
        if unknown:
            raise ConfigError(f"filter_match({_shown(filter_kwargs)}): there are the axes {self.axes}")
        places = [[filter_kwargs[axis]] if axis in filter_kwargs else range(size) for axis, size in zip(self.axes, self.dims, strict=True)]
        return [
            self.get_rank(**dict(zip(self.axes, coord, strict=True)))
            for coord in product(*places)
            if all(0 <= place < size for place, size in zip(coord, self.dims, strict=True))
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return, in rising order, the ranks whose place on ``axis`` is ``idx``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of all ranks."""
        return math.prod(self.dims)

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self.world_size():
            raise ConfigError(f"rank {rank} is not in the topology {self}, whose ranks go from 0 to {self.world_size() - 1}")

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.dims, strict=True))


def _shown(places: dict[str, int]) -> str:
    return ", ".join(f"{axis}={place}" for axis, place in places.items())


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and the ranks that hold the same one: those are adjacent, since they exchange most.

    Args:
        num_pp: Stages.
        num_dp: Ranks of each stage.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, data-parallel ranks of a stage, and in the innermost axis the ranks that divide layers between them.

    Args:
        num_pp: Stages.
        num_mp: Ranks that divide layers.
        num_dp: Data-parallel ranks.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def default_topology(ranks: int) -> PipeDataParallelTopology:
    """Return a topology with about as many stages as data-parallel ranks: the prime factors of ``ranks`` go to both in turn, as in
    DeepSpeed.
    """
    factors = prime_factors(ranks)
    return PipeDataParallelTopology(math.prod(factors[::2]), math.prod(factors[1::2]))


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of ``number``, rising; none for 1.

    Raises:
        ConfigError: It is below 1.
    """
    if number < 1:
        raise ConfigError(f"prime_factors({number}): a number from 1 on is allowed")
    found, factor = [], 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            found.append(factor)
            number //= factor
    return [*found, number] if number > 1 else found
