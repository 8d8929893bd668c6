"""Atoms: what the dimensions of tensors are made of, and which of them are the same.

[Note: atoms] A dimension is an atom of some size. Code that views ``(heads * width)`` as ``(heads, width)`` shows that the atom is a
*product* of two; code that cuts a fused projection into query, key and value shows that it is a *sum* of three. Code that adds two
tensors shows that their atoms are the same. Running a model once on tensors without values and writing this down yields, for each
dimension of each parameter, what it is made of and where else that appears: the heads of a query projection, of the attention scores,
of a table of relative positions and of the output projection's input are one atom. Splitting that atom splits the model.

Equal atoms are joined with union-find; an atom that some operation needs whole is *blocked* with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

PRODUCT, SUM = "product", "sum"


class Atom:
    """One dimension or a part of one.

    Attributes:
        size: Number of indices.
        kind: None for an atom that nothing has taken apart, else ``PRODUCT`` (major factor first) or ``SUM``.
        parts: What it is made of.
        blocked: Why it cannot be split; empty if nothing stands against it.
    """

    __slots__ = ("size", "kind", "parts", "blocked", "_link")

    def __init__(self, size: int, kind: str | None = None, parts: Sequence[Atom] = ()) -> None:
        self.size = size
        self.kind = kind
        self.parts = tuple(parts)
        self.blocked = ""
        self._link: Atom | None = None

    def find(self) -> Atom:
        """The atom that stands for all that are the same as this."""
        atom = self
        while atom._link is not None:
            atom = atom._link
        while self._link is not None and self._link is not atom:
            self._link, self = atom, self._link
        return atom

    def become(self, other: Atom) -> None:
        """This atom, taken apart by nothing yet, is the same as ``other``."""
        root, other = self.find(), other.find()
        if root is other:
            return
        root._link = other
        if root.blocked:
            block(other, root.blocked)

    def refine(self, kind: str, parts: Sequence[Atom]) -> None:
        """Takes this atom apart."""
        root = self.find()
        root.kind, root.parts = kind, tuple(parts)
        if root.blocked:
            for part in parts:
                block(part, root.blocked)

    def __repr__(self) -> str:
        atom = self.find()
        if atom.kind is None:
            return f"{atom.size}"
        return f"({(' * ' if atom.kind == PRODUCT else ' + ').join(map(repr, atom.parts))})"


def leaves(atom: Atom) -> Iterator[Atom]:
    """The atoms below ``atom`` that nothing has taken apart."""
    atom = atom.find()
    if atom.kind is None:
        yield atom
    for part in atom.parts:
        yield from leaves(part)


def block(atom: Atom, reason: str) -> None:
    """Notes that nothing in ``atom`` can be split; the first reason is kept."""
    for leaf in leaves(atom):
        if leaf.size > 1 and not leaf.blocked:
            leaf.blocked = reason


def factors(atom: Atom) -> list[Atom]:
    """The factors of ``atom``, major first, none of size 1; sums are not opened."""
    atom = atom.find()
    if atom.kind == PRODUCT:
        return [factor for part in atom.parts for factor in factors(part)]
    if atom.kind == SUM:
        solid = [part for part in atom.parts if part.size > 0]
        if len(solid) == 1:
            return factors(solid[0])
    return [atom] if atom.size != 1 else []


def product(parts: Sequence[Atom]) -> Atom:
    """An atom with these factors."""
    flat = [factor for part in parts for factor in factors(part)]
    if len(flat) == 1:
        return flat[0]
    return Atom(math.prod(part.size for part in parts), PRODUCT, flat) if flat else Atom(1)


def total(parts: Sequence[Atom]) -> Atom:
    """An atom of these segments, one behind the other."""
    flat: list[Atom] = []
    for part in parts:
        part = part.find()
        flat.extend(part.parts if part.kind == SUM else [part])
    flat = [part for part in flat if part.size]
    if not flat:
        return Atom(0)
    return flat[0] if len(flat) == 1 else Atom(sum(part.size for part in flat), SUM, flat)


def split_factor(atom: Atom, inner: int) -> tuple[Atom, Atom] | None:
    """Takes a single factor apart as (major, minor of size ``inner``); None if that is not possible."""
    atom = atom.find()
    if inner <= 0 or atom.size % inner:
        return None
    if atom.kind is None:
        major, minor = Atom(atom.size // inner), Atom(inner)
        atom.refine(PRODUCT, [major, minor])
        return major, minor
    if atom.kind == SUM and all(part.size % inner == 0 for part in atom.parts):
        minor = Atom(inner)
        majors = []
        for part in atom.parts:
            major = Atom(part.size // inner)
            unify(part, Atom(part.size, PRODUCT, [major, minor]))
            majors.append(major)
        major = total(majors)
        atom.kind, atom.parts = PRODUCT, (major, minor)
        return major, minor
    return None


def cut(atom: Atom, start: int, stop: int) -> Atom | None:
    """The indices ``start`` to ``stop`` of ``atom``; None if they do not fit what it is made of."""
    atom = atom.find()
    if start == 0 and stop == atom.size:
        return atom
    if atom.kind is None:
        sizes = [size for size in (start, stop - start, atom.size - stop) if size]
        atom.refine(SUM, [Atom(size) for size in sizes])
    if atom.kind == PRODUCT:
        parts = factors(atom)
        inner = math.prod(part.size for part in parts[1:])
        if start % inner or stop % inner:
            return None
        major = cut(parts[0], start // inner, stop // inner)
        return None if major is None else product([major, *parts[1:]])
    return _cut_sum(atom, start, stop)


def _cut_sum(atom: Atom, start: int, stop: int) -> Atom | None:
    """As ``cut``, for a sum; segments are divided where the cut needs it."""
    kept: list[Atom] = []
    segments: list[Atom] = []
    offset = 0
    for part in atom.parts:
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
    atom.parts = tuple(segments)
    return total(kept) if kept else Atom(0)


def unify(first: Atom, second: Atom) -> None:
    """Notes that two atoms are the same; blocks both if what is known of them does not agree."""
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


def _disagree(first: Atom, second: Atom) -> None:
    reason = f"used as {first} and as {second}"
    block(first, reason)
    block(second, reason)


def _unify_products(first: Atom, second: Atom) -> None:
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


def _unify_sums(first: Atom, second: Atom) -> None:
    bounds = sorted({0, *_bounds(first), *_bounds(second)})
    for start, stop in zip(bounds, bounds[1:], strict=False):
        left, right = cut(first, start, stop), cut(second, start, stop)
        if left is None or right is None:
            _disagree(first, second)
            return
        unify(left, right)


def _bounds(atom: Atom) -> list[int]:
    found, offset = [], 0
    for part in atom.parts:
        offset += part.size
        found.append(offset)
    return found


def _unify_mixed(whole: Atom, segments: Atom) -> None:
    """A product and a sum are the same if the product's major factor falls into the same segments."""
    offset = 0
    for part in segments.parts:
        piece = cut(whole, offset, offset + part.size)
        if piece is None:
            _disagree(whole, segments)
            return
        unify(piece, part)
        offset += part.size


def regroup(dims: Sequence[Atom], sizes: Sequence[int]) -> list[Atom] | None:
    """The dimensions of a view of ``dims`` with other ``sizes``; None if the view cuts across atoms."""
    stack = [factor for dim in dims for factor in factors(dim)][::-1]
    result: list[Atom] = []
    for size in sizes:
        parts: list[Atom] = []
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
        result.append(product(parts) if parts else Atom(size))
    return result if not stack else None


def indices(atom: Atom, shares: dict[Atom, tuple[int, int]]) -> list[int]:
    """The indices of ``atom`` that one rank holds.

    Args:
        atom: Any atom.
        shares: For each leaf that is split: (this rank's part, number of parts).
    """
    import torch

    def walk(atom: Atom) -> torch.Tensor:
        atom = atom.find()
        if atom.kind is None:
            part, parts = shares.get(atom, (0, 1))
            width = atom.size // parts
            return torch.arange(part * width, (part + 1) * width)
        if atom.kind == SUM:
            found, offset = [], 0
            for segment in atom.parts:
                found.append(walk(segment) + offset)
                offset += segment.size
            return torch.cat(found)
        result = torch.zeros(1, dtype=torch.long)
        for factor in atom.parts:
            result = (result[:, None] * factor.size + walk(factor)[None, :]).reshape(-1)
        return result

    return [int(index) for index in walk(atom)]


def local_size(atom: Atom, shares: dict[Atom, int]) -> int:
    """Number of indices of ``atom`` on one rank, where ``shares`` gives the number of parts of each leaf that is split."""
    atom = atom.find()
    if atom.kind is None:
        return atom.size // shares.get(atom, 1)
    sizes = [local_size(part, shares) for part in atom.parts]
    return math.prod(sizes) if atom.kind == PRODUCT else sum(sizes)
