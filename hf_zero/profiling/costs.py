"""Count floating-point operations and time of every module of a model while the model runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper
from torch.utils.hooks import RemovableHandle

from hf_zero.comm.process_groups import default_device
from hf_zero.core.schedule.torch_internals import in_backward
from hf_zero.core.units.unit import full_shape


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of attention, from shapes (batch, heads, length, width): scores, and their product with the values."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _attention_backward(_grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of attention's backward: scores again, and the gradients of scores, values, queries and keys."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


def _matrix_by_vector(matrix: Sequence[int], _vector: Sequence[int], *_: Any, **__: Any) -> int:
    rows, columns = matrix
    return 2 * rows * columns


def _added_matrix_by_vector(_added: Sequence[int], matrix: Sequence[int], vector: Sequence[int], *_: Any, **__: Any) -> int:
    return _matrix_by_vector(matrix, vector)


def _vectors(one: Sequence[int], _other: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * one[0]


def _recurrent(inputs: Sequence[int], *weights: Any, **_: Any) -> int:
    """Return the operations of recurrent layers in one kernel: for each token a product with every matrix.

    Args:
        inputs: Shape of the input, whose last dimension is its width.
        weights: Shapes of matrices and biases, one by one (oneDNN) or in a list (cuDNN); then the kernel's other arguments.
    """
    shapes = weights[0] if isinstance(weights[0], list) else weights[:2]
    return 2 * prod(inputs[:-1]) * sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)


def _recurrent_backward(*arguments: Any, **_: Any) -> int:
    """Return the operations of the backward of recurrent layers: the gradients of matrices and of inputs."""
    return 2 * _recurrent(*arguments)


# torch's counter (as of 2.13) knows the attention kernels of GPUs, but counts 0 for those of CPUs, for products with a vector and for
# recurrent layers in one kernel (LSTM on CPUs; LSTM, GRU and RNN on GPUs).
FORMULAS = {
    packet: formula
    for name, formula in (
        ("_scaled_dot_product_flash_attention_for_cpu", _attention),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward),
        ("mv", _matrix_by_vector),
        ("addmv", _added_matrix_by_vector),
        ("dot", _vectors),
        ("vdot", _vectors),
        ("mkldnn_rnn_layer", _recurrent),
        ("mkldnn_rnn_layer_backward", _recurrent_backward),
        ("_cudnn_rnn", _recurrent),
        ("_cudnn_rnn_backward", _recurrent_backward),
    )
    if (packet := getattr(torch.ops.aten, name, None)) is not None and packet not in flop_registry
}


COUNTED: dict[Any, Callable[..., int]] = {**flop_registry, **{packet: shape_wrapper(formula) for packet, formula in FORMULAS.items()}}
"""Functions that return the operations of a call, by operator packet; called with the operator's arguments and ``out_val=`` its result."""


class ModelOperations(TorchDispatchMode):
    """Dispatch mode that counts operations, separately for recomputation.

    The formulas are those of ``torch.utils.flop_counter``: one multiply-add is two operations. Operations inside a backward with gradients
    enabled are recomputation (activation checkpointing), which the model does not need.

    Attributes:
        needed: Operations of forward and backward.
        recomputed: Operations of recomputation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = 0
        self.recomputed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and add its floating-point operations."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = COUNTED.get(func._overloadpacket)
        if formula is not None:
            operations = formula(*args, **kwargs, out_val=result)
            if in_backward() and torch.is_grad_enabled():
                self.recomputed += operations
            else:
                self.needed += operations
        return result


class _Untracked(AbstractContextManager["_Untracked"]):
    """Replacement of the counter's own module tracker, whose autograd hooks fail under recomputation."""

    parents = frozenset({"Global"})

    def __exit__(self, *_: object) -> None:
        return None


class OperationCounter(AbstractContextManager["OperationCounter"]):
    """Counter of the operations inside the ``with``, with those of backward and recomputation; may be entered several times.

    Counts like ``torch.utils.flop_counter``: matrix products, convolutions and attention; one multiply-add is two operations. Inside,
    ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` do not use their fast path of evaluation: it is one kernel, and its inputs
    may be nested tensors, whose shapes no formula can read.
    """

    def __init__(self) -> None:
        self._before = 0
        self._fast_path = True
        self._running: FlopCounterMode | None = None

    @property
    def total(self) -> int:
        """Return the number of operations so far."""
        return self._before + (self._running.get_total_flops() if self._running is not None else 0)

    def __enter__(self) -> OperationCounter:
        counter = FlopCounterMode(display=False, custom_mapping=dict(FORMULAS))
        counter.mod_tracker = _Untracked()  # type: ignore[assignment]
        counter.__enter__()
        self._running = counter
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        running, total = self._running, self.total
        self._running = None
        self._before = total
        if running is not None:
            torch.backends.mha.set_fastpath_enabled(self._fast_path)
            running.__exit__(kind, error, trace)


@dataclass
class Cost:
    """Costs of the calls of one module, including its submodules.

    Attributes:
        calls: Number of calls.
        flops: Floating-point operations.
        seconds: Seconds, including gathers of its parameters.
    """

    calls: int = 0
    flops: int = 0
    seconds: float = 0.0


@dataclass
class ModuleCost:
    """A module in the tree of a report.

    Attributes:
        name: Name of the module in its parent.
        kind: Name of its class.
        params: Number of elements of its parameters before sharding; shared ones count once.
        cost: Costs of its calls; for a container that is never called, the sum over its children.
        children: Its submodules.
    """

    name: str
    kind: str
    params: int
    cost: Cost
    children: list[ModuleCost] = field(default_factory=list)


@dataclass
class _Frame:
    """A running call: its module, and the operations and the time at its begin."""

    module: nn.Module
    counted: int
    begin: float


class CostRecorder:
    """Recorder of the forward calls of ``model`` and its submodules between ``start`` and ``stop``.

    Calls that backward repeats (activation checkpointing) are not recorded.

    Attributes:
        model: The argument ``model``.
        total: Costs of all calls of the outermost modules.

    Args:
        model: The root module.
        ignored: Classes of modules whose operations do not count.
        counts: Whether to count operations; False measures only time, without the delay by counting.
    """

    def __init__(self, model: nn.Module, ignored: Sequence[type[nn.Module]] = (), counts: bool = True) -> None:
        self.model = model
        self.total = Cost()
        self._ignored = tuple(ignored)
        self._counter = OperationCounter() if counts else None
        self._left_out = 0  # operations of ignored modules
        self._costs: dict[nn.Module, Cost] = {}
        self._frames: list[_Frame] = []
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """Begin or continue to record."""
        for module in self.model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        if self._counter is not None:
            self._counter.__enter__()

    def stop(self) -> None:
        """Stop recording; a later ``start`` continues it."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._frames.clear()

    def cost_of(self, module: nn.Module) -> Cost:
        """Return the costs of the calls of ``module``; zeros if it was not called."""
        return self._costs.get(module, Cost())

    def take_times(self, other: CostRecorder) -> None:
        """Replace all times by the times that ``other`` measured for the same calls."""
        self.total.seconds = other.total.seconds
        for module, cost in self._costs.items():
            cost.seconds = other.cost_of(module).seconds

    def tree(self) -> ModuleCost:
        """Return all recorded costs as a tree, from the root down."""
        return self._node(type(self.model).__name__, self.model)

    def _node(self, name: str, module: nn.Module) -> ModuleCost:
        children = [self._node(child_name, child) for child_name, child in module.named_children()]
        cost = self.cost_of(module)
        if not cost.calls and children:
            cost = Cost(0, sum(child.cost.flops for child in children), sum(child.cost.seconds for child in children))
        return ModuleCost(name, type(module).__name__, count_params(module), cost, children)

    def _counted(self) -> int:
        return (self._counter.total if self._counter is not None else 0) - self._left_out

    def _enter(self, module: nn.Module, _arguments: Any) -> None:
        if not in_backward():
            self._frames.append(_Frame(module, self._counted(), _now()))

    def _leave(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        if in_backward() or not self._frames or self._frames[-1].module is not module:
            return
        frame = self._frames.pop()
        if isinstance(module, self._ignored):
            self._left_out += self._counted() - frame.counted
        cost = self._costs.setdefault(module, Cost())
        flops, seconds = self._counted() - frame.counted, _now() - frame.begin
        for entry in (cost, self.total) if not self._frames else (cost,):
            entry.calls += 1
            entry.flops += flops
            entry.seconds += seconds


def count_params(module: nn.Module) -> int:
    """Return the number of elements of all parameters before sharding; shared parameters count once."""
    return sum(full_shape(param).numel() for param in module.parameters())


def _now() -> float:
    """Return the time in seconds, after the device has finished all its work."""
    device = default_device()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
