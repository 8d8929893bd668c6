"""How torch's operations relate the dimensions of what they read to the dimensions of what they make.

One function per family of operations of ATen. Each gets the operation's arguments with ``Value`` for every tensor and the shapes
of the results, joins or blocks atoms, and returns a ``Rule``. Operations in no table block all that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.tensor_parallel.atoms import Atom, block, cut, product, regroup, total, unify
from hf_zero.tensor_parallel.graph import ADDITIVE, NONE, PRODUCT_LIKE, UNARY, Value

Shape = Sequence[int]
FAKE_COUNT = 2  # how many places ``nonzero`` and masks choose on tensors without values


@dataclass
class Rule:
    """Dimensions of the results, and what the operation does to partial sums; see ``Op``."""

    dims: list[tuple[Atom, ...]]
    partial: str = NONE
    contracted: tuple[Atom, ...] = ()
    bias: int | None = None


Handler = Callable[[str, list[Any], dict[str, Any], list[Shape]], Rule]


def fresh(shape: Shape) -> tuple[Atom, ...]:
    """New atoms of these sizes."""
    return tuple(Atom(size) for size in shape)


def values_of(args: Any) -> list[Value]:
    """All values in nested arguments, in order."""
    if isinstance(args, Value):
        return [args]
    if isinstance(args, (list, tuple)):
        return [value for item in args for value in values_of(item)]
    if isinstance(args, dict):
        return [value for item in args.values() for value in values_of(item)]
    return []


def block_all(values: Sequence[Value], reason: str) -> None:
    """Blocks every dimension of ``values``."""
    for value in values:
        for atom in value.dims:
            block(atom, reason)


def _dim(index: int, ndim: int) -> int:
    return index % ndim if ndim else 0


def _argument(args: list[Any], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def broadcast(values: Sequence[Value], shape: Shape) -> tuple[Atom, ...]:
    """Joins dimensions that meet in an element-wise operation; the dimensions of its result."""
    dims: list[Atom] = []
    for position in range(1, len(shape) + 1):
        found: Atom | None = None
        for value in values:
            if len(value.dims) >= position and value.dims[-position].size == shape[-position] != 1:
                if found is None:
                    found = value.dims[-position]
                else:
                    unify(found, value.dims[-position])
        dims.append(found if found is not None else Atom(shape[-position]))
    return tuple(dims[::-1])


# -- element-wise ---------------------------------------------------------------------------------------------------------

_ADDITIVE = ("add", "sub", "add_", "sub_", "rsub", "copy_")
_PRODUCT = ("mul", "mul_")
_UNARY = ("neg", "neg_", "clone", "_to_copy", "positive", "contiguous", "lift_fresh", "alias", "detach", "masked_fill", "masked_fill_")


def pointwise(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Element-wise with broadcasting."""
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
    """Other sizes, same order of elements."""
    source: Value = args[0]
    found = regroup(source.dims, shapes[0]) if 0 not in shapes[0] else list(fresh(shapes[0]))
    if found is None:
        block_all([source], f"a view as {tuple(shapes[0])} cuts across the split")
        found = list(fresh(shapes[0]))
    return Rule([tuple(found)], UNARY)


def permute(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Dimensions in another order."""
    dims = list(args[0].dims)
    if name in ("t", "t_", "numpy_T", "mT"):
        dims = dims[::-1] if name != "mT" else [*dims[:-2], dims[-1], dims[-2]]
    elif name in ("permute",):
        dims = [dims[index] for index in args[1]]
    elif name == "movedim":
        return opaque(name, args, kwargs, shapes)
    elif dims:
        first, second = _dim(args[1], len(dims)), _dim(args[2], len(dims))
        dims[first], dims[second] = dims[second], dims[first]
    return Rule([tuple(dims)], UNARY)


def squeeze(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Removes dimensions of size 1."""
    dims = list(args[0].dims)
    if len(args) > 1:
        chosen = [args[1]] if isinstance(args[1], int) else list(args[1])
        gone = {_dim(index, len(dims)) for index in chosen}
    else:
        gone = set(range(len(dims)))
    return Rule([tuple(atom for index, atom in enumerate(dims) if index not in gone or atom.size != 1)], UNARY)


def unsqueeze(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Adds a dimension of size 1."""
    dims = list(args[0].dims)
    dims.insert(_dim(args[1], len(dims) + 1), Atom(1))
    return Rule([tuple(dims)], UNARY)


def expand(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Repeats dimensions of size 1 without a copy."""
    dims = args[0].dims
    padded = [None] * (len(shapes[0]) - len(dims)) + list(dims)
    result = [atom if atom is not None and atom.size == size else Atom(size) for atom, size in zip(padded, shapes[0], strict=True)]
    return Rule([tuple(result)], UNARY)


def repeat(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Tiles."""
    dims, repeats = args[0].dims, args[1]
    padded = [Atom(1)] * (len(repeats) - len(dims)) + list(dims)
    result = [atom if times == 1 else product([Atom(times), atom]) for atom, times in zip(padded, repeats, strict=True)]
    return Rule([tuple(result)], UNARY)


def _piece(source: Value, dim: int, start: int, stop: int) -> Atom:
    atom = cut(source.dims[dim], start, stop)
    if atom is None:
        block(source.dims[dim], f"a slice from {start} to {stop} of {source.dims[dim].size} cuts across the split")
        return Atom(max(stop - start, 0))
    return atom


def slice_(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """A range of one dimension."""
    source: Value = args[0]
    dim = _dim(_argument(args, kwargs, 1, "dim", 0), len(source.dims))
    size = source.dims[dim].size
    start, stop = _argument(args, kwargs, 2, "start"), _argument(args, kwargs, 3, "end")
    start, stop, step = slice(start, stop, _argument(args, kwargs, 4, "step", 1)).indices(size)
    dims = list(source.dims)
    if step != 1 or stop <= start:
        block(dims[dim], "sliced with a step")
        dims[dim] = Atom(shapes[0][dim])
    else:
        dims[dim] = _piece(source, dim, start, stop)
    return Rule([tuple(dims)], UNARY)


def split(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Consecutive ranges of one dimension."""
    source: Value = args[0]
    position = 1 if name == "unsafe_chunk" else 2
    dim = _dim(_argument(args, kwargs, position, "dim", 0), len(source.dims))
    found, start = [], 0
    for shape in shapes:
        dims = list(source.dims)
        dims[dim] = _piece(source, dim, start, start + shape[dim])
        start += shape[dim]
        found.append(tuple(dims))
    return Rule(found, UNARY)


def select(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """One index of a dimension (``select``) or each (``unbind``)."""
    source: Value = args[0]
    dim = _dim(_argument(args, kwargs, 1, "dim", 0), len(source.dims))
    block(source.dims[dim], "single indices are taken from it")
    rest = tuple(atom for index, atom in enumerate(source.dims) if index != dim)
    return Rule([rest for _ in shapes], UNARY)


def cat(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Tensors one behind the other along a dimension, or stacked along a new one."""
    parts = [value for value in args[0] if not (name == "cat" and value.shape == (0,))]
    ndim = len(shapes[0])
    dim = _dim(_argument(args, kwargs, 1, "dim", 0), ndim)
    dims: list[Atom] = []
    for index in range(ndim):
        if index == dim:
            dims.append(total([part.dims[dim] for part in parts]) if name == "cat" else Atom(len(parts)))
            continue
        atoms = [part.dims[index - (name == "stack" and index > dim)] for part in parts]
        for other in atoms[1:]:
            unify(atoms[0], other)
        dims.append(atoms[0])
    return Rule([tuple(dims)], ADDITIVE)


# -- products -------------------------------------------------------------------------------------------------------------


def matrix_product(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """``mm``, ``bmm``, ``addmm``, ``baddbmm``, ``mv``, ``dot``, ``linear``."""
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
    """``_grouped_mm``: rows by expert (tokens, in) times (experts, in, out)."""
    left, right = args[0], args[1]
    if len(left.dims) != 2 or len(right.dims) != 3:
        return opaque(name, args, kwargs, shapes)
    unify(left.dims[1], right.dims[1])
    block(left.dims[0], "rows are grouped by expert")
    block(right.dims[0], "experts are chosen by index")
    return Rule([(Atom(shapes[0][0]), right.dims[2])], PRODUCT_LIKE, (left.dims[1],))


def attention(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """``scaled_dot_product_attention``: heads and batch pass, grouped key/value heads are a factor of the query heads."""
    query, key, value = args[0], args[1], args[2]
    mask = _argument(args, kwargs, 3, "attn_mask")
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
    for atom in (query.dims[-1], key.dims[-1]):
        block(atom, "summed inside a softmax")
    for atom in (query.dims[-2], key.dims[-2], value.dims[-2]):
        block(atom, "attention reads all positions")
    if mask is not None:
        scores = (*query.dims[:-1], key.dims[-2])
        broadcast([Value(scores, ""), mask], [atom.size for atom in scores])
    return Rule([(*query.dims[:-1], value.dims[-1])])


def convolution(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Channels are contracted group by group; groups pass."""
    source, weight, bias = args[0], args[1], args[2]
    transposed, groups = args[6], args[8]
    for atom in source.dims[2:]:
        block(atom, "a convolution runs along it")
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
    return {_dim(index, len(source.dims)) for index in ([dims] if isinstance(dims, int) else dims)}


def _without(source: Value, gone: set[int], shape: Shape) -> tuple[Atom, ...]:
    keeps = len(shape) == len(source.dims)
    kept = [None if index in gone else atom for index, atom in enumerate(source.dims)]
    if keeps:
        return tuple(atom if atom is not None else Atom(1) for atom in kept)
    return tuple(atom for atom in kept if atom is not None)


def sum_(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """A sum over a split dimension is a partial sum."""
    source: Value = args[0]
    gone = _reduced(source, _argument(args, kwargs, 1, "dim"))
    return Rule([_without(source, gone, shapes[0])], UNARY, tuple(source.dims[index] for index in sorted(gone)))


def reduction(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """mean, max, norm, ...: the dimensions must be whole."""
    source: Value = args[0]
    position = 2 if name in ("norm", "linalg_vector_norm") else 1
    dims = _argument(args, kwargs, position, "dim")
    gone = _reduced(source, dims if not isinstance(dims, (float, bool)) else None)
    for index in gone:
        block(source.dims[index], f"{name} needs all of it")
    return Rule([_without(source, gone, shape) for shape in shapes], UNARY if name == "mean" else NONE)


def along(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """softmax, cumsum, sort, topk, ...: one dimension must be whole, the others pass."""
    source: Value = args[0]
    position = 2 if name == "topk" else 1
    dims = _argument(args, kwargs, position, "dim", _argument(args, kwargs, position, "dims", -1))
    chosen = {_dim(index, len(source.dims)) for index in ([dims] if isinstance(dims, int) else dims)} if source.dims else set()
    for index in chosen:
        block(source.dims[index], f"{name} needs all of it")
    results = []
    for shape in shapes:
        if len(shape) != len(source.dims):
            return opaque(name, args, kwargs, shapes)
        results.append(tuple(Atom(size) if index in chosen else source.dims[index] for index, size in enumerate(shape)))
    return Rule(results)


def layer_norm(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Normalises over the last dimensions."""
    source, normalized, weight = args[0], args[1], _argument(args, kwargs, 2, "weight")
    others = [value for value in (weight, _argument(args, kwargs, 3, "bias")) if isinstance(value, Value)]
    for atom in source.dims[len(source.dims) - len(normalized) :]:
        block(atom, "normalised over")
    broadcast([source, *others], shapes[0])
    return Rule([source.dims if len(shape) == len(source.dims) else fresh(shape) for shape in shapes])


def group_norm(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Normalises inside groups of channels; groups pass."""
    source, groups = args[0], args[6]
    found = regroup([source.dims[1]], [groups, source.dims[1].size // groups])
    if found is None:
        return opaque(name, args, kwargs, shapes)
    for atom in (found[1], *source.dims[2:]):
        block(atom, "normalised over")
    for value in args[1:3]:
        if isinstance(value, Value):
            unify(value.dims[0], source.dims[1])
    return Rule([source.dims, *[fresh(shape) for shape in shapes[1:]]])


# -- indexing -------------------------------------------------------------------------------------------------------------


def embedding(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Rows of a table."""
    table, ids = args[0], args[1]
    block(table.dims[0], "looked up by index")
    return Rule([(*ids.dims, *table.dims[1:])])


def pick(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """gather, index_select, scatter, index_add, ...: one dimension is indexed, equal others pass."""
    source: Value = args[0]
    dim = _dim(args[1], len(source.dims))
    block(source.dims[dim], "taken by index")
    others = [value for value in values_of([args[2:], kwargs]) if value is not source]
    for value in others:
        if len(value.dims) == len(source.dims):
            block(value.dims[dim], "taken by index")
            for index, atom in enumerate(value.dims):
                if index != dim and atom.size == source.dims[index].size:
                    unify(atom, source.dims[index])
    shape = shapes[0]
    dims = [
        source.dims[index] if index != dim and source.dims[index].size == shape[index] else Atom(shape[index])
        for index in range(len(shape))
    ]
    if name.startswith(("index_add", "scatter_add")):
        return Rule([source.dims], ADDITIVE)
    return Rule([tuple(dims)], UNARY if name in ("gather", "index_select") else NONE)


def index(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Indexing with tensors: dimensions without an index pass. A mask is an index into each of its dimensions."""
    source: Value = args[0]
    places = [item for place in args[1] for item in (_chosen_by(place) if place is not None and place.mask else [place])]
    places += [None] * (len(source.dims) - len(places))
    tensors = [place for place in places if place is not None]
    for place, atom in zip(places, source.dims, strict=True):
        if place is not None:
            block(atom, "taken by index")
    indexed = broadcast(tensors, _broadcast_shape([value.shape for value in tensors])) if tensors else ()
    chosen = [position for position, place in enumerate(places) if place is not None]
    adjacent = chosen == list(range(chosen[0], chosen[0] + len(chosen))) if chosen else True
    passing = [(position, atom) for position, atom in enumerate(source.dims) if places[position] is None]
    before = [atom for position, atom in passing if adjacent and chosen and position < chosen[0]]
    after = [atom for position, atom in passing if not (adjacent and chosen and position < chosen[0])]
    taken = (*before, *indexed, *after)
    if name != "index":
        stored = next((value for value in values_of(args[2:3])), None)
        if stored is not None:
            broadcast([Value(taken, ""), stored], [atom.size for atom in taken])
        return Rule([source.dims])
    return Rule([taken], UNARY)


def _chosen_by(mask: Value) -> list[Value]:
    indices = Value((Atom(FAKE_COUNT),), "", floating=False)
    return [indices] * len(mask.dims)


def _broadcast_shape(shapes: Sequence[Shape]) -> list[int]:
    longest = max(len(shape) for shape in shapes)
    return [max(([1] * (longest - len(shape)) + list(shape))[position] for shape in shapes) for position in range(longest)]


def pad(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Dimensions that grow must be whole; the others pass."""
    source: Value = args[0]
    dims = []
    for atom, size in zip(source.dims, shapes[0], strict=True):
        if atom.size == size:
            dims.append(atom)
        else:
            block(atom, "padded")
            dims.append(Atom(size))
    value = _argument(args, kwargs, 2, "value", 0)
    return Rule([tuple(dims)], UNARY if not value else NONE)


def triangle(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """tril, triu: the last two dimensions must be whole."""
    for atom in args[0].dims[-2:]:
        block(atom, "a triangle is cut from it")
    return Rule([args[0].dims], UNARY)


def create(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Makes a tensor of no other's values; ``*_like`` has the dimensions of its model."""
    values = values_of(args[:1])
    if values and name.endswith("_like") and values[0].shape == tuple(shapes[0]):
        return Rule([values[0].dims])
    return Rule([fresh(shape) for shape in shapes])


def opaque(name: str, args: list[Any], kwargs: dict[str, Any], shapes: list[Shape]) -> Rule:
    """Nothing is known: all that is read must be whole."""
    block_all(values_of([args, kwargs]), f"{name} needs all of it")
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
UNIFORM_NAMES = frozenset(
    [
        "empty",
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_empty",
        "new_ones",
        "new_full",
        "scalar_tensor",
    ]
)
RANDOM_NAMES = frozenset(
    ["native_dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "rand", "randn", "uniform_", "normal_", "exponential_"]
)
