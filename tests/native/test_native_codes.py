"""Codes of whole tables of chunks: the native kernels give the bits of the torch reference, on every instruction set."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero.native import codes, codes_reference
from hf_zero.native.chunks import MoveRule
from tests.native.codes import differences, step, vectors
from tests.native.libraries import isa, needs_library, same_bits  # noqa: F401

pytestmark = needs_library
EVERY = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@EVERY
@given(
    lengths=st.lists(st.integers(1, 2300), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    some_dead=st.booleans(),
    threads=st.integers(1, 3),
)
def test_what_a_step_does(isa: str, lengths: list[int], seed: int, some_dead: bool, threads: int) -> None:  # noqa: F811
    """A worker codes, a server codes the mean of two, a receiver decodes and moves."""
    table, _, inside = vectors(lengths, seed, 0)
    alive = inside & (torch.rand(table.numel, generator=torch.Generator().manual_seed(seed)) < 0.9) if some_dead else None
    mine = step(codes, lengths, seed, alive, threads=threads)
    assert not differences(mine, step(codes_reference, lengths, seed, alive))
    assert not any(mine[name][~inside].any() for name in ("error", "server", "momentum", "master"))
    assert bool((mine["seen"][~inside] == 7).all()), "what is in no chunk is left alone"


@EVERY
@given(count=st.integers(0, 200), seed=st.integers(0, 99), inside_root=st.booleans(), decay=st.sampled_from([1.0, 0.99]))
def test_move(isa: str, count: int, seed: int, inside_root: bool, decay: float) -> None:  # noqa: F811
    generator = torch.Generator().manual_seed(seed)
    master, momentum, variance = (torch.randn(count, generator=generator) for _ in range(3))
    variance.square_()
    rule = MoveRule(decay, 0.37, 1e-6, -3e-4, inside_root)
    mine, theirs = master.clone(), master.clone()
    codes.move(mine, momentum, variance, rule)
    codes_reference.move(theirs, momentum, variance, rule)
    assert same_bits(mine, theirs)
