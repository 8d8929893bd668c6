"""Rules of operations that compute over whole dimensions: products, attention, convolutions, reductions, normalisation."""

from __future__ import annotations

from typing import Any

from hf_zero.tensor_parallel.graph import NONE, PRODUCT_LIKE, UNARY, Value
from hf_zero.tensor_parallel.rule import Rule, Shape, argument, axis_of, broadcast, fresh, opaque
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, block, product, regroup, unify

# -- products -------------------------------------------------------------------------------------------------------------


def matrix_product(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of ``mm``, ``bmm``, ``addmm``, ``baddbmm``, ``mv``, ``dot``, ``linear``."""
    bias = None
    if name in ("addmm", "baddbmm"):
        bias, left, right = args[0], args[1], args[2]
    elif name == "linear":
        left, right = args[0], args[1]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
    else:
        left, right = args[0], args[1]
    inner_left = left.dims[-1]
    if name == "linear":
        inner_right, dims = right.dims[-1], [*left.dims[:-1], *right.dims[:-1]]
    elif len(right.dims) == 1:
        inner_right, dims = right.dims[0], list(left.dims[:-1])
    else:
        inner_right, dims = right.dims[-2], [*left.dims[:-1], right.dims[-1]]
        if len(right.dims) == 3 == len(left.dims):
            unify(left.dims[0], right.dims[0])
    unify(inner_left, inner_right)
    if bias is not None:
        broadcast([Value(tuple(dims), ""), bias], shapes[0])
    position = None if bias is None else (0 if name != "linear" else 2)
    return Rule([tuple(dims)], PRODUCT_LIKE, (inner_left,), position)


def grouped_product(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of ``_grouped_mm``: rows by expert (tokens, in) times (experts, in, out)."""
    left, right = args[0], args[1]
    if len(left.dims) != 2 or len(right.dims) != 3:
        return opaque(name, args, kwargs, shapes)
    unify(left.dims[1], right.dims[1])
    block(left.dims[0], "rows are grouped by expert")
    block(right.dims[0], "experts are chosen by index")
    return Rule([(SymbolicDim(shapes[0][0]), right.dims[2])], PRODUCT_LIKE, (left.dims[1],))


def attention(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of ``scaled_dot_product_attention``: heads and batch may be split, grouped key/value heads are a factor of the
    query heads.
    """
    query, key, value = args[0], args[1], args[2]
    mask = argument(args, kwargs, 3, "attn_mask")
    for other in (key, value):
        for mine, theirs in zip(query.dims[:-2], other.dims[:-2], strict=False):
            if mine.size == theirs.size:
                unify(mine, theirs)
            elif theirs.size > 1 and mine.size % theirs.size == 0:
                heads = regroup([mine], [theirs.size, mine.size // theirs.size])
                if heads is None:
                    block(mine, "query heads do not group by key heads")
                else:
                    unify(heads[0], theirs)
    for dim in (query.dims[-1], key.dims[-1]):
        block(dim, "summed inside a softmax")
    for dim in (query.dims[-2], key.dims[-2], value.dims[-2]):
        block(dim, "attention reads all positions")
    if mask is not None:
        scores = (*query.dims[:-1], key.dims[-2])
        broadcast([Value(scores, ""), mask], [dim.size for dim in scores])
    return Rule([(*query.dims[:-1], value.dims[-1])])


def convolution(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of convolutions: channels are contracted group by group; groups may be split."""
    source, weight, bias = args[0], args[1], args[2]
    transposed, groups = args[6], args[8]
    for dim in source.dims[2:]:
        block(dim, "a convolution runs along it")
    incoming = regroup([source.dims[1]], [groups, source.dims[1].size // groups])
    if transposed:
        outer = regroup([weight.dims[0]], [groups, weight.dims[0].size // groups])
        if incoming is None or outer is None:
            return opaque(name, args, kwargs, shapes)
        unify(incoming[0], outer[0])
        unify(incoming[1], outer[1])
        channels = product([outer[0], weight.dims[1]])
        contracted = outer[1]
    else:
        outer = regroup([weight.dims[0]], [groups, weight.dims[0].size // groups])
        if incoming is None or outer is None:
            return opaque(name, args, kwargs, shapes)
        unify(incoming[0], outer[0])
        unify(incoming[1], weight.dims[1])
        channels, contracted = weight.dims[0], weight.dims[1]
    if bias is not None:
        unify(bias.dims[0], channels)
    dims = (source.dims[0], channels, *fresh(shapes[0][2:]))
    return Rule([dims], PRODUCT_LIKE, (contracted,), None if bias is None else 2)


# -- reductions and normalisation -----------------------------------------------------------------------------------------


def _reduced(source: Value, dims: Any) -> set[int]:
    if dims is None or dims == []:
        return set(range(len(source.dims)))
    return {axis_of(index, len(source.dims)) for index in ([dims] if isinstance(dims, int) else dims)}


def _without(source: Value, gone: set[int], shape: Shape) -> tuple[SymbolicDim, ...]:
    keeps = len(shape) == len(source.dims)
    kept = [None if index in gone else dim for index, dim in enumerate(source.dims)]
    if keeps:
        return tuple(dim if dim is not None else SymbolicDim(1) for dim in kept)
    return tuple(dim for dim in kept if dim is not None)


def sum_(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of sums: a sum over a split dimension is a partial sum."""
    source: Value = args[0]
    gone = _reduced(source, argument(args, kwargs, 1, "dim"))
    return Rule([_without(source, gone, shapes[0])], UNARY, tuple(source.dims[index] for index in sorted(gone)))


def reduction(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of mean, max, norm and other reductions: the reduced dimensions must be whole."""
    source: Value = args[0]
    position = 2 if name in ("norm", "linalg_vector_norm") else 1
    dims = argument(args, kwargs, position, "dim")
    gone = _reduced(source, dims if not isinstance(dims, (float, bool)) else None)
    for index in gone:
        block(source.dims[index], f"{name} needs all of it")
    return Rule([_without(source, gone, shape) for shape in shapes], UNARY if name == "mean" else NONE)


def along(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of softmax, cumsum, sort, topk and the like: one dimension must be whole, the others may be split."""
    source: Value = args[0]
    position = 2 if name == "topk" else 1
    dims = argument(args, kwargs, position, "dim", argument(args, kwargs, position, "dims", -1))
    chosen = {axis_of(index, len(source.dims)) for index in ([dims] if isinstance(dims, int) else dims)} if source.dims else set()
    for index in chosen:
        block(source.dims[index], f"{name} needs all of it")
    results = []
    for shape in shapes:
        if len(shape) != len(source.dims):
            return opaque(name, args, kwargs, shapes)
        results.append(tuple(SymbolicDim(size) if index in chosen else source.dims[index] for index, size in enumerate(shape)))
    return Rule(results)


def layer_norm(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of layer norms: the normalised last dimensions must be whole."""
    source, normalized, weight = args[0], args[1], argument(args, kwargs, 2, "weight")
    others = [value for value in (weight, argument(args, kwargs, 3, "bias")) if isinstance(value, Value)]
    for dim in source.dims[len(source.dims) - len(normalized) :]:
        block(dim, "normalised over")
    broadcast([source, *others], shapes[0])
    return Rule([source.dims if len(shape) == len(source.dims) else fresh(shape) for shape in shapes])


def group_norm(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Apply the rule of group norms: the dimensions inside a group must be whole, groups may be split."""
    source, groups = args[0], args[6]
    found = regroup([source.dims[1]], [groups, source.dims[1].size // groups])
    if found is None:
        return opaque(name, args, kwargs, shapes)
    for dim in (found[1], *source.dims[2:]):
        block(dim, "normalised over")
    for value in args[1:3]:
        if isinstance(value, Value):
            unify(value.dims[0], source.dims[1])
    return Rule([source.dims, *[fresh(shape) for shape in shapes[1:]]])
