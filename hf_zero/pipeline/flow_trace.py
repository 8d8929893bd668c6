"""Trace the flow of a model's forward on tensors without values.

An item is a module that one stage runs as a whole ([Note: items] in ``plan.py``). Every tensor records how glue code made it: from
results of earlier calls, parameters and random numbers.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from hf_zero.core.units.grouping import find_blocks
from hf_zero.pipeline.plan import Crossing
from hf_zero.system.trees import convert_inside, tensors_in
from hf_zero.tensor_parallel.rules import RANDOM_NAMES
from hf_zero.tensor_parallel.trace import answer_function, plain_attention, plain_index, valueless


@dataclass(frozen=True)
class Read:
    """A parameter that glue reads, by its name in ``named_parameters()``."""

    parameter: str


@dataclass(frozen=True)
class Kept:
    """A tensor that a call makes or changes but does not return: the module keeps it where other code can read it.

    Attributes:
        call: Position of the call.
        how: Name of the operation that made it.
    """

    call: int
    how: str


@dataclass(frozen=True)
class Drawn:
    """Random numbers that glue draws; each stage would draw different ones.

    Attributes:
        number: Position among the drawing operations of the forward.
        how: Name of the operation.
        place: Dotted name of the module whose code runs the operation.
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
        parameters: Names of the module's own parameters, as in ``named_parameters()``.
        needs: Sources that the call depends on through glue alone.
        operations: Floating point operations of its matrix products.
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
    """A forward as a sequence of calls of items.

    Attributes:
        model: Name of the model's class.
        calls: The calls in execution order.
        result: Sources that the model's returned tensors depend on through glue alone.
        parameters: Name -> number of elements, in the model's order.
        changed: Results that glue, or a later call, changes in place.
        hidden: Positions of the first and last call inside each ``torch.autograd.Function`` of the model; gradients of the results of these
            calls do not flow through the graph.
    """

    model: str
    calls: list[FlowCall]
    result: Sources
    parameters: dict[str, int]
    changed: frozenset[Crossing]
    hidden: tuple[tuple[int, int], ...] = ()

    def readers(self) -> Iterator[tuple[int, Sources]]:
        """Yield the position of each call with the sources of its arguments; the model's result has the last call's position."""
        for place, call in enumerate(self.calls):
            yield place, call.needs
        yield len(self.calls) - 1, self.result


def find_repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by dotted name: those of ``find_blocks``, or the members of its outermost lists, which may be
    inside a block that is called often.

    A list cannot be called: its members are the blocks (ALBERT has one that is called many times, Funnel lists of lists).
    """
    found: dict[str, nn.Module] = {}
    for name, module in (find_blocks(model) or _in_lists(model)).items():
        found.update(_callable(name, module))
    return found


def _in_lists(model: nn.Module) -> dict[str, nn.Module]:
    """Return the members of the outermost lists."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(name.startswith(f"{block}.") for block in found):
            found.update({f"{name}.{key}".lstrip("."): child for key, child in module.named_children()})
    return found


def _callable(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return the module by name, or the members of a list; an empty dict where the module has no parameters."""
    if next(module.parameters(), None) is None:
        return {}
    if not isinstance(module, nn.ModuleList):
        return {name: module}
    return {path: block for key, child in module.named_children() for path, block in _callable(f"{name}.{key}", child).items()}


def possible_items(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by dotted name, the modules whose calls count as items while no other item is running.

    These are the blocks, modules outside of the blocks that have parameters and hold no block, and dropout. Of nested modules the outermost
    one that is called counts: where a model calls the layers of a head one by one, these layers are the items and not the head.
    """
    blocks = find_repeated(model)
    holding = {name[:end] for name in blocks for end in _ends(name)}
    found = {}
    for name, module in model.named_modules():
        if name in holding or any(name[:end] in blocks for end in _ends(name) if end):
            continue
        if isinstance(module, _DropoutNd) or next(module.parameters(), None) is not None:
            found[name] = module
    return found


def _ends(name: str) -> list[int]:
    """Return the positions in ``name`` at which the names of the enclosing modules end; the root's name is empty."""
    return [0, *(place for place, letter in enumerate(name) if letter == ".")]


# The shape of their results depends on values, so every later operation may depend on these values, too.
_SHAPED_BY_VALUES = frozenset({"nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive"})
_UNIFORM_DRAWS = frozenset({"rand", "rand_like", "uniform_"})  # from 0 to 1, 1 excluded
_COMPARISONS = frozenset({"lt", "le", "gt", "ge"})


class _Known(NamedTuple):
    tensor: torch.Tensor  # kept alive, so that nothing else gets its id
    sources: Sources
    maker: int | None  # position of the call that was running
    time: int


class FlowTracer:
    """Recorder of the flow of tensors through a forward.

    [Note: sources] The result of a call has that call as its only source, whatever the arguments were: a stage that does not run the call
    receives the result. A tensor that glue makes has the sources of all tensors that it is made of. An operation in place changes the
    sources of every tensor of the same storage from then on. A decision that the code takes on a value (``if``, ``int(tensor)``, a shape)
    adds its sources to all later calls.

    Attributes:
        calls: The calls of items so far.
        control: Sources of the decisions that glue has taken.
        changed: Results that are changed in place after their call.
        hidden: See ``Flow``.
        silent: Above zero while operations are not recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[FlowCall] = []
        self.control: Sources = frozenset()
        self.changed: set[Crossing] = set()
        self.hidden: list[tuple[int, int]] = []
        self.silent = 0
        self._items = possible_items(model)
        self._blocks = find_repeated(model)
        self._model = type(model).__name__
        self._places: list[str] = []
        self._inside: int | None = None
        self._depth = 0  # modules running when the item's call began, itself included
        self._time = 0
        self._draws = 0
        self._counts: dict[str, int] = defaultdict(int)
        self._known: dict[int, _Known] = {}
        self._changes: dict[int, list[tuple[int, Sources]]] = defaultdict(list)  # by storage
        self._shared: dict[int, Sources] = defaultdict(frozenset)  # by storage, for tensors that no operation made
        self._results: dict[int, set[Crossing]] = defaultdict(set)  # by storage
        self._uniform: set[int] = set()  # storages
        self._names = {id(param): name for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            self._note(param, frozenset({Read(name)}))
        for buffer in model.buffers():
            self._note(buffer, frozenset())

    @property
    def _place(self) -> str:
        """Return the name of the module whose code is running, for messages."""
        return (self._places[-1] if self._places else "") or self._model

    def _note(self, tensor: torch.Tensor, sources: Sources) -> None:
        self._known[id(tensor)] = _Known(tensor, sources, self._inside, self._time)
        storage = _storage(tensor)
        self._shared[storage] |= sources

    def sources(self, tensor: torch.Tensor) -> Sources:
        """Return the sources of a tensor; a tensor that no recorded operation has made is a constant and has none."""
        storage = _storage(tensor)
        known = self._known.get(id(tensor))
        if known is None:
            found = self._shared.get(storage, frozenset())
            return found.union(*(sources for _, sources in self._changes.get(storage, ())))
        return known.sources.union(*(sources for time, sources in self._changes.get(storage, ()) if time > known.time))

    def record(self, name: str, args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor], mutates: bool, pointwise: bool) -> None:
        """Record one operation that has run; ``valueless`` calls this."""
        self._time += 1
        read = [tensor for _, tensor in tensors_in([args, kwargs])]
        sources = frozenset().union(*map(self.sources, read))
        if self._inside is not None:
            self._inside_call(self._inside, name, read, sources, outputs, mutates)
            self.calls[self._inside].operations += _operations(name, args, kwargs, outputs)
            return
        if name in RANDOM_NAMES:
            self._draws += 1
            sources |= {Drawn(self._draws, name, self._place)}
        if self._decided(name, args):
            sources = frozenset()
        if not outputs or name in _SHAPED_BY_VALUES or (name == "index" and any(tensor.dtype == torch.bool for tensor in read[1:])):
            self.control |= sources
        for output in outputs:
            self._note(output, sources)
        if name in _UNIFORM_DRAWS:
            self._uniform.update(map(_storage, outputs))
        if mutates and read:
            storage = _storage(read[0])
            self._changes[storage].append((self._time, sources))
            self.changed |= self._results[storage]

    def _inside_call(
        self, place: int, name: str, read: list[torch.Tensor], sources: Sources, outputs: list[torch.Tensor], mutates: bool
    ) -> None:
        own = {source for source in sources if isinstance(source, Kept) and source.call == place}
        self.calls[place].needs |= sources - own
        kept: Sources = frozenset({Kept(place, name)})
        if mutates and read:
            known = self._known.get(id(read[0]))
            if known is None or known.maker != place:
                self._changes[_storage(read[0])].append((self._time, kept))
                self.changed |= self._results[_storage(read[0])]
        for output in outputs:
            if not (mutates and any(output is tensor for tensor in read)):
                self._note(output, kept)

    def _decided(self, name: str, args: Any) -> bool:
        """Return whether a comparison of a uniform random number has a fixed result, as with layer dropout of probability 0."""
        if name not in _COMPARISONS or len(args) < 2 or isinstance(args[1], torch.Tensor):
            return False
        return _storage(args[0]) in self._uniform and not 0 < args[1] < 1

    def decide(self, tensor: torch.Tensor) -> None:
        """Note that the code has read the values of a tensor."""
        if self._inside is None:
            self.control |= self.sources(tensor)

    def enter(self, path: str) -> None:
        """Note that a module is called."""
        self._places.append(path)
        if self._inside is None and path in self._items:
            module = self._items[path]
            own = frozenset(self._names[id(param)] for param in module.parameters())
            call = FlowCall(path, self._counts[path], type(module).__name__, path in self._blocks, own, self.control)
            self._counts[path] += 1
            self._inside = len(self.calls)
            self.calls.append(call)
            self._depth = len(self._places)

    def leave(self, output: Any) -> Any:
        """Note that the call ends. Return its output, in which input tensors are replaced by new objects of the same values, so that they
        count as results of this call.
        """
        ends = self._inside is not None and len(self._places) == self._depth
        self._places.pop()
        if not ends:
            return output
        assert self._inside is not None
        place, self._inside = self._inside, None
        self._time += 1
        self.silent += 1
        for leaf, (key, tensor) in enumerate(list(tensors_in(output))):
            known = self._known.get(id(tensor))
            if known is None or known.maker != place:
                self.calls[place].needs |= {source for source in self.sources(tensor) if getattr(source, "call", None) != place}
                tensor = tensor.detach()
                output = convert_inside(output, key, tensor, lambda _, other: other)
            self._note(tensor, frozenset({Crossing(place, leaf)}))
            self._results[_storage(tensor)].add(Crossing(place, leaf))
        self.silent -= 1
        return output


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # a sparse tensor
        return id(tensor)


def _operations(name: str, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:
    formula = flop_registry.get(getattr(torch.ops.aten, name, None))
    return int(formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs))) if formula and outputs else 0


class _Answers(TorchFunctionMode):
    """Mode in which functions that read values return a made-up value; it reports each read to the tracer."""

    def __init__(self, tracer: FlowTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_up = answer_function(func, args)
        if made_up is None:
            return func(*plain_index(func, args), **plain_attention(func, kwargs))
        if func is torch.Tensor.tolist:
            self.tracer.decide(args[0])
        return made_up[0]


def _reporting(tracer: FlowTracer, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tracer.enter(path)
        return tracer.leave(original(*args, **kwargs))

    return forward


@contextmanager
def _watching(model: nn.Module, tracer: FlowTracer) -> Iterator[None]:
    """Replace every module's forward with a reporting one, because some models call ``forward`` without the module's hooks."""
    before = [(module, module.__dict__.get("forward")) for module in model.modules()]
    for path, module in model.named_modules():
        module.forward = _reporting(tracer, path, module.forward)
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                module.forward = own


@contextmanager
def _noticing_functions(tracer: FlowTracer) -> Iterator[None]:
    """Note inside the context which calls run inside an autograd function, for example of a reversible network."""
    original = torch.autograd.Function.__dict__["apply"]  # a classmethod; since torch 2.14 a method of C, without ``__func__``

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        first = len(tracer.calls)
        result = original.__get__(None, cls)(*args, **kwargs)
        if len(tracer.calls) > first:
            tracer.hidden.append((first, len(tracer.calls) - 1))
        return result

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def trace_flow(skeleton: nn.Module, inputs: Mapping[str, Any]) -> Flow:
    """Return the flow of ``skeleton(**inputs)``.

    Args:
        skeleton: A model without values (``tensor_parallel.trace.skeleton``), in the mode (training or evaluation) to trace.
        inputs: Arguments of the call. Tensors on the device "meta" or with values; with values, results that depend on no parameter are
            computed.

    Raises:
        Exception: Any error that the model raises when it runs without the values of its parameters.
    """
    tracer = FlowTracer(skeleton)
    values = any(tensor.device.type != "meta" for _, tensor in tensors_in(inputs))
    inputs = tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().cpu() if values and tensor.device.type != "meta" else tensor, dict(inputs)
    )
    with _watching(skeleton, tracer), _noticing_functions(tracer), torch.no_grad(), valueless(_Answers(tracer), tracer, values):  # type: ignore[arg-type]
        output = skeleton(**inputs)
    result = tracer.control.union(*(tracer.sources(tensor) for _, tensor in tensors_in(output)))
    numel = {name: param.numel() for name, param in skeleton.named_parameters()}
    return Flow(type(skeleton).__name__, tracer.calls, result, numel, frozenset(tracer.changed), tuple(tracer.hidden))
