"""Codes of whole tables of chunks: the native kernels give the bits of the torch reference, on every instruction set."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero.native import codes
from hf_zero.native.codes import Fresh, MoveRule, build_chunks
from tests.native import isa, needs_library, same_bits  # noqa: F401

pytestmark = needs_library
EVERY = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def vectors(lengths: list[int], seed: int, count: int) -> tuple[codes.ChunkTable, list[torch.Tensor], torch.Tensor]:
    """A table with gaps and padding, vectors that are zero outside its chunks, and which elements are in chunks."""
    ranges, start = [], 16
    for length in lengths:
        ranges.append((start, start + length))
        start += -(-length // 16) * 16 + 16 * (length % 3)
    numel = start + 48
    inside = torch.zeros(numel, dtype=torch.bool)
    for first, last in ranges:
        inside[first:last] = True
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(numel, generator=generator) * torch.exp2(torch.randint(-20, 6, (numel,), generator=generator)) for _ in range(count)
    ]
    return build_chunks(ranges, numel, torch.device("cpu")), [torch.where(inside, vector, 0.0) for vector in made], inside


@EVERY
@given(
    lengths=st.lists(st.integers(1, 2300), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    some_dead=st.booleans(),
    threads=st.integers(1, 3),
)
def test_compress_and_decompress(isa: str, lengths: list[int], seed: int, some_dead: bool, threads: int) -> None:  # noqa: F811
    table, (error, momentum, grad), inside = vectors(lengths, seed, 3)
    alive = inside & (torch.rand(table.numel, generator=torch.Generator().manual_seed(seed)) < 0.9) if some_dead else None
    grad = grad[: int(table.starts[-1] + table.counts[-1])]
    fresh = Fresh(momentum, grad, 0.9, 1 - 0.9) if seed % 3 else None
    seen = []
    for call, options in ((codes.compress, {"threads": threads}), (codes.compress_reference, {})):
        left, bits, scales = error.clone(), torch.full((table.numel // 8,), 255, dtype=torch.uint8), torch.empty(table.chunks)
        call(left, table, bits, scales, alive, fresh, **options)
        seen.append((left, bits, scales))
    (left, bits, scales), (other_left, other_bits, other_scales) = seen
    assert torch.equal(bits, other_bits) and same_bits(scales, other_scales) and same_bits(left, other_left)
    both = torch.stack([torch.cat([bits, bits.new_zeros(6)]), torch.cat([~bits, bits.new_zeros(6)])])[:, : bits.numel()]
    for workers in (1, 2):
        for add in (False, True):
            mine, theirs = error.clone(), error.clone()
            arguments = (table, both[:workers], torch.stack([scales, scales * 0.3])[:workers], alive, add)
            codes.decompress(mine, *arguments, threads=threads)
            codes.decompress_reference(theirs, *arguments)
            assert same_bits(mine, theirs)
            assert not mine[~inside].any()


@EVERY
@given(count=st.integers(0, 200), seed=st.integers(0, 99), inside_root=st.booleans(), decay=st.sampled_from([1.0, 0.99]))
def test_move(isa: str, count: int, seed: int, inside_root: bool, decay: float) -> None:  # noqa: F811
    generator = torch.Generator().manual_seed(seed)
    master, momentum, variance = (torch.randn(count, generator=generator) for _ in range(3))
    variance.square_()
    rule = MoveRule(decay, 0.37, 1e-6, -3e-4, inside_root)
    mine, theirs = master.clone(), master.clone()
    codes.move(mine, momentum, variance, rule)
    codes.move_reference(theirs, momentum, variance, rule)
    assert same_bits(mine, theirs)
