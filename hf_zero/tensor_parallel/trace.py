"""Run a model once on tensors without values, and record how the dimensions of its tensors relate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hf_zero.system.trees import named_arguments, tensors_in
from hf_zero.tensor_parallel import rules
from hf_zero.tensor_parallel.graph import BUFFER, CONSTANT, INPUT, PARAMETER, RESULT, UNIFORM, Call, FunctionCall, Graph, Op, Value
from hf_zero.tensor_parallel.rule import FAKE_COUNT, Rule, Shape, fresh, opaque, values_of

_MASKS = (torch.bool, torch.uint8)
_WHOLE_FUNCTIONS = {
    torch.nn.functional.linear: "linear",
    torch.nn.functional.scaled_dot_product_attention: "scaled_dot_product_attention",
}


class Tracer:
    """Builder of the graph; the modes below report the calls and operations that run.

    Attributes:
        graph: Operations recorded so far.
        opaque: Paths of norms that are recorded as one operation.
    """

    def __init__(self, model: nn.Module, opaque: frozenset[str] = frozenset(), values: bool = False) -> None:
        self.graph = Graph(opaque=opaque, values=values)
        self.model = model
        self.opaque = opaque
        self.stack: list[Call] = []
        self.silent = 0  # above zero inside an operation that is recorded as one
        self._values: dict[int, Value] = {}
        self._alive: list[torch.Tensor] = []
        for name, param in model.named_parameters():
            value = self._register(param, Value(fresh(param.shape), PARAMETER, (), True, param.is_floating_point(), name))
            self.graph.parameters[name] = value
        for name, buffer in model.named_buffers():
            value = self._register(
                buffer, Value(fresh(buffer.shape), BUFFER, (), False, buffer.is_floating_point(), name, buffer.dtype in _MASKS)
            )
            self.graph.buffers[name] = value

    def _register(self, tensor: torch.Tensor, value: Value) -> Value:
        self._values[id(tensor)] = value
        self._alive.append(tensor)
        return value

    def value(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor; a tensor that no recorded operation has made is a constant."""
        found = self._values.get(id(tensor))
        if found is None or found.shape != tuple(tensor.shape):
            found = Value(fresh(tensor.shape), CONSTANT, tuple(self.stack), False, tensor.is_floating_point())
            found.mask = tensor.dtype in _MASKS
            self._register(tensor, found)
        return found

    def input(self, tensor: torch.Tensor) -> None:
        """Register an argument of the model."""
        value = Value(fresh(tensor.shape), INPUT, (), False, tensor.is_floating_point(), mask=tensor.dtype in _MASKS)
        self._register(tensor, value)

    def record(self, name: str, args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor], mutates: bool, pointwise: bool) -> None:
        """Record one operation that makes tensors, with the rule for its dimensions."""
        if not outputs:
            return
        args = tree_map_only(torch.Tensor, self.value, list(args))
        kwargs = tree_map_only(torch.Tensor, self.value, dict(kwargs))
        shapes: list[Shape] = [tuple(output.shape) for output in outputs]
        handler = rules.HANDLERS.get(name) or (rules.pointwise if pointwise else opaque)
        rule = handler(name, args, kwargs, shapes)
        inputs = values_of([args, kwargs])
        self._append(name, inputs, outputs, rule)
        if mutates and inputs and outputs:
            self._values[id(outputs[0])] = self.graph.events[-1].outputs[0]  # type: ignore[index]

    def _append(self, name: str, inputs: list[Value], outputs: list[torch.Tensor], rule: Rule, gathers: bool = False) -> None:
        needs_grad = any(value.needs_grad for value in inputs) and name != "detach"
        made = []
        for output, dims in zip(outputs, rule.dims, strict=True):
            floating = output.is_floating_point()
            origin = UNIFORM if name in rules.UNIFORM_NAMES else RESULT
            value = Value(dims, origin, tuple(self.stack), needs_grad and floating, floating, mask=output.dtype in _MASKS)
            made.append(self._register(output, value))
        random = name in rules.RANDOM_NAMES
        op = Op(name, inputs, made, tuple(self.stack), rule.partial, rule.contracted, rule.bias, random, gathers)
        self.graph.events.append(op)

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module call begins."""
        call = Call(path, type(module))
        for key, tensor in named_arguments(module, args, kwargs):
            call.inputs[key] = self.value(tensor)
        self.stack.append(call)
        self.graph.calls.append(call)
        if path in self.opaque:
            self.silent += 1

    def leave(self, path: str, output: Any) -> None:
        """Note that a module call ends."""
        call = self.stack.pop()
        tensors = list(tensors_in(output, "" if isinstance(output, torch.Tensor) else "out"))
        if path in self.opaque:
            self.silent -= 1
            source = next(iter(call.inputs.values()))
            params = [self.graph.parameters[name] for name, _ in self._own_parameters(path)]
            self._append(f"norm {path}", [source, *params], [tensors[0][1]], Rule([source.dims]), gathers=True)
        for key, tensor in tensors:
            call.outputs[key.removeprefix("out.")] = self.value(tensor)
        self.graph.events.append(call)

    def _own_parameters(self, path: str) -> list[tuple[str, Value]]:
        return [(name, value) for name, value in self.graph.parameters.items() if name.startswith(f"{path}.")]


class _Operations(TorchDispatchMode):
    """Mode that reports every ATen operation, and makes up the results of operations that need values.

    [Note: values] Without values a model takes the branches that made-up results lead to, and some models then do not run. With
    ``values``, tensors that do not depend on a parameter (tokens, masks, positions) are computed on the host as in any forward, and only
    the other tensors have shapes alone.
    """

    def __init__(self, tracer: Tracer | None, values: bool) -> None:
        super().__init__()
        self.tracer = tracer
        self.values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        if self.values:
            result = _computed(name, func, args, kwargs)
        else:
            args, kwargs = tree_map_only(torch.Tensor, without_values, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
            result = _answer(name, func, args, kwargs)
        tracer = self.tracer
        if tracer is not None and not tracer.silent:
            outputs = [tensor for _, tensor in tensors_in([result])]
            tracer.record(name, args, kwargs, outputs, func._schema.is_mutable, torch.Tag.pointwise in func.tags)
        return result


def _computed(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation where tensors that depend on no parameter have values; [Note: values]."""
    read = [tensor for _, tensor in tensors_in([args, kwargs])]
    shapes_only = any(tensor.device.type == "meta" for tensor in read)
    if name in rules.UNIFORM_NAMES:
        kwargs["device"] = torch.device("cpu")
    elif kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta" if shapes_only else "cpu")
    if not shapes_only or name in rules.UNIFORM_NAMES:
        return func(*args, **kwargs)
    if name == "nonzero":  # select all of a list, such as all experts
        source = args[0]
        return torch.arange(source.numel())[:, None] if source.dim() == 1 else torch.zeros((FAKE_COUNT, source.dim()), dtype=torch.long)
    bare_args, bare_kwargs = tree_map_only(torch.Tensor, without_values, (args, kwargs))
    result = _answer(name, func, bare_args, bare_kwargs)
    if name in ("gt", "lt", "ge", "le") and bare_args[0].is_floating_point():
        # Every value passes the threshold, so that code which counts the passing values gets consistent numbers.
        return torch.ones(result.shape, dtype=torch.bool)
    return args[0] if result is bare_args[0] and isinstance(result, torch.Tensor) else result


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype on the device "meta"; a 0-dim tensor is returned unchanged."""
    if tensor.device.type == "meta" or tensor.dim() == 0:
        return tensor
    return torch.empty_like(tensor, device="meta")


def _answer(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation, made up where it depends on values."""
    if name in ("_local_scalar_dense", "is_nonzero", "item"):
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
    if name == "equal":
        return True
    if name == "nonzero":
        return torch.empty(FAKE_COUNT, max(args[0].dim(), 1), dtype=torch.long, device="meta")
    if name == "_grouped_mm":
        rows, weights = args[0], args[1]
        shape = (rows.shape[0], weights.shape[-1]) if weights.dim() == 3 and rows.dim() == 2 else None
        return torch.empty(shape, dtype=rows.dtype, device="meta") if shape else func(*args, **kwargs)
    if name in ("masked_select",):
        return torch.empty(FAKE_COUNT, dtype=args[0].dtype, device="meta")
    if name == "bincount":
        return torch.empty(max(kwargs.get("minlength", 0), args[2] if len(args) > 2 else 0, 1), dtype=torch.long, device="meta")
    if name in ("index", "index_put_", "index_put"):
        args = (args[0], [_indices_of(index) if index is not None else None for index in args[1]], *args[2:])
        args = (args[0], [entry for index in args[1] for entry in (index if isinstance(index, list) else [index])], *args[2:])
        if name != "index":
            return args[0] if name == "index_put_" else torch.empty_like(args[0])
    return func(*args, **kwargs)


def _indices_of(index: torch.Tensor) -> Any:
    if index.dtype not in _MASKS:
        return index
    return [torch.empty(FAKE_COUNT, dtype=torch.long, device="meta") for _ in range(index.dim())]


class _Functions(TorchFunctionMode):
    """Mode that reports torch functions as the model's code calls them; some are recorded as one operation."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        made_up = answer_function(func, args)
        if made_up is not None:
            return made_up[0]
        args = plain_index(func, args)
        tracer = self.tracer
        name = _WHOLE_FUNCTIONS.get(func)
        if name is not None and not tracer.silent:
            if not tracer.graph.values:
                args, kwargs = tree_map_only(torch.Tensor, without_values, (args, kwargs))
            tracer.silent += 1
            try:
                result = func(*args, **kwargs)
            finally:
                tracer.silent -= 1
            ordered = _ordered(name, args, kwargs)
            tracer.record(name, *ordered, [result], False, False)
        else:
            result = func(*args, **kwargs)
        if not tracer.silent and next(tensors_in([result]), None) is not None:
            values = tree_map_only(torch.Tensor, tracer.value, result)
            tracer.graph.functions.append(FunctionCall(function_name(func), values, tracer.stack[-1].path if tracer.stack else ""))
        return result


def function_name(func: Any) -> str:
    """Return the name of a torch function, to compare two runs."""
    return str(getattr(func, "__name__", func))


def answer_function(func: Any, args: Any) -> tuple[Any] | None:
    """Return a made-up result, in a tuple, for a function that reads values; None for other functions."""
    if func is torch.Tensor.tolist:
        return (_zeros(tuple(args[0].shape)),) if args[0].device.type == "meta" else None
    if (
        func in (torch.Tensor.split, torch.split)
        and isinstance(args[1], (list, tuple))
        and not any(args[1])
        and args[0].shape[0] >= len(args[1]) > 0
    ):
        return (torch.tensor_split(args[0], len(args[1])),)  # the sizes were made up by ``tolist``
    if func in (torch.Tensor.cpu, torch.Tensor.cuda):
        return (args[0],)
    return None


def plain_index(func: Any, args: Any) -> Any:
    """Return the arguments of ``tensor[..., [-2], :]`` with a slice instead of a list of consecutive numbers, if there is only one list."""
    if func is not torch.Tensor.__getitem__:
        return args
    places = args[1] if isinstance(args[1], tuple) else (args[1],)
    lists = [place for place in places if not isinstance(place, (slice, type(None), type(Ellipsis)))]
    if len(lists) != 1 or not isinstance(lists[0], list) or not lists[0] or not all(type(item) is int for item in lists[0]):
        return args
    first, last = lists[0][0], lists[0][-1]
    if lists[0] != list(range(first, last + 1)) or (first < 0) != (last < 0):
        return args
    run = slice(first, last + 1 if last != -1 else None)
    return (args[0], tuple(run if place is lists[0] else place for place in places))


def plain_attention(func: Any, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keyword arguments of a call; drop the causal flag of attention, because without values it would need a mask of tokens x
    tokens in memory.

    The operands of the attention and the number of operations stay the same.
    """
    given = dict(kwargs or {})
    # Compared by name, because a memory plan replaces torch's function.
    if getattr(func, "__name__", "") == "scaled_dot_product_attention" and given.get("is_causal"):
        given["is_causal"] = False
    return given


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def _ordered(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    names = ("input", "weight", "bias") if name == "linear" else ("query", "key", "value", "attn_mask")
    positional = list(args) + [kwargs.get(key) for key in names[len(args) :]]
    return positional, {}


@contextmanager
def watching(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Report calls of every module to ``tracer``, by hooks, inside the context."""
    handles = []
    for path, module in model.named_modules():

        def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            tracer.enter(path, module, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            tracer.leave(path, output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _autocast_without_values() -> Iterator[None]:
    """Make ``torch.autocast`` do nothing on the device "meta", which it refuses: transformers 4 disables it around rotary tables.

    Also make ``torch.is_autocast_enabled`` return False there, because fused losses call it.
    """
    original, enabled = torch.autocast, torch.is_autocast_enabled

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else original(device_type, *args, **kwargs)

    torch.autocast = autocast  # type: ignore[assignment,misc]
    torch.is_autocast_enabled = lambda *device: device != ("meta",) and enabled(*device)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autocast, torch.is_autocast_enabled = original, enabled  # type: ignore[misc]


@contextmanager
def valueless(functions: TorchFunctionMode, tracer: Tracer | None, values: bool = False) -> Iterator[None]:
    """Run the context on tensors without values, observed by both modes; for ``values`` see [Note: values]."""
    with _autocast_without_values(), torch.device("cpu" if values else "meta"), _Operations(tracer, values), functions:
        yield


Inputs = Mapping[str, torch.Tensor]


def have_values(inputs: Inputs) -> bool:
    """Return whether ``inputs`` have values, so that the model runs as [Note: values] describes."""
    return any(tensor.device.type != "meta" for tensor in inputs.values())


def trace(model: nn.Module, inputs: Inputs, opaque: frozenset[str] = frozenset()) -> Graph:
    """Trace ``model(**inputs)``; return the graph.

    Args:
        model: A ``skeleton``.
        inputs: Tensors on the device "meta", or on the host ([Note: values]).
        opaque: Paths of norms to record as one operation.

    Raises:
        Exception: Any error that the model raises.
    """
    tracer = Tracer(model, opaque, have_values(inputs))
    for tensor in inputs.values():
        tracer.input(tensor)
    with watching(model, tracer), torch.no_grad(), valueless(_Functions(tracer), tracer, tracer.graph.values):
        model(**inputs)
    return tracer.graph
