"""One step of 1-bit Adam on made-up vectors, with whichever functions; shared by the tests of the kernels."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.native.chunks import ChunkTable, Fresh, MoveRule, Sent, Target, build_chunks


def vectors(lengths: list[int], seed: int, count: int) -> tuple[ChunkTable, list[torch.Tensor], torch.Tensor]:
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


def step(functions: Any, lengths: list[int], seed: int, alive: torch.Tensor | None, **options: Any) -> dict[str, torch.Tensor]:
    """A worker codes, a server codes the mean of two, a receiver decodes and moves; what all of that wrote.

    Args:
        functions: Has ``compress``, ``recompress``, ``decompress`` and ``take``.
        lengths: Of the parameters.
        seed: Of the values, and of the choice among variants.
        alive: As in ``compress``.
        **options: For each call.
    """
    table, (error, momentum, grad, server, master, variance), _ = vectors(lengths, seed, 6)
    fresh = Fresh(momentum, grad[: int(table.starts[-1] + table.counts[-1])], 0.9, 1 - 0.9) if seed % 3 else None
    rule = MoveRule(0.99 if seed % 2 else 1.0, 0.37, 1e-6, -3e-4, eps_inside=seed % 5 == 0)
    bits, scales = torch.zeros(table.numel // 8, dtype=torch.uint8), torch.empty(table.chunks)
    functions.compress(error, table, bits, scales, alive, fresh, **options)
    both = torch.stack([torch.cat([row, row.new_zeros(6)]) for row in (bits, ~bits)])[:, :-6]  # rows with a distance
    sent = Sent(both, torch.stack([scales, scales * 0.3]))
    seen = torch.full_like(error, 7.0)
    functions.decompress(seen, table, sent, alive, **options)
    server_bits, server_scales = torch.zeros_like(bits), torch.empty_like(scales)
    functions.recompress(server, table, sent, server_bits, server_scales, alive, **options)
    common, last = torch.zeros_like(master), table.chunks - 1
    targets = [  # two pieces, the last chunk by itself
        Target(piece.start, first, stop, common[piece], master[piece], variance.square()[piece], rule)
        for piece, first, stop in ((slice(0, int(table.starts[last])), 0, last), (slice(int(table.starts[last]), None), last, last + 1))
    ]
    functions.take(table, server_bits, server_scales, targets, alive, **options)
    return {
        "error": error, "bits": bits, "scales": scales, "seen": seen, "server": server, "server_bits": server_bits,
        "server_scales": server_scales, "momentum": common, "master": master,
    }  # fmt: skip


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs in any bit."""
    return [name for name in one if not torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))]
