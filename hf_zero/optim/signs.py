"""One bit per number: signs packed eight to a byte, one scale per chunk, and what the code loses fed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.sharding.layout import ALIGNMENT, Range

# A scale costs 32 bits a chunk, so 1/32 of the signs at this size; small chunks follow the magnitude of the values more closely.
CHUNK_NUMEL = 1024


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of a flat vector that have a scale each; no chunk reaches over the end of a parameter.

    Elements outside all chunks (gaps between parameters, padding) count in no scale and decode to zero.

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


def build_chunks(ranges: Sequence[Range], numel: int, device: torch.device) -> ChunkTable:
    """Cuts each range into chunks.

    Args:
        ranges: Ranges of the vector by rising start, each starting at a multiple of 16, not overlapping.
        numel: Elements of the vector, a multiple of 16.
        device: Where the vector is.
    """
    starts = [start for part in ranges for start in range(part.start, part.stop, CHUNK_NUMEL)]
    counts = [min(CHUNK_NUMEL, part.stop - start) for part in ranges for start in range(part.start, part.stop, CHUNK_NUMEL)]
    gaps = [index for part in ranges for index in range(part.stop, part.stop + -part.stop % ALIGNMENT)]
    start, count = torch.tensor(starts, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
    block_chunk = torch.full((numel // ALIGNMENT,), len(starts), dtype=torch.int64)
    blocks = (count + ALIGNMENT - 1) // ALIGNMENT
    if starts:
        chunk = torch.repeat_interleave(torch.arange(len(starts)), blocks)
        within = torch.arange(chunk.numel()) - torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
        block_chunk[start[chunk] // ALIGNMENT + within] = chunk
    return ChunkTable(numel, start.to(device), count.to(device), block_chunk.to(device), torch.tensor(gaps, dtype=torch.int64).to(device))


def compress(values: torch.Tensor, table: ChunkTable, bits: torch.Tensor, scales: torch.Tensor, alive: torch.Tensor | None = None) -> None:
    """Codes ``values`` as signs and scales, and leaves in ``values`` what the code lost.

    A chunk's scale is the sum of its magnitudes divided by the sum of the magnitudes of its signs, which is their number (Tang et al.,
    arXiv 2102.02888, section 4: the compressed vector has the magnitude of the original). In the 1-norm this is the scale that loses
    least, and it never loses more than there was, whatever the values.

    Args:
        values: (numel,) fp32, zero outside all chunks; replaced by ``values - decoded``.
        table: The chunks.
        bits: (numel // 8,) uint8, overwritten; bit ``i`` of byte ``j`` is 1 where element ``8 * j + i`` is at least 0.
        scales: (chunks,) fp32, overwritten.
        alive: (numel,) bool, False outside all chunks; elements that are False take no part: their value is dropped. None: all in
            chunks take part.
    """
    counts = table.counts
    if alive is not None:
        values.mul_(alive)
        counts = _sum_chunks(alive.to(torch.float64), table).clamp_(min=1.0)
    # Added up in double precision: the order of summation then does not show in the rounded result.
    scales.copy_(_sum_chunks(values.abs().double(), table) / counts)
    positive = values >= 0
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=values.device)
    bits.copy_((positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8))
    values.sub_(decode(table, bits, scales, alive))


def decode(table: ChunkTable, bits: torch.Tensor, scales: torch.Tensor, alive: torch.Tensor | None = None) -> torch.Tensor:
    """The vector that ``bits`` and ``scales`` stand for: plus or minus its chunk's scale, zero where nothing takes part.

    Args:
        table: The chunks.
        bits: (numel // 8,) uint8.
        scales: (chunks,) fp32.
        alive: As in ``compress``.

    Returns:
        (numel,) fp32, new.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    signs = ((bits.unsqueeze(1) >> shifts) & 1).view(-1, ALIGNMENT).float().mul_(2).sub_(1)
    by_block = torch.cat([scales, scales.new_zeros(1)])[table.block_chunk]
    values = signs.mul_(by_block.unsqueeze(1)).view(-1)
    values[table.gaps] = 0.0
    if alive is not None:
        values.mul_(alive)
    return values


def _sum_chunks(values: torch.Tensor, table: ChunkTable) -> torch.Tensor:
    """Sum of each chunk, (chunks,), of (numel,) values that are zero in gaps."""
    sums = torch.zeros(table.chunks + 1, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, table.block_chunk, values.view(-1, ALIGNMENT).sum(1))[:-1]
