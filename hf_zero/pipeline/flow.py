"""What the calls of a model's items are made of: the results of earlier calls, parameters, random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_zero.pipeline.plan import Crossing


@dataclass(frozen=True)
class Read:
    """A parameter that glue reads, by its first name."""

    parameter: str


@dataclass(frozen=True)
class Kept:
    """A tensor made or changed inside a call that is not among its results: the module keeps it somewhere for others.

    Attributes:
        call: Position of the call.
        how: The operation that made it.
    """

    call: int
    how: str


@dataclass(frozen=True)
class Drawn:
    """Random numbers that glue draws: every stage would draw others.

    Attributes:
        number: Which of the operations that draw.
        how: The operation.
        place: Dotted name of the module whose code runs it.
    """

    number: int
    how: str
    place: str


Source = Crossing | Read | Kept | Drawn
Sources = frozenset[Source]


@dataclass
class FlowCall:
    """One call of an item.

    Attributes:
        path: Dotted name of the module.
        nth: Which call of this module it is, from 0.
        kind: Name of the module's class.
        block: The module is one of the model's repeated blocks.
        parameters: First names of the module's own ones.
        needs: What it is made of through glue alone.
        operations: Floating point operations of its products.
    """

    path: str
    nth: int
    kind: str
    block: bool
    parameters: frozenset[str]
    needs: Sources = frozenset()
    operations: int = 0

    def __str__(self) -> str:
        return f"{self.path} ({self.kind})" + (f", call {self.nth + 1}" if self.nth else "")


@dataclass
class Flow:
    """A forward as calls of items.

    Attributes:
        model: Name of the model's class.
        calls: In their order.
        result: What the tensors that the model returns are made of through glue alone.
        parameters: First name -> number of elements, in the model's order.
        changed: Results that glue, or a later call, changes in place.
        hidden: Positions of the first and last call inside of each ``torch.autograd.Function`` of the model's own: gradients of what such a
            call returns do not come by the graph.
    """

    model: str
    calls: list[FlowCall]
    result: Sources
    parameters: dict[str, int]
    changed: frozenset[Crossing]
    hidden: tuple[tuple[int, int], ...] = ()

    def readers(self) -> Iterator[tuple[int, Sources]]:
        """Position of each call with what it is made of; the model's result stands at the last call's position."""
        for place, call in enumerate(self.calls):
            yield place, call.needs
        yield len(self.calls) - 1, self.result
