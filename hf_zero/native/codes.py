"""Vectors as one sign bit per element and one scale per chunk, all chunks of a vector in one call, and the torch reference.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", arXiv:2102.02888. What
``sign_bits`` does for one chunk is done here for a table of them, which is how 1-bit Adam sends a unit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_zero.native.library import Library, announce, library
from hf_zero.native.passes import address
from hf_zero.native.slices import for_slices

# A scale costs 32 bits a chunk, so 1/32 of the signs at this size; small chunks follow the magnitude of the values more closely.
CHUNK_NUMEL = 1024
# Chunks start at multiples of this, so that no byte of bits belongs to two of them.
BLOCK_NUMEL = 16


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of a flat vector that have a scale each.

    Elements outside all chunks (gaps between parameters, padding) count in no scale; vectors are zero there, and stay so.

    Attributes:
        numel: Elements of the vector, a multiple of 16.
        starts: First element of each chunk, a multiple of 16, (chunks,) int64.
        counts: Elements of each chunk, 1 to ``CHUNK_NUMEL``, (chunks,) int64.
        block_chunk: Chunk of each block of 16 elements, (numel // 16,) int64; ``chunks`` where there is none.
        gaps: Elements outside all chunks that lie in a block of a chunk, (gaps,) int64.
    """

    numel: int
    starts: torch.Tensor
    counts: torch.Tensor
    block_chunk: torch.Tensor
    gaps: torch.Tensor

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.starts.numel()


@dataclass(frozen=True)
class Fresh:
    """A new momentum, ``momentum * beta + grad * weight``: fp32, only read, (numel,); ``grad`` may end behind the last chunk."""

    momentum: torch.Tensor
    grad: torch.Tensor
    beta: float
    weight: float


def build_chunks(ranges: Sequence[tuple[int, int]], numel: int, device: torch.device) -> ChunkTable:
    """Cuts each range of a vector into chunks.

    Args:
        ranges: (start, stop) by rising start, each starting at a multiple of 16, not overlapping.
        numel: Elements of the vector, a multiple of 16.
        device: Where the vector is.
    """
    starts = [at for start, stop in ranges for at in range(start, stop, CHUNK_NUMEL)]
    counts = [min(CHUNK_NUMEL, stop - at) for start, stop in ranges for at in range(start, stop, CHUNK_NUMEL)]
    gaps = [index for _, stop in ranges for index in range(stop, stop + -stop % BLOCK_NUMEL)]
    start, count = torch.tensor(starts, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
    block_chunk = torch.full((numel // BLOCK_NUMEL,), len(starts), dtype=torch.int64)
    blocks = (count + BLOCK_NUMEL - 1) // BLOCK_NUMEL
    if starts:
        chunk = torch.repeat_interleave(torch.arange(len(starts)), blocks)
        within = torch.arange(chunk.numel()) - torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
        block_chunk[start[chunk] // BLOCK_NUMEL + within] = chunk
    return ChunkTable(numel, start.to(device), count.to(device), block_chunk.to(device), torch.tensor(gaps, dtype=torch.int64).to(device))


# -- coding -------------------------------------------------------------------------------------------------------------


def compress(
    error: torch.Tensor,
    table: ChunkTable,
    bits: torch.Tensor,
    scales: torch.Tensor,
    alive: torch.Tensor | None = None,
    fresh: Fresh | None = None,
    threads: int = 1,
) -> None:
    """Codes ``fresh + error`` as signs and scales, and leaves in ``error`` what the code lost.

    A chunk's scale is the sum of its magnitudes divided by the sum of the magnitudes of its signs, which is their number (section 4 of
    the paper: the compressed vector has the magnitude of the original). In the 1-norm this is the scale that loses least, and it
    never loses more than there was, whatever the values.

    Args:
        error: (numel,) fp32, contiguous, zero outside all chunks; updated.
        table: The chunks.
        bits: (numel // 8,) uint8, contiguous; bit ``i`` of byte ``j`` becomes 1 where element ``8 * j + i`` is at least 0.
        scales: (chunks,) fp32, contiguous; overwritten.
        alive: (numel,) bool, False outside all chunks; elements that are False take no part: their value is dropped. None: all in
            chunks take part.
        fresh: What is added to ``error`` first; None adds nothing.
        threads: The most threads to use; the result does not depend on it.
    """
    bits.zero_()
    native = _native(error)
    if native is None:
        compress_reference(error, table, bits, scales, alive, fresh)
        return
    momentum, grad, beta, weight = (fresh.momentum, fresh.grad, fresh.beta, fresh.weight) if fresh else (None, None, 0.0, 0.0)

    def work(first: int, last: int) -> None:
        native.call(
            "hfz_compress",
            ctypes.c_int64(last - first),
            address(table.starts, first),
            address(table.counts, first),
            address(momentum),
            address(grad),
            ctypes.c_float(beta),
            ctypes.c_float(weight),
            address(alive),
            address(error),
            address(bits),
            address(scales, first),
        )

    _for_chunks(table, threads, work)


def compress_reference(
    error: torch.Tensor,
    table: ChunkTable,
    bits: torch.Tensor,
    scales: torch.Tensor,
    alive: torch.Tensor | None = None,
    fresh: Fresh | None = None,
) -> None:
    """As ``compress`` in plain torch; any device."""
    if fresh is not None:
        grad = torch.nn.functional.pad(fresh.grad, (0, error.numel() - fresh.grad.numel()))
        error.add_(fresh.momentum.mul(fresh.beta).add_(grad.mul(fresh.weight)))
    counts = table.counts
    if alive is not None:
        error.masked_fill_(~alive, 0.0)
        counts = _sum_chunks(alive.to(torch.float64), table).clamp_(min=1.0)
    # Added up in double precision: the order of summation then does not show in the rounded result.
    scales.copy_(_sum_chunks(error.abs().double(), table) / counts)
    positive = error >= 0
    positive.view(-1, BLOCK_NUMEL)[table.block_chunk == table.chunks] = False
    positive[table.gaps] = False
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=error.device)
    bits.copy_((positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8))
    error.sub_(_decoded(table, bits, scales, alive))


# -- decoding -----------------------------------------------------------------------------------------------------------


def decompress(
    out: torch.Tensor,
    table: ChunkTable,
    bits: torch.Tensor,
    scales: torch.Tensor,
    alive: torch.Tensor | None = None,
    add: bool = False,
    threads: int = 1,
) -> None:
    """The mean of the vectors that workers sent: each is plus or minus its chunk's scale, and they are summed in their order.

    Args:
        out: (numel,) fp32, contiguous; its chunks are overwritten, the rest is left alone.
        table: The chunks.
        bits: (workers, numel // 8) uint8; rows may have any distance, elements of a row lie side by side.
        scales: (workers, chunks) fp32, likewise.
        alive: As in ``compress``; elements that are False become 0.
        add: Add to ``out`` instead.
        threads: The most threads to use; the result does not depend on it.
    """
    native = _native(out)
    if native is None:
        decompress_reference(out, table, bits, scales, alive, add)
        return

    def work(first: int, last: int) -> None:
        native.call(
            "hfz_decompress",
            ctypes.c_int64(last - first),
            address(table.starts, first),
            address(table.counts, first),
            bits.shape[0],
            address(bits),
            ctypes.c_int64(bits.stride(0)),
            address(scales, first),
            ctypes.c_int64(scales.stride(0)),
            address(alive),
            int(add),
            address(out),
        )

    _for_chunks(table, threads, work)


def decompress_reference(
    out: torch.Tensor, table: ChunkTable, bits: torch.Tensor, scales: torch.Tensor, alive: torch.Tensor | None = None, add: bool = False
) -> None:
    """As ``decompress`` in plain torch; any device."""
    total: torch.Tensor | None = None
    for row, row_scales in zip(bits, scales, strict=True):
        part = _decoded(table, row, row_scales, alive)
        total = part if total is None else total.add_(part)
    if total is not None:
        if bits.shape[0] > 1:
            total.div_(bits.shape[0])
        inside = (table.block_chunk < table.chunks).repeat_interleave(BLOCK_NUMEL)
        inside[table.gaps] = False
        out.copy_(torch.where(inside, out + total if add else total, out))


def _decoded(table: ChunkTable, bits: torch.Tensor, scales: torch.Tensor, alive: torch.Tensor | None) -> torch.Tensor:
    """What one code stands for, (numel,), zero outside all chunks."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    signs = ((bits.unsqueeze(1) >> shifts) & 1).view(-1, BLOCK_NUMEL).float().mul_(2).sub_(1)
    by_block = torch.cat([scales, scales.new_zeros(1)])[table.block_chunk]
    values = signs.mul_(by_block.unsqueeze(1)).view(-1)
    values[table.gaps] = 0.0
    if alive is not None:
        values.masked_fill_(~alive, 0.0)
    return values


def _sum_chunks(values: torch.Tensor, table: ChunkTable) -> torch.Tensor:
    """Sum of each chunk, (chunks,), of (numel,) values that are zero in gaps."""
    sums = torch.zeros(table.chunks + 1, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, table.block_chunk, values.view(-1, BLOCK_NUMEL).sum(1))[:-1]


# -- the update ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoveRule:
    """``master = master * decay + momentum / (sqrt(variance) / root_divisor + eps) * minus_step``.

    Attributes:
        decay: 1 leaves the weights alone.
        variance_divisor: Bias correction of the variance, ``root_divisor ** 2``; 1 corrects nothing.
        eps: Added to the root, or under it with ``eps_inside``.
        minus_step: Learning rate over the momentum's bias correction, negative.
        eps_inside: ``sqrt(variance / variance_divisor + eps)`` instead.
    """

    decay: float
    variance_divisor: float
    eps: float
    minus_step: float
    eps_inside: bool = False


def move(master: torch.Tensor, momentum: torch.Tensor, variance: torch.Tensor, rule: MoveRule, threads: int = 1) -> None:
    """One update along ``momentum`` over a fixed ``variance``, in place; every operation rounds by itself.

    Args:
        master: (n,) fp32, contiguous; updated.
        momentum: (n,) fp32, contiguous.
        variance: (n,) fp32, contiguous.
        rule: Its numbers.
        threads: The most threads to use; the result does not depend on it.
    """
    native = _native(master)
    if native is None:
        move_reference(master, momentum, variance, rule)
        return
    divisor = rule.variance_divisor if rule.eps_inside else math.sqrt(rule.variance_divisor)
    numbers = tuple(ctypes.c_float(value) for value in (rule.decay, divisor, rule.eps, rule.minus_step))
    flags = (int(rule.decay != 1.0), int(rule.eps_inside))

    def work(start: int, stop: int) -> None:
        places = (address(tensor, start) for tensor in (master, momentum, variance))
        native.call("hfz_move", ctypes.c_int64(stop - start), *places, *numbers, *flags)

    for_slices(master.numel(), threads, work)


def move_reference(master: torch.Tensor, momentum: torch.Tensor, variance: torch.Tensor, rule: MoveRule) -> None:
    """As ``move`` in plain torch; any device. The root goes through double precision: torch's own is not always the nearest number."""
    if rule.decay != 1.0:
        master.mul_(rule.decay)
    if rule.eps_inside:
        root = variance.div(rule.variance_divisor).add_(rule.eps).double().sqrt_().float()
    else:
        root = variance.double().sqrt_().float().div_(math.sqrt(rule.variance_divisor)).add_(rule.eps)
    master.add_(torch.div(momentum, root, out=root).mul_(rule.minus_step))


def _for_chunks(table: ChunkTable, threads: int, work: Callable[[int, int], None]) -> None:
    """Calls ``work(first, last)`` for ranges of chunks that cover all of them."""

    def part(start: int, stop: int) -> None:  # in elements, as if all chunks were full
        work(start // CHUNK_NUMEL, -(-stop // CHUNK_NUMEL))

    for_slices(table.chunks * CHUNK_NUMEL, threads, part, step=CHUNK_NUMEL)


def _native(tensor: torch.Tensor) -> Library | None:
    if tensor.device.type != "cpu":
        return None
    found = library()
    if found is None:
        announce()
    return found
