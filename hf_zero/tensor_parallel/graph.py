"""Elements of a traced model: values, operations, calls of modules, calls of functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim

# Effects of an operation on a partial sum (a tensor that must still be summed over ranks).
NONE, UNARY, ADDITIVE, PRODUCT_LIKE = "none", "unary", "additive", "product"

PARAMETER, BUFFER, INPUT, CONSTANT, UNIFORM, RESULT = "parameter", "buffer", "input", "constant", "uniform", "result"


@dataclass(eq=False)
class Value:
    """One tensor of the trace at one time.

    Attributes:
        dims: One symbolic dim per dimension.
        origin: Kind of its source; ``UNIFORM`` is a tensor filled with one number.
        stack: Module calls that were running when it was made, outermost first.
        needs_grad: A gradient reaches it.
        floating: Its elements are floating point numbers.
        name: Name of the parameter or buffer; empty for other tensors.
        mask: Its elements are booleans or bytes, which select places.
    """

    dims: tuple[SymbolicDim, ...]
    origin: str
    stack: tuple[Call, ...] = ()
    needs_grad: bool = False
    floating: bool = True
    name: str = ""
    mask: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the dimensions."""
        return tuple(dim.size for dim in self.dims)


@dataclass(eq=False)
class Call:
    """One call of a module. ``inputs`` and ``outputs`` are keyed by the path of a tensor in the arguments ("0", "mask", "2.0")."""

    path: str
    kind: type
    inputs: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)


@dataclass(eq=False)
class Op:
    """One operation of the trace.

    Attributes:
        name: Name of the operation, for messages.
        inputs: Tensors read, in order.
        outputs: Tensors made.
        stack: Module calls running, outermost first.
        partial: Effect of the operation on a partial sum.
        contracted: Dims summed over: where one is split, the output is a partial sum.
        bias: Index of an input that is added after the contraction.
        random: The operation draws random numbers.
        gathers: Index of the output dimension that an opaque norm needs whole, or None.
    """

    name: str
    inputs: list[Value]
    outputs: list[Value]
    stack: tuple[Call, ...]
    partial: str = NONE
    contracted: tuple[SymbolicDim, ...] = ()
    bias: int | None = None
    random: bool = False
    gathers: bool = False

    @property
    def place(self) -> str:
        """Return the path of the module whose code runs the operation."""
        return self.stack[-1].path if self.stack else ""


@dataclass(eq=False)
class FunctionCall:
    """One call of a torch function by the model's code, with its result (tensors are replaced by ``Value``)."""

    name: str
    result: Any
    place: str


@dataclass
class Graph:
    """Trace of one forward.

    Attributes:
        events: Operations and ends of module calls, in order.
        functions: Calls of torch functions, in order.
        parameters: Values of parameters, by name in the model.
        calls: All calls of modules.
        opaque: Paths of norms that are recorded as one operation.
        values: Tensors that do not depend on a parameter were computed; [Note: values] in ``trace.py``.
    """

    events: list[Op | Call] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    parameters: dict[str, Value] = field(default_factory=dict)
    buffers: dict[str, Value] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    opaque: frozenset[str] = frozenset()
    values: bool = False

    def ops(self) -> list[Op]:
        """Return the operations, in order."""
        return [event for event in self.events if isinstance(event, Op)]
