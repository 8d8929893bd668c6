"""Run one rank's part of a split model on tensors without values: find the attributes to change, and check every shape.

The same torch functions must run in the same order as in the whole model, and each result must have the shape that the chosen split dims
give it. Where a result has another shape, the numbers among the arguments (``tracked_ints.py``) are tried with a part of their value. If
no number fits, the failure is recorded with the place, and the dims concerned are not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from hf_zero.system.trees import argument_names, convert_arguments, tensors_in
from hf_zero.tensor_parallel.graph import FunctionCall, Graph, Value
from hf_zero.tensor_parallel.skeleton import skeleton
from hf_zero.tensor_parallel.solve import SLICE, SPLIT, Solution
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, leaves, local_size
from hf_zero.tensor_parallel.trace import (
    Inputs,
    answer_function,
    function_name,
    plain_index,
    valueless,
    without_values,
)
from hf_zero.tensor_parallel.tracked_ints import Symbol, TrackedInt, evaluate, get_attribute, set_attribute, track_attributes


@dataclass(frozen=True)
class LocalShapes:
    """Shapes of values on one rank.

    Attributes:
        solution: The chosen splits.
        shares: Number of parts of each split dimension.
    """

    solution: Solution
    shares: dict[SymbolicDim, int]

    def of(self, value: Value) -> tuple[int, ...]:
        """Return the shape of ``value`` on one rank."""
        return self._divided(value) if self.solution.states.get(value) == SPLIT else value.shape

    def all_of(self, call: FunctionCall) -> list[tuple[int, ...]]:
        """Return the shapes of the results of ``call``."""
        return [self.of(value) for value in values_of(call)]

    def match(self, result: Any, call: FunctionCall) -> bool:
        """Return whether ``result`` has shapes that the results of ``call`` may have on one rank."""
        tensors, values = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)], values_of(call)
        if len(tensors) != len(values):
            return False
        return all(tuple(tensor.shape) in self._allowed(value) for tensor, value in zip(tensors, values, strict=True))

    def empty(self, value: Value) -> torch.Tensor:
        """Return a tensor without values, of the shape and kind of type that ``value`` has on one rank."""
        return torch.empty(self.of(value), dtype=torch.float32 if value.floating else torch.long, device="meta")

    def split_dims(self, call: FunctionCall) -> set[SymbolicDim]:
        """Return the split dimensions in the results of ``call``."""
        return {leaf for value in values_of(call) for dim in value.dims for leaf in leaves(dim) if leaf in self.solution.parts}

    def _divided(self, value: Value) -> tuple[int, ...]:
        return tuple(local_size(dim, self.shares) for dim in value.dims)

    def _allowed(self, value: Value) -> tuple[tuple[int, ...], ...]:
        return (value.shape, self._divided(value)) if value in self.solution.uniform else (self.of(value),)


def values_of(call: FunctionCall) -> list[Value]:
    """Return the tensors in the result of ``call``."""
    return [leaf for leaf in tree_flatten(call.result)[0] if isinstance(leaf, Value)]


_MOST_TRIED = 4
_REPEATING = ("__getitem__", "unsqueeze", "expand", "reshape", "contiguous", "view", "flatten", "clone")


@dataclass
class DryRun:
    """Findings of the dry run of one rank's part.

    Attributes:
        attributes: New integer values, by module path and attribute name.
        failures: Sets of dims that cannot be split after all, each with the reason.
    """

    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[tuple[set[SymbolicDim], str]] = field(default_factory=list)


class _Diverged(Exception):
    """Error raised if the split model runs other functions than the whole model."""


def dry_run(model: nn.Module, inputs: Inputs, graph: Graph, solution: Solution, ranks: int) -> DryRun:
    """Run one rank's part of ``model`` without values; return the attributes to change, or the failures.

    Args:
        model: The model, or a skeleton of it; it is not changed.
        inputs: Inputs of the traced call.
        graph: The trace of the whole model.
        solution: The chosen splits.
        ranks: Number of ranks.
    """
    shares = solution.parts
    local = _local_skeleton(model, graph, solution, shares)
    track_attributes(local)
    outcome = DryRun()
    _run(local, inputs, _Comparison(graph, solution, shares, ranks, outcome, dict(local.named_modules())))
    if outcome.failures or not outcome.attributes:
        return outcome
    plain = _local_skeleton(model, graph, solution, shares)
    modules = dict(plain.named_modules())
    for path, changes in outcome.attributes.items():
        for name, value in changes.items():
            set_attribute(modules[path], name, value)
    _run(plain, inputs, _Comparison(graph, solution, shares, ranks, outcome, modules))
    return outcome


def _local_skeleton(model: nn.Module, graph: Graph, solution: Solution, shares: dict[SymbolicDim, int]) -> nn.Module:
    local = skeleton(model)
    for name, tensor in (*local.named_parameters(), *local.named_buffers()):
        value = graph.parameters.get(name) or graph.buffers[name]
        if solution.states.get(value) == SPLIT or name in solution.sliced_buffers:
            tensor.data = torch.empty([local_size(dim, shares) for dim in value.dims], dtype=tensor.dtype, device="meta")
    return local


def _run(local: nn.Module, inputs: Inputs, comparison: _Comparison) -> None:
    try:
        with _boundaries(local, comparison), torch.no_grad(), valueless(comparison, None, comparison.graph.values):
            local(**inputs)
    except _Diverged as error:
        comparison.fail_place(comparison.place, str(error))
    except Exception as error:  # any error of the model means that this choice does not run
        comparison.fail_place(comparison.place, f"{type(error).__name__} in {comparison.place}: {error}")


class _Comparison(TorchFunctionMode):
    """Mode that compares each torch function's result with the shape it must have."""

    def __init__(
        self, graph: Graph, solution: Solution, shares: dict[SymbolicDim, int], ranks: int, outcome: DryRun, modules: dict[str, nn.Module]
    ) -> None:
        super().__init__()
        self.graph = graph
        self.solution = solution
        self.shapes = LocalShapes(solution, shares)
        self.divisors = sorted({ranks, *shares.values()}, reverse=True)
        dims = {dim for op in graph.ops() for value in op.outputs if solution.states.get(value) == SPLIT for dim in value.dims}
        local = {dim: local_size(dim, shares) for dim in dims}
        self.sizes = {(dim.size, dim.size // size) for dim, size in local.items() if size and dim.size % size == 0}
        self.outcome = outcome
        self.modules = modules
        self.position = 0
        self.silent = 0
        self.stack: list[str] = [""]
        self.pinned: set[Symbol] = set()

    @property
    def place(self) -> str:
        """Return the path of the module whose code is running."""
        return self.stack[-1]

    def fail(self, dims: set[SymbolicDim], reason: str) -> None:
        """Record that ``dims`` cannot be split; without dims, record it for the running module's dims."""
        if dims:
            self.outcome.failures.append((dims, reason))
        else:
            self.fail_place(self.place, reason)

    def fail_place(self, place: str, reason: str) -> None:
        """Record that the split dimensions of a module's parameters cannot be split; else those of the closest parent, else all
        dimensions.
        """
        inside: set[SymbolicDim] = set()
        while True:
            prefix = f"{place}." if place else ""
            for name, value in self.graph.parameters.items():
                if name.startswith(prefix):
                    inside |= {leaf for dim in value.dims for leaf in leaves(dim) if leaf in self.solution.parts}
            if inside or not place:
                break
            place = place.rpartition(".")[0]
        self.outcome.failures.append((inside or set(self.solution.split), reason))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        made_up = answer_function(func, args)
        if made_up is not None:
            return made_up[0]
        args = plain_index(func, args)
        if not self.graph.values:
            args, kwargs = tree_map_only(torch.Tensor, without_values, (args, kwargs))
        if self.silent:
            return func(*args, **kwargs)
        result, error = self._call(func, args, kwargs, self._known)
        if error is None and next(tensors_in([result]), None) is None:
            return result
        expected = self._expected(func) if error is None or self._is_next(func) else None
        if expected is None:
            return self._without_result(func, args, kwargs, error)
        self.position += 1
        if error is None and self.shapes.match(result, expected):
            self._pin(args, kwargs, expected)
            return result
        found = self._try_ints(func, args, kwargs, lambda found: self.shapes.match(found, expected))
        if found is not None:
            return found[0]
        shapes = [tuple(tensor.shape) for _, tensor in tensors_in([result])] if error is None else str(error).split("\n")[0]
        wanted = self.shapes.all_of(expected)
        self.fail(self.shapes.split_dims(expected), f"{function_name(func)} in {self.place} gives {shapes}, not {wanted}")
        return tree_map(lambda leaf: self.shapes.empty(leaf) if isinstance(leaf, Value) else leaf, expected.result)

    def _call(self, func: Any, args: Any, kwargs: Any, env: Callable[[Symbol], int]) -> tuple[Any, Exception | None]:
        plain_args, plain_kwargs = _evaluated((args, kwargs), env)
        try:
            return func(*plain_args, **plain_kwargs), None
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return None, error

    def _without_result(self, func: Any, args: Any, kwargs: Any, error: Exception | None) -> Any:
        """Run a function that returns no tensor (an assignment) with other numbers; record a failure if none fits."""
        found = self._try_ints(func, args, kwargs, lambda found: True)
        if found is not None:
            return found[0]
        self.fail(set(), f"{function_name(func)} in {self.place}: {str(error).splitlines()[0] if error else 'does not fit'}")
        return None

    # -- expectations -------------------------------------------------------------------------------------------------

    def _is_next(self, func: Any) -> bool:
        return self.position < len(self.graph.functions) and self.graph.functions[self.position].name == function_name(func)

    def _skip_repeats(self, func: Any) -> None:
        """Accept that model code skips a repetition of a single item, as with a key/value head that one query head of this rank uses."""
        position = self.position
        while position < len(self.graph.functions) and self.graph.functions[position].name in _REPEATING:
            position += 1
        names = [call.name for call in self.graph.functions[self.position : position + 1]]
        if "expand" in names and function_name(func) in names:
            while self.graph.functions[self.position].name != "expand":
                self.position += 1
            self.position += 1
            while not self._is_next(func):
                self.position += 1

    def _expected(self, func: Any) -> FunctionCall:
        if not self._is_next(func):
            self._skip_repeats(func)
        if not self._is_next(func):
            there = self.graph.functions[self.position] if self.position < len(self.graph.functions) else None
            expected = f"{there.name} in {there.place}" if there is not None else "the end"
            raise _Diverged(f"a part of the model runs {function_name(func)} in {self.place} where the whole one runs {expected}")
        return self.graph.functions[self.position]

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _owner(self, symbol: Symbol) -> tuple[str, str]:
        return (self.place if symbol.path is None else symbol.path), symbol.name

    def _known(self, symbol: Symbol) -> int:
        path, name = self._owner(symbol)
        found = self.outcome.attributes.get(path, {}).get(name)
        return found if found is not None else get_attribute(self.modules[path], name)

    def _pin(self, args: Any, kwargs: Any, expected: FunctionCall) -> None:
        if any(value in self.solution.uniform for value in values_of(expected)):
            return
        for symbol in self._open_symbols(args, kwargs):
            self.pinned.add(Symbol(*self._owner(symbol)))

    def _open_symbols(self, args: Any, kwargs: Any) -> list[Symbol]:
        numbers = [leaf for leaf in _plain_leaves((args, kwargs)) if isinstance(leaf, TrackedInt)]
        symbols = dict.fromkeys(symbol for number in numbers for symbol in number.symbols)
        return [symbol for symbol in symbols if self._owner(symbol)[1] not in self.outcome.attributes.get(self._owner(symbol)[0], {})]

    def _try_ints(self, func: Any, args: Any, kwargs: Any, fits: Callable[[Any], bool]) -> tuple[Any] | None:
        """Run the call with parts of some of its numbers; keep the first choice whose result fits, and return it in a tuple."""
        symbols = [symbol for symbol in self._open_symbols(args, kwargs) if Symbol(*self._owner(symbol)) not in self.pinned]
        # A pretrained model's own configuration is saved with it and must keep describing the whole model.
        symbols = [symbol for symbol in symbols if not hasattr(self.modules[self._owner(symbol)[0]], "save_pretrained")]
        smallest = min(self.divisors)
        symbols = [symbol for symbol in symbols if self._known(symbol) % smallest == 0][:_MOST_TRIED]
        for parts in self._guesses(symbols):
            result, error = self._call(func, args, kwargs, self._divided(parts))
            if error is None and fits(result):
                for symbol, divisor in parts.items():
                    path, name = self._owner(symbol)
                    self.outcome.attributes.setdefault(path, {})[name] = self._known(symbol) // divisor
                return (result,)
        return None

    def _divided(self, parts: dict[Symbol, int]) -> Callable[[Symbol], int]:
        return lambda symbol: self._known(symbol) // parts.get(symbol, 1)

    def _guesses(self, symbols: list[Symbol]) -> list[dict[Symbol, int]]:
        """Return divisors by symbol to try: numbers equal to the size of a split dimension first, then few numbers before many."""
        found = []
        for count in range(1, len(symbols) + 1):
            for chosen in combinations(symbols, count):
                for divisors in product(self.divisors, repeat=count):
                    parts = dict(zip(chosen, divisors, strict=True))
                    if not any(self._known(symbol) % divisor for symbol, divisor in parts.items()):
                        found.append(parts)
        return sorted(found, key=lambda parts: any((self._known(symbol), divisor) not in self.sizes for symbol, divisor in parts.items()))


def _plain_leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _plain_leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _plain_leaves(item)
    elif isinstance(tree, slice):
        yield from (tree.start, tree.stop, tree.step)
    else:
        yield tree


def _evaluated(tree: Any, env: Callable[[Symbol], int]) -> Any:
    if isinstance(tree, TrackedInt):
        return evaluate(tree, env)
    if isinstance(tree, slice):
        return slice(*[_evaluated(item, env) for item in (tree.start, tree.stop, tree.step)])
    if type(tree) in (tuple, list):
        return type(tree)(_evaluated(item, env) for item in tree)
    if isinstance(tree, torch.Size):
        return torch.Size([_evaluated(item, env) for item in tree])
    if type(tree) is dict:
        return {key: _evaluated(item, env) for key, item in tree.items()}
    return tree


@contextmanager
def _boundaries(local: nn.Module, comparison: _Comparison) -> Iterator[None]:
    """Hook modules to track the stack of running modules and to change shapes as the plan's conversions do, inside the context."""
    handles = []
    for path, module in local.named_modules():
        conversions = comparison.solution.conversions.get(path, set())
        slices = {item.key: item for item in conversions if item.kind == SLICE}
        norm = path in comparison.graph.opaque
        names = argument_names(module) if slices else []

        def before(
            module: nn.Module,
            args: Any,
            kwargs: Any,
            path: str = path,
            slices: dict[str, Any] = slices,
            names: list[str] = names,
            norm: bool = norm,
        ) -> Any:
            comparison.stack.append(path)
            comparison.silent += norm
            if not slices:
                return None
            comparison.silent += 1
            try:
                shapes = {key: [local_size(dim, comparison.shapes.shares) for dim in item.dims] for key, item in slices.items()}
                return convert_arguments(
                    args, kwargs, names, shapes, lambda tensor, shape: torch.empty(shape, dtype=tensor.dtype, device="meta")
                )
            finally:
                comparison.silent -= 1

        def after(module: nn.Module, args: Any, output: Any, norm: bool = norm) -> None:
            comparison.stack.pop()
            comparison.silent -= norm

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
        if norm:
            module.forward = lambda hidden, *args, **kwargs: hidden  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
