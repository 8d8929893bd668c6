"""Rules that relate the dimensions of an operation's inputs to the dimensions of its outputs.

There is one function per family of ATen operations. It takes the operation's arguments, with a ``Value`` for every tensor, and the shapes
of the results; it unifies or blocks dims, and returns a ``Rule``. Operations in no table block all dims of their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_zero.tensor_parallel.graph import ADDITIVE, NONE, PRODUCT_LIKE, UNARY, Value
from hf_zero.tensor_parallel.product_rules import (
    along,
    attention,
    convolution,
    group_norm,
    grouped_product,
    layer_norm,
    matrix_product,
    reduction,
    sum_,
)
from hf_zero.tensor_parallel.rule import FAKE_COUNT, Handler, Rule, Shape, argument, axis_of, block_all, broadcast, fresh, opaque, values_of
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, block, cut, product, regroup, total, unify

# -- element-wise ---------------------------------------------------------------------------------------------------------

_ADDITIVE = ("add", "sub", "add_", "sub_", "rsub", "copy_")
_PRODUCT = ("mul", "mul_")
_UNARY = ("neg", "neg_", "clone", "_to_copy", "positive", "contiguous", "lift_fresh", "alias", "detach", "masked_fill", "masked_fill_")


def pointwise(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of element-wise operations with broadcasting."""
    values = values_of([args, kwargs])
    partial = NONE
    if name in _ADDITIVE and len(values) >= 2:
        partial = ADDITIVE
    elif name in _PRODUCT:
        partial = PRODUCT_LIKE if len(values) >= 2 else UNARY
    elif name in ("div", "div_"):
        partial = "divide" if len(values) >= 2 else UNARY
    elif name in _UNARY and not (name.startswith("masked_fill") and args[2] != 0 and not isinstance(args[2], Value)):
        partial = UNARY
    return Rule([broadcast(values, shape) for shape in shapes], partial)


# -- views ----------------------------------------------------------------------------------------------------------------


def view(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of views: other sizes, the same order of elements."""
    source: Value = args[0]
    found = regroup(source.dims, shapes[0]) if 0 not in shapes[0] else list(fresh(shapes[0]))
    if found is None:
        block_all([source], f"a view as {tuple(shapes[0])} cuts across the split")
        found = list(fresh(shapes[0]))
    return Rule([tuple(found)], UNARY)


def permute(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of operations that reorder dimensions."""
    dims = list(args[0].dims)
    if name in ("t", "t_", "numpy_T", "mT"):
        dims = dims[::-1] if name != "mT" else [*dims[:-2], dims[-1], dims[-2]]
    elif name in ("permute",):
        dims = [dims[index] for index in args[1]]
    elif name == "movedim":
        return opaque(name, args, kwargs, shapes)
    elif dims:
        first, second = axis_of(args[1], len(dims)), axis_of(args[2], len(dims))
        dims[first], dims[second] = dims[second], dims[first]
    return Rule([tuple(dims)], UNARY)


def squeeze(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of operations that remove dimensions of size 1."""
    dims = list(args[0].dims)
    if len(args) > 1:
        chosen = [args[1]] if isinstance(args[1], int) else list(args[1])
        gone = {axis_of(index, len(dims)) for index in chosen}
    else:
        gone = set(range(len(dims)))
    return Rule([tuple(dim for index, dim in enumerate(dims) if index not in gone or dim.size != 1)], UNARY)


def unsqueeze(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of operations that add a dimension of size 1."""
    dims = list(args[0].dims)
    dims.insert(axis_of(args[1], len(dims) + 1), SymbolicDim(1))
    return Rule([tuple(dims)], UNARY)


def expand(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of operations that repeat dimensions of size 1 without a copy."""
    dims = args[0].dims
    padded = [None] * (len(shapes[0]) - len(dims)) + list(dims)
    result = [dim if dim is not None and dim.size == size else SymbolicDim(size) for dim, size in zip(padded, shapes[0], strict=True)]
    return Rule([tuple(result)], UNARY)


def repeat(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of operations that repeat a tensor."""
    dims, repeats = args[0].dims, args[1]
    padded = [SymbolicDim(1)] * (len(repeats) - len(dims)) + list(dims)
    result = [dim if times == 1 else product([SymbolicDim(times), dim]) for dim, times in zip(padded, repeats, strict=True)]
    return Rule([tuple(result)], UNARY)


def _piece(source: Value, axis: int, start: int, stop: int) -> SymbolicDim:
    dim = cut(source.dims[axis], start, stop)
    if dim is None:
        block(source.dims[axis], f"a slice from {start} to {stop} of {source.dims[axis].size} cuts across the split")
        return SymbolicDim(max(stop - start, 0))
    return dim


def slice_(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of a slice: a range of one dimension."""
    source: Value = args[0]
    axis = axis_of(argument(args, kwargs, 1, "dim", 0), len(source.dims))
    size = source.dims[axis].size
    start, stop = argument(args, kwargs, 2, "start"), argument(args, kwargs, 3, "end")
    start, stop, step = slice(start, stop, argument(args, kwargs, 4, "step", 1)).indices(size)
    dims = list(source.dims)
    if step != 1 or stop <= start:
        block(dims[axis], "sliced with a step")
        dims[axis] = SymbolicDim(shapes[0][axis])
    else:
        dims[axis] = _piece(source, axis, start, stop)
    return Rule([tuple(dims)], UNARY)


def split(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of a split into consecutive ranges of one dimension."""
    source: Value = args[0]
    position = 1 if name == "unsafe_chunk" else 2
    axis = axis_of(argument(args, kwargs, position, "dim", 0), len(source.dims))
    found, start = [], 0
    for shape in shapes:
        dims = list(source.dims)
        dims[axis] = _piece(source, axis, start, start + shape[axis])
        start += shape[axis]
        found.append(tuple(dims))
    return Rule(found, UNARY)


def select(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of operations that take one index of a dimension (``select``) or every index (``unbind``)."""
    source: Value = args[0]
    axis = axis_of(argument(args, kwargs, 1, "dim", 0), len(source.dims))
    block(source.dims[axis], "single indices are taken from it")
    rest = tuple(dim for index, dim in enumerate(source.dims) if index != axis)
    return Rule([rest for _ in shapes], UNARY)


def cat(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of operations that concatenate tensors along a dimension, or stack them along a new one."""
    parts = [value for value in args[0] if not (name == "cat" and value.shape == (0,))]
    ndim = len(shapes[0])
    axis = axis_of(argument(args, kwargs, 1, "dim", 0), ndim)
    dims: list[SymbolicDim] = []
    for index in range(ndim):
        if index == axis:
            dims.append(total([part.dims[axis] for part in parts]) if name == "cat" else SymbolicDim(len(parts)))
            continue
        first, *others = [part.dims[index - (name == "stack" and index > axis)] for part in parts]
        for other in others:
            unify(first, other)
        dims.append(first)
    return Rule([tuple(dims)], ADDITIVE)


# -- indexing -------------------------------------------------------------------------------------------------------------


def embedding(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of an embedding, which takes rows of a table."""
    table, ids = args[0], args[1]
    block(table.dims[0], "looked up by index")
    return Rule([(*ids.dims, *table.dims[1:])])


def pick(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of gather, index_select, scatter, index_add and the like: one dimension is indexed, other dimensions of equal size
    may be split.
    """
    source: Value = args[0]
    axis = axis_of(args[1], len(source.dims))
    block(source.dims[axis], "taken by index")
    others = [value for value in values_of([args[2:], kwargs]) if value is not source]
    for value in others:
        if len(value.dims) == len(source.dims):
            block(value.dims[axis], "taken by index")
            for index, dim in enumerate(value.dims):
                if index != axis and dim.size == source.dims[index].size:
                    unify(dim, source.dims[index])
    shape = shapes[0]
    dims = [
        source.dims[index] if index != axis and source.dims[index].size == shape[index] else SymbolicDim(shape[index])
        for index in range(len(shape))
    ]
    if name.startswith(("index_add", "scatter_add")):
        return Rule([source.dims], ADDITIVE)
    return Rule([tuple(dims)], UNARY if name in ("gather", "index_select") else NONE)


def index(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of indexing with tensors: dimensions without an index may be split. A mask is an index into each of its dimensions."""
    source: Value = args[0]
    places = [item for place in args[1] for item in (_chosen_by(place) if place is not None and place.mask else [place])]
    places += [None] * (len(source.dims) - len(places))
    tensors = [place for place in places if place is not None]
    for place, dim in zip(places, source.dims, strict=True):
        if place is not None:
            block(dim, "taken by index")
    indexed = broadcast(tensors, _broadcast_shape([value.shape for value in tensors])) if tensors else ()
    chosen = [position for position, place in enumerate(places) if place is not None]
    adjacent = chosen == list(range(chosen[0], chosen[0] + len(chosen))) if chosen else True
    passing = [(position, dim) for position, dim in enumerate(source.dims) if places[position] is None]
    before = [dim for position, dim in passing if adjacent and chosen and position < chosen[0]]
    after = [dim for position, dim in passing if not (adjacent and chosen and position < chosen[0])]
    taken = (*before, *indexed, *after)
    if name != "index":
        stored = next((value for value in values_of(args[2:3])), None)
        if stored is not None:
            broadcast([Value(taken, ""), stored], [dim.size for dim in taken])
        return Rule([source.dims])
    return Rule([taken], UNARY)


def _chosen_by(mask: Value) -> list[Value]:
    indices = Value((SymbolicDim(FAKE_COUNT),), "", floating=False)
    return [indices] * len(mask.dims)


def _broadcast_shape(shapes: Sequence[Shape]) -> list[int]:
    longest = max(len(shape) for shape in shapes)
    return [max(([1] * (longest - len(shape)) + list(shape))[position] for shape in shapes) for position in range(longest)]


def pad(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of padding: dimensions that grow must be whole; the others may be split."""
    source: Value = args[0]
    dims = []
    for dim, size in zip(source.dims, shapes[0], strict=True):
        if dim.size == size:
            dims.append(dim)
        else:
            block(dim, "padded")
            dims.append(SymbolicDim(size))
    value = argument(args, kwargs, 2, "value", 0)
    return Rule([tuple(dims)], UNARY if not value else NONE)


def triangle(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of tril and triu: the last two dimensions must be whole."""
    for dim in args[0].dims[-2:]:
        block(dim, "a triangle is cut from it")
    return Rule([args[0].dims], UNARY)


def create(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of operations that make a new tensor; ``*_like`` gives it the dimensions of the given tensor."""
    values = values_of(args[:1])
    if values and name.endswith("_like") and values[0].shape == tuple(shapes[0]):
        return Rule([values[0].dims])
    return Rule([fresh(shape) for shape in shapes])


_TABLE: dict[Handler, str] = {
    view: "view _unsafe_view reshape _reshape_alias flatten unflatten _view_copy",
    permute: "permute transpose transpose_ t t_ numpy_T mT swapaxes",
    squeeze: "squeeze squeeze_",
    unsqueeze: "unsqueeze unsqueeze_",
    expand: "expand expand_as",
    repeat: "repeat",
    slice_: "slice",
    split: "split split_with_sizes unsafe_split unsafe_split_with_sizes",
    select: "select unbind",
    cat: "cat stack",
    matrix_product: "mm bmm addmm baddbmm mv dot linear",
    grouped_product: "_grouped_mm",
    attention: "scaled_dot_product_attention",
    convolution: "convolution",
    sum_: "sum",
    reduction: "mean amax amin max min prod var std var_mean std_mean any all argmax argmin logsumexp norm linalg_vector_norm",
    along: "_softmax _log_softmax softmax log_softmax cumsum cumsum_ cumprod sort topk flip roll argsort cummax",
    layer_norm: "native_layer_norm _fused_rms_norm rms_norm",
    group_norm: "native_group_norm",
    embedding: "embedding",
    pick: "gather index_select scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy_ index_fill_",
    index: "index index_put index_put_ _unsafe_index",
    pad: "constant_pad_nd",
    triangle: "tril triu tril_ triu_",
    create: "empty zeros ones full arange rand randn randint zeros_like ones_like empty_like full_like rand_like randn_like randint_like "
    "new_zeros new_empty new_ones new_full scalar_tensor eye linspace randperm empty_strided new_empty_strided tril_indices triu_indices",
    pointwise: "copy_ _to_copy clone alias detach lift_fresh native_dropout bernoulli bernoulli_ uniform_ normal_ exponential_ zero_ fill_ "
    "fill where masked_fill masked_fill_ _conj _unsafe_masked_fill view_as_real_copy",
}
HANDLERS: dict[str, Handler] = {name: handler for handler, names in _TABLE.items() for name in names.split()}
UNIFORM_NAMES = frozenset({
    "empty", "zeros", "ones", "full", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_empty", "new_ones",
    "new_full", "scalar_tensor",
})  # fmt: skip
RANDOM_NAMES = frozenset({
    "native_dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "rand", "randn", "uniform_", "normal_", "exponential_",
})  # fmt: skip
