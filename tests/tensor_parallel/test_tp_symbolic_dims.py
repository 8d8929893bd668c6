"""Atoms: what views, slices and sums tell about dimensions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, block, cut, indices, leaves, local_size, product, regroup, total, unify


def fused(heads: int, width: int) -> tuple[SymbolicDim, SymbolicDim]:
    """A query-key-value dimension cut in three and viewed as heads; with the atom of the heads."""
    whole = SymbolicDim(3 * heads * width)
    found = None
    for part in range(3):
        piece = cut(whole, part * heads * width, (part + 1) * heads * width)
        assert piece is not None
        view = regroup([piece], [heads, width])
        assert view is not None
        if found is None:
            found = view[0]
        else:
            unify(found, view[0])
    assert found is not None
    return whole, found


def test_fused_projection_gives_each_rank_its_heads_of_all_three() -> None:
    whole, heads = fused(4, 2)
    assert indices(whole, {heads.find(): (1, 2)}) == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


def test_interleaved_projection() -> None:
    whole = SymbolicDim(24)
    view = regroup([whole], [4, 3, 2])
    assert view is not None
    assert indices(whole, {view[0].find(): (0, 2)}) == list(range(12))


def test_grouped_heads_are_a_factor_of_the_query_heads() -> None:
    query, key = regroup([SymbolicDim(32)], [4, 8]), regroup([SymbolicDim(16)], [2, 8])
    assert query is not None and key is not None
    unify(query[0], product([key[0], SymbolicDim(2)]))
    assert key[0].find() in list(leaves(query[0]))


def test_views_across_atoms_and_unequal_sizes() -> None:
    assert regroup([SymbolicDim(4), SymbolicDim(6)], [8, 3]) is not None
    assert regroup([product([SymbolicDim(4), SymbolicDim(6)])], [3, 8]) is None
    first, second = SymbolicDim(4), SymbolicDim(6)
    unify(first, second)
    assert first.blocked and second.blocked


def test_what_is_blocked_stays_blocked_when_joined_or_taken_apart() -> None:
    first, second = SymbolicDim(8), SymbolicDim(8)
    block(first, "why")
    unify(first, second)
    view = regroup([second], [2, 4])
    assert view is not None
    assert [leaf.blocked for leaf in leaves(first)] == ["why", "why"]


def test_sums_in_other_orders_join_their_segments() -> None:
    atom = SymbolicDim(8)
    low, high = cut(atom, 0, 4), cut(atom, 4, 8)
    assert low is not None and high is not None
    unify(atom, total([high, low]))
    assert low.find() is high.find()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 3))
def test_parts_of_all_ranks_are_the_whole(sizes: list[int], ranks: int, which: int) -> None:
    """Index sets of the ranks are disjoint, cover the dimension and agree with torch's own slicing of the view."""
    sizes = [*sizes]
    which %= len(sizes)
    sizes[which] *= ranks
    numel = int(torch.tensor(sizes).prod())
    whole = SymbolicDim(numel)
    view = regroup([whole], sizes)
    assert view is not None
    if sizes[which] == 1:
        return
    leaf = view[which].find()
    values = torch.arange(numel).view(sizes)
    parts = [indices(whole, {leaf: (rank, ranks)}) for rank in range(ranks)]
    for part, expected in zip(parts, values.chunk(ranks, which), strict=True):
        assert part == expected.reshape(-1).tolist()
        assert local_size(whole, {leaf: ranks}) == len(part)
