"""Find where a model's tokens meet: which modules mix tokens, from a run on tensors without values.

[Note: token flow] The tokens' dimension of the inputs is followed through the model as tensor parallelism follows heads
(``tensor_parallel/symbolic_dims.py``). An operation that contracts that dimension, or needs all of it, mixes tokens, and so does one that
meets a constant with one value per token (a table of positions, a triangle). Operations on tokens of all rows as one list (experts) do
not: whatever mixed tokens there would mix samples. Attention of transformers' interface is one operation, for which heads can be exchanged.

*Items* are the entries of the model's outermost lists of modules that see tokens: its layers. Before the first one sequences are whole,
from there on they are cut; the module right below an item that mixes tokens (or the item itself) gets whole sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_zero.sequence_parallel.exchange import exchangeable
from hf_zero.sequence_parallel.masks import modules_of
from hf_zero.sequence_parallel.sequence_functions import FUSED, RECURRENCES, functions_in, named, problem_of
from hf_zero.system.trees import argument_names, tensors_in
from hf_zero.tensor_parallel.graph import UNIFORM, Call, Op, Value
from hf_zero.tensor_parallel.rule import Rule
from hf_zero.tensor_parallel.skeleton import example_inputs, skeleton
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, leaves, unify
from hf_zero.tensor_parallel.trace import Tracer, _Functions, valueless, watching

Places = dict[str, int]
"""By the place of a tensor among the arguments or results of a call: the dimension of its tokens, from the front."""

_PER_HEAD = ("s_aux", "sinks")  # arguments of attention that are cut by heads
_ALONG_LISTS = ("cumsum", "cumsum_", "cumprod", "_softmax", "_log_softmax", "convolution")  # also over tokens of all rows as one list
_MASK = "attention_mask"
_MULTIPLE = 64
_LENGTHS = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83)


class _Found(Exception):
    """End a run at a module that is to be taken as a whole."""


@dataclass
class Boundary:
    """Tensors with tokens at the edge of a module."""

    inputs: Places = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)  # further tensors among the arguments
    outputs: Places = field(default_factory=dict)


@dataclass
class TokenFlow:
    """Findings.

    Attributes:
        items: The model's layers, by path, in the order of their first call.
        mixers: Modules that need whole sequences, by path, and why.
        heads: Modules whose attention exchanges heads, by path.
        functions: Modules whose functions of the table exchange heads, by path ([Note: sequence functions]).
        last: Path of the item that is called last.
        last_calls: How often it is called.
        tail: Why what follows the last item needs whole sequences; "" where slices do.
        problems: What stands against slices altogether.
    """

    items: dict[str, Boundary] = field(default_factory=dict)
    mixers: dict[str, Boundary] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    last: str = ""
    last_calls: int = 0
    tail: str = ""
    problems: list[str] = field(default_factory=list)


class _TokenTracer(Tracer):
    """Watches the dimension of the tokens at every operation."""

    def __init__(self, model: nn.Module, inputs: dict[str, torch.Tensor], items: list[str], mixers: dict[str, str], ranks: int) -> None:
        super().__init__(model)
        self.flow = TokenFlow(reasons=dict(mixers))
        self.ranks = ranks
        self.items = set(items)
        self.mixers = mixers
        self.order: list[str] = []  # of calls of items
        self.found: tuple[str, str] | None = None  # another module that mixes tokens, and why
        for tensor in inputs.values():
            self.input(tensor)
        first, *others = [self.value(tensor) for tensor in inputs.values()]
        self.rows, self.tokens = first.dims[0], first.dims[1]
        for other in others:
            unify(self.rows, other.dims[0])
            unify(self.tokens, other.dims[1])
        self.sliced: set[Value] = set()
        mask = inputs.get(_MASK)
        self.of_mask: set[Value] = {self.value(mask)} if mask is not None else set()  # computed from the mask of padding alone
        self.derived: set[Value] = {self.value(tensor) for tensor in inputs.values()}  # computed from tokens
        self.glue: list[tuple[int, str]] = []  # operations between items that slices cannot do, after how many calls of items

    # -- dims ---------------------------------------------------------------------------------------------------------

    def leaves_of_tokens(self) -> set[SymbolicDim]:
        """Return the dims that the tokens' dimension consists of by now."""
        return set(leaves(self.tokens))

    def places(self, value: Value, tokens: set[SymbolicDim]) -> list[int]:
        """Return the dimensions of ``value`` with tokens."""
        return [index for index, dim in enumerate(value.dims) if tokens.intersection(leaves(dim))]

    def _listed(self, value: Value, tokens: set[SymbolicDim]) -> bool:
        """Return whether tokens of all rows are one list in ``value``."""
        rows = set(leaves(self.rows))
        places = self.places(value, tokens)
        return bool(places) and all(rows.intersection(leaves(value.dims[place])) for place in places)

    def _join_lengths(self, values: Iterable[Value]) -> None:
        """Treat dimensions of the tokens' size as tokens; nothing else in the model has this size."""
        for value in values:
            for dim in value.dims:
                if dim.size == self.tokens.size:
                    unify(dim, self.tokens)

    # -- operations ---------------------------------------------------------------------------------------------------

    def record(self, name: str, args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor], mutates: bool, pointwise: bool) -> None:
        """Record one operation, and whether it mixes tokens."""
        inputs = [self.value(tensor) for _, tensor in tensors_in([args, kwargs])]
        tokens = self.leaves_of_tokens()
        with_tokens = [value for value in inputs if self.places(value, tokens)]
        constants = [
            value
            for value in inputs
            if value not in with_tokens and value not in self.derived and value.origin != UNIFORM and self.tokens.size in value.shape
        ]
        super().record(name, args, kwargs, outputs, mutates, pointwise)
        if not outputs or not isinstance(self.graph.events[-1], Op):
            return
        op = self.graph.events[-1]
        if any(value in self.derived for value in inputs):
            self.derived.update(op.outputs)
            if all(value in self.of_mask for value in inputs if value in self.derived):
                self.of_mask.update(op.outputs)
        if self._mixer() is None or any(value in self.derived for value in op.outputs):
            self._join_lengths(op.outputs)
        after = self.leaves_of_tokens()
        reason = self._mixes(op, len(tokens), after, with_tokens, constants) or self._shifts(name, args, with_tokens, after)
        for value in (*op.inputs, *op.outputs):
            for dim in value.dims:
                for leaf in leaves(dim):
                    leaf.blocked = ""
        self._spread(op, with_tokens, after, args)
        if reason and with_tokens and (name in _ALONG_LISTS or not all(self._listed(value, after) for value in with_tokens)):
            self._mixing(f"{name}: {reason}")

    def _mixes(self, op: Op, before: int, after: set[SymbolicDim], with_tokens: list[Value], constants: list[Value]) -> str:
        blocked = next((leaf.blocked for leaf in after if leaf.blocked), "")
        if blocked:
            return blocked
        if before != len(after):
            return "cuts the sequence"
        if any(after.intersection(leaves(dim)) for dim in op.contracted):
            return "sums over tokens"
        if any(self.places(value, after) for value in constants):
            return "meets a constant with one value per token"
        if any(dim.size % self.tokens.size for value in op.outputs for dim in value.dims if after.intersection(leaves(dim))):
            return "cuts the sequence"
        widest = max((len(self.places(value, after)) for value in with_tokens), default=0)
        if any(len(self.places(value, after)) > max(widest, 1) for value in op.outputs):
            return "compares tokens with each other"
        return ""

    def _shifts(self, name: str, args: Any, with_tokens: list[Value], tokens: set[SymbolicDim]) -> str:
        """Return whether padding at one end and cutting at the other moves tokens, which changes no shape."""
        if name != "constant_pad_nd" or not with_tokens:
            return ""
        pads, dims = list(args[1]), len(with_tokens[0].dims)
        moved = {dims - 1 - place // 2 for place, count in enumerate(pads) if count}
        return "shifts the sequence" if moved.intersection(self.places(with_tokens[0], tokens)) else ""

    def _mixing(self, reason: str) -> None:
        place = self._mixer()
        if place is None:
            self.glue.append((len(self.order), f"{reason} in {self.stack[-1].path if self.stack else 'the model'}"))
        else:
            self.found = (place, reason)
            raise _Found

    def _mixer(self) -> str | None:
        """Return the module below the item that runs, or the item; None between items."""
        for place, call in enumerate(self.stack):
            if call.path in self.items:
                return self.stack[place + 1].path if place + 1 < len(self.stack) else call.path
        return None

    def _spread(self, op: Op, with_tokens: list[Value], tokens: set[SymbolicDim], args: Any = ()) -> None:
        """Note which results are slices; refuse slices that meet whole sequences between items."""
        cut = [value for value in with_tokens if value in self.sliced]
        if not cut:
            return
        self.sliced.update(value for value in op.outputs if self.places(value, tokens))
        if self._mixer() is not None:
            return
        if any(value not in self.sliced for value in with_tokens):
            self.glue.append((len(self.order), f"{op.name} with whole sequences in {op.place or 'the model'}"))
        elif any(type(number) is int and number == self.tokens.size for number in tree_leaves(args)):
            self.glue.append((len(self.order), f"{op.name} with the length of whole sequences in {op.place or 'the model'}"))

    # -- calls --------------------------------------------------------------------------------------------------------

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module call begins."""
        super().enter(path, module, args, kwargs)
        if path in self.items and not any(call.path in self.items for call in self.stack[:-1]):
            self.order.append(path)
        if path in self.items or path in self.mixers:
            self._join_lengths(self.stack[-1].inputs.values())
        if path in self.mixers:
            self.silent += 1

    def leave(self, path: str, output: Any) -> None:
        """Record the end of a module call; the results of an item are slices."""
        call = self.stack[-1]
        super().leave(path, output)
        if path in self.mixers:
            self.silent -= 1
        if path in self.items or path in self.mixers:
            outputs = list(call.outputs.values())
            self._join_lengths(outputs)
            tokens = self.leaves_of_tokens()
            self.derived.update(outputs)
            self.sliced.update(value for value in outputs if self.places(value, tokens))

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Record attention of the interface as one operation; (batch, tokens, heads, width)."""
        if self.silent:
            return torch.empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]), dtype=query.dtype, device=query.device)
        values = [self.value(tensor) for tensor in (query, key, value)]
        self.silent += 1
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
        self.silent -= 1
        dims = values[0].dims
        self._append("attention", values, [output], Rule([(dims[0], dims[2], dims[1], values[2].dims[3])]))
        tokens = self.leaves_of_tokens()
        op = self.graph.ops()[-1]
        self.derived.update(op.outputs)
        self._spread(op, values, tokens)
        reason = self._keeps_from_heads(values, kwargs, tokens)
        if reason:
            self._mixing(f"attention: {reason}")
        elif self._mixer() is not None:
            self.flow.heads.append(self.stack[-1].path)
        else:
            self._mixing("attention between layers")
        return output

    def function(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Write down a function of the table as one operation, with the result that it has for slices."""
        if name in FUSED:
            return None
        given = named(function, args, kwargs)
        layout = RECURRENCES.get(name)
        leader = given[layout.leader if layout is not None else "hidden_states"]
        value = self.value(leader)
        self.silent += 1
        output = torch.empty_like(leader, device="meta")
        self.silent -= 1
        if not self.silent:
            self._append(name, [value], [output], Rule([value.dims]))
            op = self.graph.ops()[-1]
            self.derived.update(op.outputs)
            self._spread(op, [value], self.leaves_of_tokens())
            problem = problem_of(name, given, self.ranks)
            place = self._mixer()
            if problem or place is None:
                self._mixing(f"{name}: {problem or 'between layers'}")
            elif self.stack[-1].path not in self.flow.functions:
                self.flow.functions.append(self.stack[-1].path)
        pair = layout is not None and (layout.leader == "value" or given.get("return_final_states") or given.get("return_last_state"))
        return (output, None) if pair else output

    def _keeps_from_heads(self, values: list[Value], kwargs: dict[str, Any], tokens: set[SymbolicDim]) -> str:
        if any(self.places(value, tokens) != [2] or value.dims[2].find() is not self.tokens.find() for value in values):
            return "its keys are not those of the tokens"
        if not exchangeable(values[0].dims[1].size, values[1].dims[1].size, self.ranks):
            return f"{self.ranks} ranks do not divide its {values[0].dims[1].size} heads"
        others = {key: found for key, found in kwargs.items() if key not in ("position_ids", *_PER_HEAD)}
        extra = [key for key, tensor in tensors_in(others) if self.places(self.value(tensor), tokens)]
        return f"it reads {', '.join(extra)}" if extra else ""


@contextmanager
def _functions_stand_in(model: nn.Module, tracer: _TokenTracer) -> Iterator[None]:
    """Make the functions of the table operations of ``tracer``."""
    found = functions_in(modules_of(model))
    for module, name, function in found:
        setattr(module, name, lambda *args, _name=name, _function=function, **kwargs: tracer.function(_name, _function, args, kwargs))
    try:
        yield
    finally:
        for module, name, function in found:
            setattr(module, name, function)


class _TokenFunctions(_Functions):
    """Let the second row have padding: code that asks whether there is any, to leave the mask out, keeps it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__ and self.tracer.value(args[0]) in self.tracer.of_mask:  # type: ignore[attr-defined]
            return False
        return super().__torch_function__(func, types, args, kwargs)


def find_token_flow(model: nn.Module, ranks: int, replace_attention: Callable[[Callable[..., Any]], Any]) -> TokenFlow:
    """Return where tokens meet in ``model``.

    Args:
        model: A causal language model of transformers; stays as it is.
        ranks: Ranks of a sequence-parallel group.
        replace_attention: Returns a context in which the given function stands for attention of the interface.

    Raises:
        Exception: The model's own error: it does not run on tokens without values.
    """
    copy = skeleton(model)
    failed: Exception | None = None
    for multiple in (1, _MULTIPLE):  # some take multiples of something only
        try:
            return _flow_of(copy, _inputs(copy, multiple), ranks, replace_attention)
        except Exception as error:  # noqa: BLE001 - whatever the model raises
            failed = failed or error
    assert failed is not None
    raise failed


def _flow_of(
    copy: nn.Module, inputs: dict[str, torch.Tensor], ranks: int, replace_attention: Callable[[Callable[..., Any]], Any]
) -> TokenFlow:
    lists = _lists(copy)
    tracer = _settled(copy, inputs, _entries(copy, lists), ranks, replace_attention)
    mixing = {path for path in lists if any(found.startswith(f"{path}.") for found in _meetings(tracer))}
    if len(mixing) not in (0, len(lists)):  # lists of embeddings or of heads are no layers
        tracer = _settled(copy, inputs, _entries(copy, [path for path in lists if path in mixing]), ranks, replace_attention)
    return _findings(tracer)


def _meetings(tracer: _TokenTracer) -> list[str]:
    """Return the modules where tokens meet."""
    return [*tracer.mixers, *tracer.flow.heads, *tracer.flow.functions]


def _settled(
    copy: nn.Module, inputs: dict[str, torch.Tensor], items: list[str], ranks: int, replace_attention: Callable[[Callable[..., Any]], Any]
) -> _TokenTracer:
    """Return a run to the end, in which every module that mixes tokens is taken as a whole."""
    modules, mixers = dict(copy.named_modules()), dict[str, str]()
    while True:
        tracer = _run(copy, inputs, items, mixers, ranks, replace_attention)
        if tracer.found is None:
            return tracer
        path, reason = tracer.found
        kind = type(modules[path])  # its siblings are not looked at one by one
        mixers |= {other: reason for other, module in modules.items() if type(module) is kind} | {path: reason}


def _findings(tracer: _TokenTracer) -> TokenFlow:
    flow = tracer.flow
    tokens = tracer.leaves_of_tokens()
    called = list(dict.fromkeys(tracer.order))
    for call in tracer.graph.calls:
        if call.path in called:
            _add(flow.items.setdefault(call.path, Boundary()), call, tracer, tokens)
        if call.path in flow.reasons:
            _add(flow.mixers.setdefault(call.path, Boundary()), call, tracer, tokens)
    flow.reasons = {path: reason for path, reason in flow.reasons.items() if path in flow.mixers or path in flow.items}
    flow.mixers |= {path: flow.items[path] for path in flow.reasons if path in flow.items}  # the item itself
    lost = [path for found in (flow.items, flow.mixers) for path, boundary in found.items() if not (boundary.inputs and boundary.outputs)]
    if lost:
        flow.problems.append(f"{lost[0]} does not keep one hidden state per token")
    if not flow.items:
        flow.problems.append("it has no list of layers that see tokens")
        return flow
    flow.last, flow.last_calls = tracer.order[-1], tracer.order.count(tracer.order[-1])
    _judge_glue(flow, tracer)
    return flow


def _inputs(model: nn.Module, multiple: int = 1) -> dict[str, torch.Tensor]:
    """Return a call with a number of tokens that no other dimension in the model has, so that a dimension of this size is one of tokens."""
    taken = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    taken |= {value for module in model.modules() for value in vars(module).values() if isinstance(value, int)}
    length = next(length * multiple for length in _LENGTHS if length * multiple not in taken)
    inputs = example_inputs(model, length)
    if _MASK in argument_names(model):
        inputs[_MASK] = torch.zeros_like(inputs["input_ids"])
    books = getattr(getattr(model, "config", None), "num_codebooks", None)
    return {name: tensor.repeat(books, 1) for name, tensor in inputs.items()} if isinstance(books, int) else inputs


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that keeps a model from filling a cache, if it takes one."""
    passes = any(item.kind is item.VAR_KEYWORD for item in inspect.signature(model.forward).parameters.values())
    config: Any = getattr(model, "config", None)
    configured = config is not None and hasattr(config.get_text_config(), "use_cache")
    known = "use_cache" in argument_names(model) or (passes and configured)
    return {"use_cache": False} if known else {}


def _judge_glue(flow: TokenFlow, tracer: _TokenTracer) -> None:
    calls = len(tracer.order)
    for after, reason in tracer.glue:
        if 0 < after < calls:
            flow.problems.append(f"between its layers: {reason}")
        elif after == calls:
            flow.tail = flow.tail or reason


def _add(boundary: Boundary, call: Call, tracer: _TokenTracer, tokens: set[SymbolicDim]) -> None:
    for values, places in ((call.inputs, boundary.inputs), (call.outputs, boundary.outputs)):
        for key, value in values.items():
            found = tracer.places(value, tokens)
            if len(found) == 1 and value.shape[found[0]] == tracer.tokens.size:
                places[key] = found[0]
            elif values is call.inputs:
                boundary.whole.add(key)


def _lists(model: nn.Module) -> list[str]:
    """Return the outermost lists of modules."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return [path for path in lists if not any(path.startswith(f"{other}.") for other in lists if other != path)]


def _entries(model: nn.Module, lists: list[str]) -> list[str]:
    return [f"{path}.{name}" for path in lists for name, _ in model.get_submodule(path).named_children()]


def _run(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    items: list[str],
    mixers: dict[str, str],
    ranks: int,
    replace_attention: Callable[[Callable[..., Any]], Any],
) -> _TokenTracer:
    tracer = _TokenTracer(model, inputs, items, mixers, ranks)

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        return tracer.attention(query, key, value, kwargs), None

    with (
        replace_attention(attend),
        _functions_stand_in(model, tracer),
        watching(model, tracer),
        torch.no_grad(),
        valueless(_TokenFunctions(tracer), tracer),
        suppress(_Found),
    ):
        model(**inputs, **without_cache(model))
    return tracer
