"""Test that the functions of torch without a public name that the hooks use exist and behave as expected; a new torch fails here first."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hf_zero.core.schedule import torch_internals
from hf_zero.core.schedule.outside_reads import GuardedParameters
from hf_zero.core.schedule.torch_internals import (
    before_zero_grad,
    call_after_backward,
    compiled_call,
    give_number,
    in_backward,
    is_checkpointed,
    is_recomputed,
    keeps_graph,
    leave_out_of_graphs,
    next_node,
    number_of,
    outside_compile,
    outside_recording,
    outside_transforms,
    reaches,
    recompile_limit,
    replace_parameters,
    transforming,
    will_run,
)
from hf_zero.core.units.whole_buffer import is_only_view, other_uses


def test_a_transform_is_noticed_and_left() -> None:
    seen: list[bool] = []
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.extend((transforming(), wrapped(torch.zeros(2))))
        with outside_transforms():
            seen.append(wrapped(torch.zeros(2)))
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    assert seen == [True, True, False]
    assert not transforming()


def test_a_transform_keeps_its_graph_where_gradients_are_on_around_it() -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(keeps_graph())
        return x.sin().sum()

    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            torch.func.grad(function)(torch.ones(3))
            torch.func.vmap(torch.func.hessian(function))(torch.ones(2, 3))
            assert set(seen) == {mode} == {keeps_graph()}
        seen.clear()


def test_modes_that_record_for_checkpointing_are_left_and_others_are_not() -> None:
    class Seen(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    outer, inner = Seen(), Seen()
    inner.names = []
    forward, again = create_selective_checkpoint_contexts([torch.ops.aten.sin.default])
    x = torch.ones(2)
    for recorder in (forward, again):
        with outer, recorder, inner:
            found = x.sin()
            with outside_recording():
                x.cos()  # unknown to the recorder, which would raise
            assert torch.equal(found, x.sin() if recorder is forward else found)
            assert torch._C._len_torch_dispatch_stack() == 3
    assert inner.names.count("cos") == outer.names.count("cos") == 2
    with outside_recording():
        assert not torch._C._len_torch_dispatch_stack()


def test_a_module_whose_gradients_are_cleared_is_told_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "zero_grad", nn.Module.zero_grad)
    model, told = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    first, second = model[0].weight, model[1].weight

    def keep_first(params: list[nn.Parameter]) -> set[int]:
        told.append([param.grad is not None for param in params])
        return {id(first)}

    before_zero_grad(keep_first)
    for set_to_none in (True, False):
        model(torch.ones(1, 2)).sum().backward()
        kept = first.grad
        model.zero_grad(set_to_none)
        assert first.grad is kept and kept is not None and kept.any()
        assert (second.grad is None) if set_to_none else (second.grad is not None and not second.grad.any())
    model[1].zero_grad()
    assert second.grad is None and [len(flags) for flags in told] == [4, 4, 2] and all(told[0])
    before_zero_grad(lambda _params: ())  # the last function that was given is called, and no other
    model.zero_grad()
    assert first.grad is None and len(told) == 3


def test_a_backward_is_noticed_and_its_end_is_called() -> None:
    seen: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        seen.append(in_backward())
        call_after_backward(lambda: seen.append(x.grad is not None))

    y.register_hook(hook)
    assert not in_backward()
    y.sum().backward()
    assert seen == [True, True] and not in_backward()


def test_backward_runs_the_nodes_made_last_first() -> None:
    """Check the basis of [Note: announced backwards]: numbers rise by one with each node, and torch reports whether a node will
    run.
    """
    seen: list[tuple[int, list[bool]]] = []
    x = torch.ones(3, requires_grad=True)
    first = next_node()
    left, right = x * 2, x * 3
    unused = x * 4
    late = right + 1
    total = left + late
    assert [number_of(tensor.grad_fn) - first for tensor in (left, right, unused, late, total)] == [0, 1, 2, 3, 4]
    assert next_node() == first + 5
    nodes = [tensor.grad_fn for tensor in (left, right, unused, late)]
    for number, tensor in enumerate((left, right, unused, late)):
        tensor.register_hook(lambda _, number=number: seen.append((number, [will_run(node) for node in nodes])))
    total.sum().backward()
    assert [number for number, _ in seen] == [3, 1, 0]
    assert all(known == [True, True, False, True] for _, known in seen)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_under_checkpointing_is_told_from_its_recomputation(reentrant: bool) -> None:
    seen: list[tuple[bool, bool]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((is_checkpointed(), is_recomputed()))
        return x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        function(x)
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert seen == [(False, False), (not reentrant, False), (False, not reentrant)]


def _reached(start: str) -> bool:
    """Return the result of ``reaches`` for a weight in a hook, in a backward begun by ``start``."""
    seen: list[bool] = []
    weight = nn.Parameter(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    y = weight * x
    y.register_hook(lambda grad: seen.append(reaches([weight])))
    if start == "backward":
        y.sum().backward()
    elif start == "inputs":
        y.sum().backward(inputs=[x])
    else:
        torch.autograd.grad(y.sum(), [x] if start == "grad of x" else [weight])
    return seen[0]


@pytest.mark.parametrize(("start", "expected"), [("backward", True), ("inputs", False), ("grad of x", False), ("grad of weight", False)])
def test_who_gets_a_gradient_is_known_in_a_hook(start: str, expected: bool) -> None:
    assert _reached(start) is expected


def test_this_torch_tells_whether_anything_compiles() -> None:
    """Check that torch reports this; otherwise every hook uses torch.compile's wrapper once it is imported, which is slow and no error."""
    assert torch_internals._compiling is not None
    assert torch_internals._compiling() is None


def test_hooks_stay_out_of_compiled_graphs() -> None:
    calls: list[bool] = []
    module = nn.Linear(2, 2)
    hook = outside_compile(lambda *_: calls.append(torch.compiler.is_compiling()), module)
    assert hook._torchdynamo_disable  # type: ignore[attr-defined]
    module.register_forward_pre_hook(hook)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend)
    compiled(torch.ones(1, 2))
    compiled(torch.ones(1, 2))
    assert calls == [False, False]
    assert graphs and "torch._dynamo.eval_frame" in sys.modules


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def test_a_module_that_is_left_out_breaks_the_graph_around_it_once() -> None:
    torch._dynamo.reset()
    model, inside = Three(), []
    model.middle.register_forward_hook(lambda *_: inside.append(torch.compiler.is_compiling()))
    leave_out_of_graphs(model.middle)
    assert compiled_call(model.middle) is None
    counter = torch._dynamo.testing.CompileCounter()
    example = torch.ones(1, 2)
    expected = model(example)
    model.compile(backend=counter)
    assert torch.equal(model(example), expected)
    assert inside == [False, False] and counter.frame_count == 2


def test_equal_modules_with_hooks_of_one_number_share_a_graph() -> None:
    torch._dynamo.reset()
    counter, layers = torch._dynamo.testing.CompileCounter(), [Three() for _ in range(3)]
    for layer in layers:
        handle = layer.middle.register_forward_hook(lambda _module, _args, output: output + 1, always_call=True)
        give_number(handle, -7)
        layer.compile(backend=counter)
    for layer in layers:
        assert torch.equal(layer(torch.ones(1, 2)), layer.forward(torch.ones(1, 2)))
    assert counter.frame_count == 1
    handle.remove()
    assert not layers[2].middle._forward_hooks and not layers[2].middle._forward_hooks_always_called


def test_more_than_eight_unequal_modules_are_compiled() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    class Numbered(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * {index: index for index in range(20)}[self.number]

    layers = [Numbered(number) for number in range(12)]
    for layer in layers:
        layer.compile(backend=counter, **recompile_limit(len(layers)))
        assert float(layer(torch.ones(()))) == layer.number
    assert counter.frame_count == 12 or not recompile_limit(12)


def test_a_module_looks_its_parameters_up_where_we_put_them() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    asked: list[str] = []

    class Dict(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            asked.append(name)
            return super().__getitem__(name)

    replace_parameters(module, Dict(module._parameters))
    assert module.weight is weight and asked == ["weight"]
    module.bias = nn.Parameter(torch.zeros(2))
    assert isinstance(module._parameters, Dict) and [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    module.double()
    assert isinstance(module._parameters, Dict) and module.weight.dtype is torch.float64


def test_copies_and_pickles_of_guarded_modules_are_plain() -> None:
    module = nn.Linear(2, 2)
    replace_parameters(module, GuardedParameters(dict(module._parameters), lambda param: None))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other._parameters) is dict and torch.equal(other.weight, module.weight)


def test_views_of_memory_are_counted() -> None:
    whole = torch.zeros(4)
    assert is_only_view(whole) and not other_uses(whole)
    part = whole.view(torch.uint8)[4:8].view(torch.float32)
    assert not is_only_view(whole)
    del whole
    assert is_only_view(part)
    other = part[:1]
    assert not is_only_view(part)
    del other
    assert is_only_view(part)
