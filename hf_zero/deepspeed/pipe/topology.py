"""Map ranks to coordinates on named axes, with DeepSpeed's classes for pipelines."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from hf_zero.errors import ConfigError


class ProcessTopology:
    """A Cartesian grid of ranks. The last axis varies fastest: with axes (x, y) the rank after (x, y) is (x, y + 1).

    Args:
        axes: Names of the axes, outermost first.
        dims: Number of ranks on each axis.

    Attributes:
        axes: The argument ``axes``.
        dims: The argument ``dims``.
        ProcessCoord: Class of coordinates, a named tuple.

    Raises:
        ConfigError: A name occurs twice, or a size is missing or below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = [int(size) for size in dims]
        if len(self.axes) != len(self.dims) or len(set(self.axes)) != len(self.axes) or min(self.dims, default=1) < 1:
            raise ConfigError(
                f"ProcessTopology(axes={self.axes}, dims={self.dims}): each axis needs a distinct name and a size of at least 1"
            )
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # noqa: PYI024

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate with every axis: ``get_rank(pipe=1, data=0)``.

        Raises:
            ConfigError: An axis is missing (``filter_match`` takes fewer) or unknown, or the coordinate is outside of the grid.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ConfigError(f"get_rank({_shown(coord_kwargs)}): give each of the axes {self.axes} once, or use filter_match() for slices")
        rank = 0
        for axis, size in zip(self.axes, self.dims, strict=True):
            place = coord_kwargs[axis]
            if not 0 <= place < size:
                raise ConfigError(f"get_rank({_shown(coord_kwargs)}): positions on axis {axis} are 0 to {size - 1}")
            rank = rank * size + place
        return rank

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of ``rank``: a named tuple with its position on every axis.

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
        """Return the names of the axes, outermost first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks on ``axis``; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank_repr(self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-") -> str:
        """Return a text for file names: ``get_rank_repr(3)`` of pipe 2 x data 1 x model 2 is ``model_01``; empty if no axis is left."""
        omitted, coord = set(omit_axes), self.get_coord(rank)
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in self.axes if axis not in omitted)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks that differ only on ``axis``; an empty list if there is no such axis.

        For axes (pipe, data, model) of size 2, ``pipe`` gives ``[[0, 4], [1, 5], [2, 6], [3, 7]]``.
        """
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        return [
            self.filter_match(**dict(zip(others, places, strict=True)))
            for places in product(*(range(self.get_dim(name)) for name in others))
        ]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks whose coordinates match, in ascending order: ``filter_match(pipe=0, data=1)``.

        Raises:
            ConfigError: An axis is unknown.
        """
        unknown = set(filter_kwargs) - set(self.axes)
        if unknown:
            raise ConfigError(f"filter_match({_shown(filter_kwargs)}): the axes are {self.axes}")
        places = [[filter_kwargs[axis]] if axis in filter_kwargs else range(size) for axis, size in zip(self.axes, self.dims, strict=True)]
        return [
            self.get_rank(**dict(zip(self.axes, coord, strict=True)))
            for coord in product(*places)
            if all(0 <= place < size for place, size in zip(coord, self.dims, strict=True))
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks whose position on ``axis`` is ``idx``, in ascending order."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of all ranks."""
        return math.prod(self.dims)

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self.world_size():
            raise ConfigError(f"rank {rank} is not in the topology {self}, whose ranks are 0 to {self.world_size() - 1}")

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.dims, strict=True))


def _shown(places: dict[str, int]) -> str:
    return ", ".join(f"{axis}={place}" for axis, place in places.items())


class PipeDataParallelTopology(ProcessTopology):
    """A topology of pipeline stages and data-parallel ranks; the ranks of a stage are adjacent, because they exchange most data.

    Args:
        num_pp: Number of stages.
        num_dp: Number of data-parallel ranks of each stage.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A topology of pipeline stages, data-parallel ranks and, on the innermost axis, the ranks that split layers.

    Args:
        num_pp: Number of stages.
        num_mp: Number of ranks that split a layer.
        num_dp: Number of data-parallel ranks.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def default_topology(ranks: int) -> PipeDataParallelTopology:
    """Return a topology with about as many stages as data-parallel ranks: both get prime factors of ``ranks`` in turn."""
    factors = prime_factors(ranks)
    return PipeDataParallelTopology(math.prod(factors[::2]), math.prod(factors[1::2]))


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of ``number`` in ascending order; an empty list for 1.

    Raises:
        ConfigError: ``number`` is below 1.
    """
    if number < 1:
        raise ConfigError(f"prime_factors({number}): the number must be at least 1")
    found, factor = [], 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            found.append(factor)
            number //= factor
    return [*found, number] if number > 1 else found
