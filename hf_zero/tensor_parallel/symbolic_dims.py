"""Symbolic dims: the parts that the dimensions of tensors consist of, and which dims are the same.

[Note: symbolic dims] A dimension is a ``SymbolicDim`` of some size, called dim below. Code that views ``(heads * width)`` as
``(heads, width)`` shows that the dim is a *product* of two; code that cuts a fused projection into query, key and value shows that it
is a *sum* of three. Code that adds two tensors shows that their dims are the same. A model runs once on tensors without values while
these facts are recorded. The record has, for each dimension of each parameter, its parts and their other uses: the heads of a query
projection, of the attention scores, of a table of relative positions and of the output projection's input are one dim. Splitting that
dim splits the model.

Equal dims are joined with union-find; a dim that some operation needs whole is *blocked* with the reason.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

PRODUCT, SUM = "product", "sum"


class SymbolicDim:
    """One dimension, or a part of a dimension.

    Attributes:
        size: Number of indices.
        kind: None for a dim that is not divided into parts, else ``PRODUCT`` (major factor first) or ``SUM``.
        parts: The dims that it consists of.
        blocked: Reason why it cannot be split; empty if it can.
    """

    __slots__ = ("size", "kind", "parts", "blocked", "_link")

    def __init__(self, size: int, kind: str | None = None, parts: Sequence[SymbolicDim] = ()) -> None:
        self.size = size
        self.kind = kind
        self.parts = tuple(parts)
        self.blocked = ""
        self._link: SymbolicDim | None = None

    def find(self) -> SymbolicDim:
        """Return the representative of all dims that are the same as this one (union-find)."""
        dim = self
        while dim._link is not None:
            dim = dim._link
        while self._link is not None and self._link is not dim:
            self._link, self = dim, self._link
        return dim

    def become(self, other: SymbolicDim) -> None:
        """Make this dim, which has no parts yet, the same as ``other``."""
        root, other = self.find(), other.find()
        if root is other:
            return
        root._link = other
        if root.blocked:
            block(other, root.blocked)

    def refine(self, kind: str, parts: Sequence[SymbolicDim]) -> None:
        """Divide this dim into ``parts``, which are factors or segments."""
        root = self.find()
        root.kind, root.parts = kind, tuple(parts)
        if root.blocked:
            for part in parts:
                block(part, root.blocked)

    def __repr__(self) -> str:
        dim = self.find()
        if dim.kind is None:
            return f"{dim.size}"
        return f"({(' * ' if dim.kind == PRODUCT else ' + ').join(map(repr, dim.parts))})"


def leaves(dim: SymbolicDim) -> Iterator[SymbolicDim]:
    """Yield the dims below ``dim`` that have no parts."""
    dim = dim.find()
    if dim.kind is None:
        yield dim
    for part in dim.parts:
        yield from leaves(part)


def block(dim: SymbolicDim, reason: str) -> None:
    """Record that no leaf of ``dim`` can be split; the first reason is kept."""
    for leaf in leaves(dim):
        if leaf.size > 1 and not leaf.blocked:
            leaf.blocked = reason


def factors(dim: SymbolicDim) -> list[SymbolicDim]:
    """Return the factors of ``dim``, major first, without factors of size 1; sums are not divided."""
    dim = dim.find()
    if dim.kind == PRODUCT:
        return [factor for part in dim.parts for factor in factors(part)]
    if dim.kind == SUM:
        solid = [part for part in dim.parts if part.size > 0]
        if len(solid) == 1:
            return factors(solid[0])
    return [dim] if dim.size != 1 else []


def product(parts: Sequence[SymbolicDim]) -> SymbolicDim:
    """Return a dim with these factors, major first."""
    flat = [factor for part in parts for factor in factors(part)]
    if len(flat) == 1:
        return flat[0]
    return SymbolicDim(math.prod(part.size for part in parts), PRODUCT, flat) if flat else SymbolicDim(1)


def total(parts: Sequence[SymbolicDim]) -> SymbolicDim:
    """Return a dim with these segments, one after the other."""
    flat: list[SymbolicDim] = []
    for part in parts:
        part = part.find()
        flat.extend(part.parts if part.kind == SUM else [part])
    flat = [part for part in flat if part.size]
    if not flat:
        return SymbolicDim(0)
    return flat[0] if len(flat) == 1 else SymbolicDim(sum(part.size for part in flat), SUM, flat)


def split_factor(dim: SymbolicDim, inner: int) -> tuple[SymbolicDim, SymbolicDim] | None:
    """Divide a single factor into (major, minor of size ``inner``); return None if that is not possible."""
    dim = dim.find()
    if inner <= 0 or dim.size % inner:
        return None
    if dim.kind is None:
        major, minor = SymbolicDim(dim.size // inner), SymbolicDim(inner)
        dim.refine(PRODUCT, [major, minor])
        return major, minor
    if dim.kind == SUM and all(part.size % inner == 0 for part in dim.parts):
        minor = SymbolicDim(inner)
        majors = []
        for part in dim.parts:
            major = SymbolicDim(part.size // inner)
            unify(part, SymbolicDim(part.size, PRODUCT, [major, minor]))
            majors.append(major)
        major = total(majors)
        dim.kind, dim.parts = PRODUCT, (major, minor)
        return major, minor
    return None


def cut(dim: SymbolicDim, start: int, stop: int) -> SymbolicDim | None:
    """Return the dim of the indices ``start`` to ``stop`` of ``dim``; None if its parts cannot be cut there."""
    dim = dim.find()
    if start == 0 and stop == dim.size:
        return dim
    if dim.kind is None:
        sizes = [size for size in (start, stop - start, dim.size - stop) if size]
        dim.refine(SUM, [SymbolicDim(size) for size in sizes])
    if dim.kind == PRODUCT:
        parts = factors(dim)
        inner = math.prod(part.size for part in parts[1:])
        if start % inner or stop % inner:
            return None
        major = cut(parts[0], start // inner, stop // inner)
        return None if major is None else product([major, *parts[1:]])
    return _cut_sum(dim, start, stop)


def _cut_sum(dim: SymbolicDim, start: int, stop: int) -> SymbolicDim | None:
    """Cut a sum like ``cut``; divide segments where the cut is inside them."""
    kept: list[SymbolicDim] = []
    segments: list[SymbolicDim] = []
    offset = 0
    for part in dim.parts:
        low, high = max(start - offset, 0), min(stop - offset, part.size)
        if low >= high or (low == 0 and high == part.size):
            pieces = [part]
        else:
            bounds = (0, low, high, part.size)
            found = [cut(part, a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
            if any(piece is None for piece in found):
                return None
            pieces = [piece for piece in found if piece is not None]
        inner = offset
        for piece in pieces:
            if inner >= start and inner + piece.size <= stop:
                kept.append(piece)
            inner += piece.size
        segments.extend(pieces)
        offset += part.size
    dim.parts = tuple(segments)
    return total(kept) if kept else SymbolicDim(0)


def unify(first: SymbolicDim, second: SymbolicDim) -> None:
    """Record that two dims are the same; block both if their known parts do not agree."""
    first, second = first.find(), second.find()
    if first is second or first.size == second.size == 1:
        return
    if first.size != second.size:
        _disagree(first, second)
    elif first.kind is None:
        first.become(second)
    elif second.kind is None:
        second.become(first)
    elif first.kind == second.kind == PRODUCT:
        _unify_products(first, second)
    elif first.kind == second.kind == SUM:
        _unify_sums(first, second)
    else:
        _unify_mixed(*((first, second) if first.kind == PRODUCT else (second, first)))


def _disagree(first: SymbolicDim, second: SymbolicDim) -> None:
    reason = f"used as {first} and as {second}"
    block(first, reason)
    block(second, reason)


def _unify_products(first: SymbolicDim, second: SymbolicDim) -> None:
    left, right = factors(first), factors(second)
    while left and right:
        big, small = (left, right) if left[-1].size >= right[-1].size else (right, left)
        if big[-1].size == small[-1].size:
            unify(big.pop(), small.pop())
            continue
        parts = split_factor(big[-1], small[-1].size)
        if parts is None:
            _disagree(first, second)
            return
        big.pop()
        big.extend(factors(parts[0]))
        unify(parts[1], small.pop())


def _unify_sums(first: SymbolicDim, second: SymbolicDim) -> None:
    bounds = sorted({*_bounds(first), *_bounds(second)})
    left, right = _divided(first, bounds), _divided(second, bounds)
    if left is None or right is None:
        _disagree(first, second)
        return
    for one, other in zip(left, right, strict=True):
        unify(one, other)


def _divided(dim: SymbolicDim, bounds: list[int]) -> list[SymbolicDim] | None:
    """Return the segments of a sum, cut at ``bounds`` and at its own bounds; None if its parts cannot be cut there."""
    segments: list[SymbolicDim] = []
    offset = 0
    for part in dim.parts:
        inside = bounds[bisect_right(bounds, offset) : bisect_left(bounds, offset + part.size)]
        ends = [0, *(bound - offset for bound in inside), part.size]
        for start, stop in zip(ends, ends[1:], strict=False):
            piece = cut(part, start, stop)
            if piece is None:
                return None
            segments.append(piece)
        offset += part.size
    dim.parts = tuple(segments)
    return [segment for segment in segments if segment.size]


def _bounds(dim: SymbolicDim) -> list[int]:
    found, offset = [], 0
    for part in dim.parts:
        offset += part.size
        found.append(offset)
    return found


def _unify_mixed(whole: SymbolicDim, segments: SymbolicDim) -> None:
    """Unify a product with a sum by cutting the product into the same segments; block both if that is not possible."""
    offset = 0
    for part in segments.parts:
        piece = cut(whole, offset, offset + part.size)
        if piece is None:
            _disagree(whole, segments)
            return
        unify(piece, part)
        offset += part.size


def regroup(dims: Sequence[SymbolicDim], sizes: Sequence[int]) -> list[SymbolicDim] | None:
    """Return the dimensions of a view of ``dims`` with other ``sizes``; None if the view cuts across dims."""
    stack = [factor for dim in dims for factor in factors(dim)][::-1]
    result: list[SymbolicDim] = []
    for size in sizes:
        parts: list[SymbolicDim] = []
        left = size
        while left > 1:
            if not stack:
                return None
            factor = stack.pop()
            if left % factor.size == 0:
                parts.append(factor)
                left //= factor.size
                continue
            if factor.size % left:
                return None
            pair = split_factor(factor, factor.size // left)
            if pair is None:
                return None
            parts.append(pair[0])
            stack.extend(factors(pair[1])[::-1])
            left = 1
        result.append(product(parts) if parts else SymbolicDim(size))
    return result if not stack else None


def indices(dim: SymbolicDim, shares: dict[SymbolicDim, tuple[int, int]]) -> list[int]:
    """Return the indices of ``dim`` that one rank holds.

    Args:
        dim: Any dim.
        shares: For each leaf that is split: (this rank's part, number of parts).
    """

    def walk(dim: SymbolicDim) -> list[int]:  # without tensors, which have no values while a plan is made
        dim = dim.find()
        if dim.kind is None:
            part, parts = shares.get(dim, (0, 1))
            width = dim.size // parts
            return list(range(part * width, (part + 1) * width))
        if dim.kind == SUM:
            found, offset = [], 0
            for segment in dim.parts:
                found += [index + offset for index in walk(segment)]
                offset += segment.size
            return found
        result = [0]
        for factor in dim.parts:
            inner = walk(factor)
            result = [outer * factor.size + index for outer in result for index in inner]
        return result

    return walk(dim)


def local_size(dim: SymbolicDim, shares: dict[SymbolicDim, int]) -> int:
    """Return the number of indices of ``dim`` on one rank, where ``shares`` gives the number of parts of each leaf that is split."""
    dim = dim.find()
    if dim.kind is None:
        return dim.size // shares.get(dim, 1)
    sizes = [local_size(part, shares) for part in dim.parts]
    return math.prod(sizes) if dim.kind == PRODUCT else sum(sizes)
