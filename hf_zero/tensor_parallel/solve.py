"""Choose the dims of a traced model to split, and the conversions that keep the result exact.

[Note: states] Under a choice of split dims every tensor of the trace is in one of three states: *whole* (the same on every rank),
*split* (each rank holds its part of a split dim), or *partial* (each rank holds a summand). Reading the trace forward gives the
states; a partial sum is summed over ranks at the end of the module call that returns it. Reading the trace backward gives the states of
the gradients. The gradient of a whole tensor that split operations read is partial, so it is summed where the tensor enters a module (the
*copy* of Megatron-LM, Shoeybi et al. 2019), or, if that is not possible, at the parameters it reaches (norms of queries and keys,
biases). A choice that leaves a tensor without a state is not made: the dims concerned are dropped, with the reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from hf_zero.tensor_parallel.graph import ADDITIVE, BUFFER, PARAMETER, PRODUCT_LIKE, UNARY, UNIFORM, Call, Graph, Op, Value
from hf_zero.tensor_parallel.symbolic_dims import SUM, SymbolicDim, block, factors, leaves, local_size

WHOLE, SPLIT, PARTIAL = "whole", "split", "partial"
COPY, SLICE, REDUCE, REDUCE_BOTH, GATHER, GATHER_BOTH, NORM = "copy", "slice", "reduce", "reduce both", "gather", "gather both", "norm"
LOGITS = "logits"

_CUTS = ("slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "select", "unbind")


def is_linear(kind: type) -> bool:
    """Return whether ``kind`` is torch's ``nn.Linear``, a subclass, or transformers' ``Conv1D`` (by name; transformers is not imported
    here).
    """
    return issubclass(kind, nn.Linear) or kind.__name__ == "Conv1D"


Choice = tuple[tuple[SymbolicDim, int], ...]
"""Dims that are split together, major first, each with its number of parts; the product of these numbers is the number of ranks.

[Note: two dims] Usually one dim is split into as many parts as there are ranks. Where 4 ranks share 2 key/value heads of 2 query heads
each, both dims are split in two: a rank has one query head, and the key/value head that it shares with its neighbour. Several ranks hold
equal copies of a tensor with only some of these dims. Its gradients are then summands, summed at the parameters, and no operation may sum
over it.
"""


@dataclass(frozen=True)
class Conversion:
    """Conversion of one tensor at the boundary of a module call: ``kind`` at the input or output ``key``.

    Attributes:
        side: "in" or "out".
        key: Path of the tensor in the arguments or results.
        kind: One of the constants above.
        dims: For slices and norms: the symbolic dims of the tensor.
    """

    side: str
    key: str
    kind: str
    dims: tuple[SymbolicDim, ...] = ()


@dataclass
class Solution:
    """A consistent choice of split dims, with its effect on the whole trace.

    Attributes:
        choices: The chosen splits; see ``Choice``.
        states: Final state of each value: whole, split or partial.
        conversions: Conversions by path of the module.
        summed: Names of parameters whose gradients are summed over the group.
        rows: Paths of linear modules whose bias is added after the sum.
        sliced_buffers: Names of buffers of which each rank keeps a part.
        partial_gradients: Whole values whose gradient is partial.
        uniform: Tensors filled with one number; only their shape matters.
        random_calls: By path of a module that draws random numbers: whether it draws them for split tensors.
    """

    choices: list[Choice]
    states: dict[Value, str] = field(default_factory=dict)
    conversions: dict[str, set[Conversion]] = field(default_factory=lambda: defaultdict(set))
    summed: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    sliced_buffers: set[str] = field(default_factory=set)
    partial_gradients: set[Value] = field(default_factory=set)
    uniform: set[Value] = field(default_factory=set)
    random_calls: dict[str, set[bool]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.parts = {dim: parts for choice in self.choices for dim, parts in choice}
        self._choice_of = {dim: choice for choice in self.choices for dim, _ in choice}

    @property
    def split(self) -> set[SymbolicDim]:
        """Return the dims that are split."""
        return set(self.parts)

    def shares(self, rank: int) -> dict[SymbolicDim, tuple[int, int]]:
        """Return for every split dim the part of ``rank``, and the number of parts."""
        found = {}
        for choice in self.choices:
            left = rank
            for dim, parts in reversed(choice):
                found[dim] = (left % parts, parts)
                left //= parts
        return found

    def held_by_several(self, dims: set[SymbolicDim]) -> bool:
        """Return whether several ranks hold equal copies of a tensor with these split dims, which are not all dims of their choices."""
        return any(other not in dims for dim in dims for other, _ in self._choice_of[dim])

    def ambiguous(self, dims: Sequence[SymbolicDim]) -> bool:
        """Return whether a rank's part is not one block of the tensor: two choices meet in one product, or in two dimensions."""
        found = [{leaf for leaf in leaves(dim) if leaf in self.parts} for dim in dims]
        holders = [split for split in found if split]
        if len(holders) > 1:
            choices = {self._choice_of[leaf] for split in holders for leaf in split}
            if len(choices) > 1 or any(first & second for first, second in zip(holders, holders[1:], strict=False)):
                return True
        return any(self._in_products(dim) > 1 for dim in dims)

    def _in_products(self, dim: SymbolicDim) -> int:
        """Return the largest number of choices that meet in one product inside ``dim``."""

        def walk(dim: SymbolicDim) -> list[frozenset[Choice]]:
            dim = dim.find()
            if dim.kind is None:
                return [frozenset([self._choice_of[dim]] if dim in self.parts else [])]
            below = [walk(part) for part in dim.parts]
            if dim.kind == SUM:
                return [found for part in below for found in part]
            return [frozenset().union(*[found for part in below for found in part])]

        return max((len(found) for found in walk(dim)), default=0)


def candidates(graph: Graph, ranks: int) -> list[Choice]:
    """Return the candidates for a split, largest weights first; no parameter has two candidates in one product."""
    holders: dict[SymbolicDim, list[Value]] = defaultdict(list)
    weights: dict[Choice, int] = {}
    for value in graph.parameters.values():
        for leaf in dict.fromkeys(leaf for dim in value.dims for leaf in leaves(dim)):
            holders[leaf].append(value)
        if len(value.dims) > 1:
            weights.update((choice, 0) for dim in value.dims for choice in _choices(dim, ranks))
    for choice in weights:
        parts = dict(choice)
        for value in dict.fromkeys(value for dim in parts for value in holders[dim] if len(value.dims) > 1):
            numel = math.prod(value.shape)
            weights[choice] += sum(numel - numel // dim.size * local_size(dim, parts) for dim in value.dims)
    chosen: list[Choice] = []
    # First dims that one layer outputs and another sums over; among equal weights the earlier: heads come before the width of a head.
    pairs = _paired(graph)
    for choice in sorted(weights, key=lambda choice: (not pairs.issuperset(dim for dim, _ in choice), -weights[choice])):
        if not _meets(choice, chosen, [value for dim, _ in choice for value in holders[dim]]):
            chosen.append(choice)
    return chosen


def _choices(dim: SymbolicDim, ranks: int) -> Iterator[Choice]:
    """Yield the ways to split one dimension; see [Note: two dims]."""
    dim = dim.find()
    if dim.kind == SUM:
        for part in dim.parts:
            yield from _choices(part, ranks)
        return
    found = factors(dim)
    for position, factor in enumerate(found):
        if factor.kind == SUM:
            yield from _choices(factor, ranks)
        elif not factor.blocked and factor.size > 1:
            parts = math.gcd(factor.size, ranks)
            if parts == ranks:
                yield ((factor, ranks),)
            elif parts > 1 and position + 1 < len(found):
                inner = found[position + 1]
                if inner.kind is None and not inner.blocked and inner.size % (ranks // parts) == 0:
                    yield ((factor, parts), (inner, ranks // parts))


def _paired(graph: Graph) -> set[SymbolicDim]:
    """Return the dims that one linear operation outputs and another one sums over."""
    made: set[SymbolicDim] = set()
    summed: set[SymbolicDim] = set()
    for op in graph.ops():
        if op.contracted and any(value.origin == PARAMETER for value in op.inputs):
            summed.update(leaf for dim in op.contracted for leaf in leaves(dim))
            made.update(leaf for dim in op.outputs[0].dims[-1:] for leaf in leaves(dim))
    return made & summed


def _meets(choice: Choice, chosen: list[Choice], parameters: list[Value]) -> bool:
    """Return whether ``choice`` shares a dim with ``chosen``, or splits a parameter with it so that no rank's part is one block.

    Split dims may be neighbours among the segments of one fused dimension, but not factors of one product, nor in two dimensions.
    """
    mine = {dim for dim, _ in choice}
    if any(dim in mine for other in chosen for dim, _ in other):
        return True
    solution = Solution([*chosen, choice])
    for value in parameters:
        divided = [dim for dim in value.dims if any(leaf in solution.parts for leaf in leaves(dim))]
        if len(divided) > 1 or solution.ambiguous(divided):
            return True
    return False


def solve(graph: Graph, ranks: int, repeats: bool = False) -> Solution:
    """Return the best choice found: start with all candidates, and drop those that turn out impossible.

    Args:
        graph: The trace.
        ranks: Number of ranks.
        repeats: Each rank repeats a whole tensor as often as its part needs: the one key head of many query heads.
    """
    choices = candidates(graph, ranks)
    while True:
        attempt = _Attempt(graph, Solution(choices), repeats)
        attempt.run()
        if not attempt.conflicts:
            return attempt.solution
        for dims, reason in attempt.conflicts:
            for dim in dims:
                block(dim, reason)
        choices = [choice for choice in choices if not any(dim.blocked for dim, _ in choice)]


class _Attempt:
    """One reading of the trace, forward and backward, for one choice of split dims."""

    def __init__(self, graph: Graph, solution: Solution, repeats: bool) -> None:
        self.graph = graph
        self.repeats = repeats
        self.solution = solution
        self.states = solution.states
        self.conflicts: list[tuple[set[SymbolicDim], str]] = []
        self.uniform = solution.uniform
        self.slices: dict[Value, list[Op]] = defaultdict(list)
        self.uses: dict[Value, list[Op]] = defaultdict(list)
        self.blame: dict[Value, set[SymbolicDim]] = {}
        # Whole pieces of a tensor whose other pieces are split: key and value of multi-query attention in one projection.
        self.shared_pieces: set[Value] = set()

    def run(self) -> None:
        """Read the trace; fill ``solution`` and, if the choice fails, ``conflicts``."""
        self._sources()
        for event in self.graph.events:
            if isinstance(event, Op):
                self._forward(event)
            else:
                self._reduce(event)
        self._outputs()
        self._place_slices()
        if not self.conflicts:
            self._backward()

    # -- forward ------------------------------------------------------------------------------------------------------

    def split_dims(self, value: Value) -> set[SymbolicDim]:
        """Return the split dims in the dimensions of ``value``."""
        return {leaf for dim in value.dims for leaf in leaves(dim) if leaf in self.solution.parts}

    def _conflict(self, dims: set[SymbolicDim], reason: str) -> None:
        if dims:
            self.conflicts.append((dims, reason))

    def _sources(self) -> None:
        for value in self.graph.parameters.values():
            self.states[value] = SPLIT if self.split_dims(value) else WHOLE

    def _forward(self, op: Op) -> None:
        inputs = [value for value in op.inputs if value is not None]
        states = [self.states.setdefault(value, WHOLE) for value in inputs]
        for value in op.inputs:
            self.uses[value].append(op)
        contracted = {leaf for dim in op.contracted for leaf in leaves(dim) if leaf in self.solution.parts}
        if PARTIAL in states:
            self._partial(op, contracted)
            return
        has_split = SPLIT in states
        blame = set().union(
            *[self.blame.get(value, set()) | self.split_dims(value) for value, state in zip(inputs, states, strict=True) if state == SPLIT]
        )
        if not has_split:
            uniform = op.outputs and (op.outputs[0].origin == UNIFORM or (inputs and all(value in self.uniform for value in inputs)))
            for value in op.outputs:
                self.states[value] = SPLIT if _repeats(self, op, value) else WHOLE
                if uniform:
                    self.uniform.add(value)
            return
        for value, state in zip(inputs, states, strict=True):
            if state == WHOLE and self.split_dims(value) and value not in self.uniform:
                self.slices[value].append(op)
        if op.gathers and any(leaf in self.solution.parts for leaf in leaves(op.inputs[0].dims[-1])):
            self._norm(op)
        for value in op.outputs:
            found = self.split_dims(value)
            self.blame[value] = blame
            if contracted:
                self.states[value] = PARTIAL
                if found:
                    self._conflict(found | contracted, f"{op.name} in {op.place} would be split in two ways")
                if self.solution.held_by_several(contracted):
                    self._conflict(contracted, f"{op.name} in {op.place} sums over what several ranks hold")
                self._bias(op, contracted)
            elif found:
                self.states[value] = SPLIT
                if self.solution.ambiguous(value.dims):
                    self._conflict(found, f"{op.name} in {op.place} would be split in two ways")
                if op.random and self.solution.held_by_several(found):
                    self._conflict(found, f"{op.name} in {op.place} draws random numbers for what several ranks hold")
            else:
                self.states[value] = WHOLE
                if op.name in _CUTS:
                    self.shared_pieces.add(value)
                else:
                    self._conflict(blame, f"{op.name} in {op.place} needs all of it")

    def _bias(self, op: Op, contracted: set[SymbolicDim]) -> None:
        """Check that a bias after a partial sum belongs to a linear module, which can add it after the reduction."""
        if op.bias is None or len(op.inputs) < 3:
            return
        call = op.stack[-1] if op.stack else None
        if call is not None and is_linear(call.kind):
            self.solution.rows.add(call.path)
        else:
            self._conflict(contracted, f"a bias is added to a partial sum in {op.place}")

    def _norm(self, op: Op) -> None:
        call_path = op.name.split(" ", 1)[1]
        dims = op.inputs[0].dims
        self.solution.conversions[call_path].add(Conversion("in", "", NORM, dims))

    def _partial(self, op: Op, contracted: set[SymbolicDim]) -> None:
        states = [self.states[value] for value in op.inputs]
        blame = set().union(*[self.blame.get(value, set()) for value, state in zip(op.inputs, states, strict=True) if state == PARTIAL])
        partial = [value for value, state in zip(op.inputs, states, strict=True) if state == PARTIAL]
        floats = [value for value in op.inputs if value.floating]
        if op.partial == UNARY:
            fits = True
        elif op.partial == ADDITIVE:
            fits = all(value in partial or value in self.uniform for value in floats)
        elif op.partial == PRODUCT_LIKE:
            fits = len(partial) == 1 and op.bias is None
        else:
            fits = op.partial == "divide" and partial == [op.inputs[0]]
        fits = fits and not contracted and not any(self.split_dims(value) for value in (*op.inputs, *op.outputs))
        for value in op.outputs:
            self.states[value] = PARTIAL if fits else WHOLE
            self.blame[value] = blame
        if not fits:
            self._conflict(blame, f"{op.name} in {op.place} would read a partial sum")

    def _reduce(self, call: Call) -> None:
        for key, value in call.outputs.items():
            if self.states.get(value) == PARTIAL:
                self.states[value] = WHOLE
                self.solution.conversions[call.path].add(Conversion("out", key, REDUCE))

    def _outputs(self) -> None:
        root = self.graph.calls[0]
        for key, value in root.outputs.items():
            if self.states.get(value) == SPLIT:
                self._conflict(self.split_dims(value), f"the model returns it ({key or 'output'})")
        for value, state in self.states.items():
            if state == PARTIAL and not self.uses[value] and value in root.outputs.values():
                self._conflict(self.blame.get(value, set()), "the model returns a partial sum")

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def _boundary(self, value: Value, op: Op, others: list[Op]) -> tuple[Call, list[str]] | None:
        """Return the outermost module call around ``op`` that ``value`` enters from outside, and its keys there; none of ``others`` may
        read the value inside that call. None if there is no such call.

        One tensor may have several keys: query, key and value at once.
        """
        outside = set(map(id, value.stack))
        for call in op.stack:
            if id(call) in outside:
                continue
            keys = [key for key, entered in call.inputs.items() if entered is value]
            if value in call.outputs.values():
                continue  # the call returns the value: readers after it would get the converted one
            if keys and not any(call in other.stack for other in others):
                return call, keys
        return None

    def _convert(self, place: tuple[Call, list[str]], kind: str, dims: tuple[SymbolicDim, ...] = ()) -> None:
        for key in place[1]:
            self.solution.conversions[place[0].path].add(Conversion("in", key, kind, dims))

    def _place_slices(self) -> None:
        for value, ops in self.slices.items():
            others = [use for use in self.uses[value] if use not in ops]
            dims = self.split_dims(value)
            if sum(any(leaf in dims for leaf in leaves(dim)) for dim in value.dims) > 1:
                self._conflict(dims, f"{ops[0].place} reads a part of two dimensions")
                continue
            if value.origin == BUFFER and not others:
                self.solution.sliced_buffers.add(value.name)
                continue
            for op in ops:
                place = self._boundary(value, op, others)
                if place is None:
                    self._conflict(dims, f"{op.place} makes a tensor of all {'/'.join(str(dim.size) for dim in dims)} and reads a part")
                    break
                self._convert(place, SLICE, value.dims)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        partial: dict[Value, list[Op]] = defaultdict(list)
        full: dict[Value, list[Op]] = defaultdict(list)
        for event in reversed(self.graph.events):
            if isinstance(event, Call):
                continue
            op = event
            region = False
            for value in op.outputs:
                state = self._made(value)
                if state == WHOLE and value.needs_grad:
                    self._decide(value, partial[value], full[value])
                region = region or state != WHOLE or value in self.solution.partial_gradients
            _refuse_mixed(self, op, partial)
            if op.random and op.stack:
                self.solution.random_calls[op.place].add(any(self._made(value) == SPLIT for value in op.outputs))
            for position, value in enumerate(op.inputs):
                if not value.needs_grad or self._made(value) != WHOLE:
                    continue
                later = position == op.bias and op.stack and op.stack[-1].path in self.solution.rows
                whole = not region or later or op in self.slices.get(value, ())
                (full if whole else partial)[value].append(op)
        for value in self.graph.parameters.values():
            if partial[value]:
                self._rest(value, full[value])
        self._finish_reductions()

    def _made(self, value: Value) -> str:
        """Return the state that readers of a value see; a partial value that has been summed is whole for them."""
        return self.states.get(value, WHOLE)

    def _rest(self, value: Value, full: list[Op]) -> None:
        if self.states[value] != WHOLE:
            return
        if full:
            self._conflict(set(self.solution.split), f"parameter {value.name} is read by split and by whole work")
        else:
            self.solution.summed.add(value.name)

    def _decide(self, value: Value, partial: list[Op], full: list[Op]) -> None:
        """Place the copies of a whole value, or let its gradient stay partial, or record a conflict."""
        if not partial:
            if full and value in self.shared_pieces:
                self._conflict(self.blame[value], f"{full[0].place} reads a piece of a split tensor in whole work")
            return
        places = [self._boundary(value, op, full) for op in partial]
        if value in self.shared_pieces:
            places = [None]
        if all(place is not None for place in places):
            for place in places:
                if place is not None:
                    self._convert(place, COPY)
        elif not full:
            self.solution.partial_gradients.add(value)
        else:
            dims = set().union(*[self.split_dims(other) for op in partial for other in (*op.inputs, *op.outputs)])
            reason = (
                f"{partial[0].place} reads a tensor in split work ({partial[0].name}) and in whole work ({full[0].name} in {full[0].place})"
            )
            self._conflict(dims or set(self.solution.split), reason)

    def _finish_reductions(self) -> None:
        for call in self.graph.calls:
            for key, value in call.outputs.items():
                conversion = Conversion("out", key, REDUCE)
                found = self.solution.conversions.get(call.path, set())
                if conversion in found and value in self.solution.partial_gradients:
                    found.discard(conversion)
                    found.add(Conversion("out", key, REDUCE_BOTH))


def _repeats(attempt: _Attempt, op: Op, value: Value) -> bool:
    """Return whether ``op`` repeats a whole tensor along a split dim, so that each rank can do it alone."""
    repeated = attempt.repeats and op.name == "expand" and value.needs_grad
    return repeated and not attempt.split_dims(value) <= attempt.split_dims(op.inputs[0])


def _refuse_mixed(attempt: _Attempt, op: Op, partial: Mapping[Value, list[Op]]) -> None:
    """Refuse a tensor of which some pieces have partial gradients and others whole ones: the pieces share one gradient."""
    pieces = [value for value in op.outputs if value.needs_grad and attempt._made(value) == WHOLE and attempt.uses[value]]
    parted = [value for value in pieces if value in attempt.solution.partial_gradients]
    if parted and len(parted) < len(pieces):
        readers = [reader for value in parted for reader in partial[value]]
        dims = set().union(*[attempt.split_dims(other) for reader in readers for other in (*reader.inputs, *reader.outputs)])
        attempt._conflict(dims or set(attempt.solution.split), f"{op.place} divides a tensor into pieces for split and for whole work")
