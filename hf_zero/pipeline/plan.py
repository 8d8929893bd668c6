"""Define the plan of a pipeline: the stage of each call, the tensors that cross the borders, and the holders of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class ItemCall:
    """One call, in a forward, of a module that one stage runs as a whole: an item.

    [Note: items] Items are the repeated blocks of a model and, outside of them, the outermost modules with parameters that hold no block
    (embeddings, norms, heads), and dropout without a block around it. All else of a forward is glue: it has no parameters, and every stage
    runs it.

    Attributes:
        path: Dotted name of the module.
        nth: Which call of this module it is in a forward, from 0.
        stage: The stage that runs the call.
    """

    path: str
    nth: int
    stage: int


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses a border between two stages.

    Attributes:
        call: Position in ``PipelinePlan.calls`` of the call that returns the tensor.
        leaf: Position among the tensors of that result, in the order of ``trees.tensors_in``.
    """

    call: int
    leaf: int


@dataclass(frozen=True)
class PipelinePlan:
    """Division of a model over the stages of a pipeline.

    Attributes:
        stages: Number of stages.
        calls: All calls of items in the order of a forward; their stages never decrease.
        crossings: Per border (stage s to s + 1) the tensors that cross it, in the order of the results: results of calls of the stages
            up to s that calls of later stages, or the model's own result, depend on.
        holders: Name of each parameter -> the stages whose calls, or glue between these, read it, ascending; several for tied ones.
        changed: Results that glue, or a later call, changes in place: each stage gets a copy, because every stage runs the change.
    """

    stages: int
    calls: tuple[ItemCall, ...]
    crossings: tuple[tuple[Crossing, ...], ...]
    holders: Mapping[str, tuple[int, ...]]
    changed: tuple[Crossing, ...] = ()

    def span(self, stage: int) -> range:
        """Return the positions in ``calls`` of the calls that ``stage`` runs."""
        return self._spans[stage]

    @cached_property
    def _spans(self) -> list[range]:
        found = [[place for place, call in enumerate(self.calls) if call.stage == stage] for stage in range(self.stages)]
        return [range(mine[0], mine[-1] + 1) if mine else range(0) for mine in found]

    @cached_property
    def crossings_by_call(self) -> list[dict[int, list[Crossing]]]:
        """Return, for each border, the tensors that cross it, by position of the call that returns them; the entry after the last stage is
        empty.
        """
        return [_by_call(border) for border in (*self.crossings, ())]

    @cached_property
    def changed_by_call(self) -> dict[int, set[int]]:
        """Return the positions of the ``changed`` tensors in the result of each call, by position of the call."""
        return {call: {crossing.leaf for crossing in found} for call, found in _by_call(self.changed).items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PipelinePlan:
        """Return the plan from the result of ``to_dict``, also after JSON."""
        return cls(
            content["stages"],
            tuple(ItemCall(**call) for call in content["calls"]),
            tuple(tuple(Crossing(**crossing) for crossing in border) for border in content["crossings"]),
            {name: tuple(stages) for name, stages in content["holders"].items()},
            tuple(Crossing(**crossing) for crossing in content["changed"]),
        )


def _by_call(crossings: Iterable[Crossing]) -> dict[int, list[Crossing]]:
    found: dict[int, list[Crossing]] = {}
    for crossing in crossings:
        found.setdefault(crossing.call, []).append(crossing)
    return found


@dataclass(frozen=True)
class Placement:
    """Assignment of stages to the ranks of a pipeline: one stage each, or several in rounds over the ranks.

    Attributes:
        stages: Number of stages.
        ranks: Number of ranks of the pipeline.
        folded: The second round runs over the ranks in reverse (zero-bubble schedules in the shape of a V); else it starts at rank 0 again.
    """

    stages: int
    ranks: int
    folded: bool = False

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs ``stage``."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.folded and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that ``rank`` runs, ascending."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that run any of ``stages``, ascending."""
        return tuple(sorted({self.rank_of(stage) for stage in stages}))
