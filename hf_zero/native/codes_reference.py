"""Compute the codes of 1-bit Adam in plain torch, on any device: the reference of every kernel, and the fallback without kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.native.chunks import BLOCK_NUMEL, ChunkTable, Fresh, MoveRule, Sent, Target


def compress(
    error: torch.Tensor,
    table: ChunkTable,
    bits: torch.Tensor,
    scales: torch.Tensor,
    alive: torch.Tensor | None = None,
    fresh: Fresh | None = None,
) -> None:
    """Compute ``codes.compress`` in plain torch; any device."""
    if fresh is not None:
        grad = torch.nn.functional.pad(fresh.grad, (0, error.numel() - fresh.grad.numel()))
        error.add_(fresh.momentum.mul(fresh.beta).add_(grad.mul(fresh.weight)))
    counts = table.counts
    if alive is not None:
        error.masked_fill_(~alive, 0.0)
        counts = _sum_chunks(alive.to(torch.float64), table).clamp_(min=1.0)
    # Summed in double precision, so that the order of summation does not change the rounded result.
    scales.copy_(_sum_chunks(error.abs().double(), table) / counts)
    positive = error >= 0
    positive.view(-1, BLOCK_NUMEL)[table.block_chunk == table.chunks] = False
    positive[table.gaps] = False
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=error.device)
    bits.copy_((positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8))
    error.sub_(_decoded(table, bits, scales, alive))


def recompress(
    error: torch.Tensor, table: ChunkTable, sent: Sent, bits: torch.Tensor, scales: torch.Tensor, alive: torch.Tensor | None = None
) -> None:
    """Compute ``codes.recompress`` in plain torch; any device."""
    mean = torch.zeros_like(error)
    decompress(mean, table, sent, alive)
    compress(error.add_(mean), table, bits, scales, alive)


def decompress(out: torch.Tensor, table: ChunkTable, sent: Sent, alive: torch.Tensor | None = None) -> None:
    """Compute ``codes.decompress`` in plain torch; any device."""
    total: torch.Tensor | None = None
    for row, row_scales in zip(sent.bits, sent.scales, strict=True):
        part = _decoded(table, row, row_scales, alive)
        total = part if total is None else total.add_(part)
    if total is not None:
        if sent.workers > 1:
            total.div_(sent.workers)
        inside = (table.block_chunk < table.chunks).repeat_interleave(BLOCK_NUMEL)
        inside[table.gaps] = False
        out.copy_(torch.where(inside, total, out))


def _decoded(table: ChunkTable, bits: torch.Tensor, scales: torch.Tensor, alive: torch.Tensor | None) -> torch.Tensor:
    """Return the values of one code, (numel,), zero outside all chunks."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    signs = ((bits.unsqueeze(1) >> shifts) & 1).view(-1, BLOCK_NUMEL).float().mul_(2).sub_(1)
    by_block = torch.cat([scales, scales.new_zeros(1)])[table.block_chunk]
    values = signs.mul_(by_block.unsqueeze(1)).view(-1)
    values[table.gaps] = 0.0
    if alive is not None:
        values.masked_fill_(~alive, 0.0)
    return values


def _sum_chunks(values: torch.Tensor, table: ChunkTable) -> torch.Tensor:
    """Return the sum of each chunk, (chunks,), of (numel,) values that are zero in gaps."""
    sums = torch.zeros(table.chunks + 1, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, table.block_chunk, values.view(-1, BLOCK_NUMEL).sum(1))[:-1]


def move(master: torch.Tensor, momentum: torch.Tensor, variance: torch.Tensor, rule: MoveRule) -> None:
    """Compute ``codes.move`` in plain torch; any device. The root is computed in double precision: torch's own is not always correctly
    rounded.
    """
    if rule.decay != 1.0:
        master.mul_(rule.decay)
    if rule.eps_inside:
        root = variance.div(rule.variance_divisor).add_(rule.eps).double().sqrt_().float()
    else:
        root = variance.double().sqrt_().float().div_(rule.divisor).add_(rule.eps)
    master.add_(torch.div(momentum, root, out=root).mul_(rule.minus_step))


def take(table: ChunkTable, bits: torch.Tensor, scales: torch.Tensor, targets: Sequence[Target], alive: torch.Tensor | None = None) -> None:
    """Compute ``codes.take`` in plain torch; any device."""
    whole = torch.zeros(table.numel, device=bits.device)
    decompress(whole, table, Sent(bits.unsqueeze(0), scales.unsqueeze(0)), alive)
    for target in targets:
        target.momentum.copy_(whole[target.start : target.start + target.momentum.numel()])
        move(target.master, target.momentum, target.variance, target.rule)
