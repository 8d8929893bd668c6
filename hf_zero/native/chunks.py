"""The tables of 1-bit Adam's codes: the chunks of a vector, the values to encode, and the targets of a decoded momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# A scale costs 32 bits per chunk, 1/32 of the signs at this size; smaller chunks follow the magnitude of the values more closely.
CHUNK_NUMEL = 1024
# Chunks start at multiples of this, so that no byte of bits belongs to two chunks.
BLOCK_NUMEL = 16


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of a flat vector, each with a scale.

    Elements outside all chunks (gaps between parameters, padding) enter no scale; vectors are zero there and stay zero.

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
        """Return the number of chunks."""
        return self.starts.numel()


@dataclass(frozen=True)
class Fresh:
    """A new momentum, ``momentum * beta + grad * weight``: fp32, only read, (numel,); ``grad`` may end after the last chunk."""

    momentum: torch.Tensor
    grad: torch.Tensor
    beta: float
    weight: float


def build_chunks(ranges: Sequence[tuple[int, int]], numel: int, device: torch.device) -> ChunkTable:
    """Cut each range of a vector into chunks.

    Args:
        ranges: Sorted, disjoint (start, stop), each starting at a multiple of 16.
        numel: Elements of the vector, a multiple of 16.
        device: Device of the vector.
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


@dataclass(frozen=True)
class Sent:
    """Codes of one vector from all workers, encoded with the same chunks.

    Attributes:
        bits: (workers, numel // 8) uint8; the elements of a row are contiguous, rows may be any distance apart.
        scales: (workers, chunks) fp32, with the same strides allowed.
    """

    bits: torch.Tensor
    scales: torch.Tensor

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return self.bits.shape[0]


@dataclass(frozen=True)
class MoveRule:
    """Rule ``master = master * decay + momentum / (sqrt(variance) / root_divisor + eps) * minus_step``.

    Attributes:
        decay: Factor of the weights; 1 for no decay.
        variance_divisor: Bias correction of the variance, ``root_divisor ** 2``; 1 corrects nothing.
        eps: Term added to the root, or under it with ``eps_inside``.
        minus_step: Learning rate over the momentum's bias correction, negative.
        eps_inside: The divisor is ``sqrt(variance / variance_divisor + eps)``.
    """

    decay: float
    variance_divisor: float
    eps: float
    minus_step: float
    eps_inside: bool = False

    @property
    def divisor(self) -> float:
        """Return the divisor of the root, or of the variance with ``eps_inside``."""
        return self.variance_divisor if self.eps_inside else math.sqrt(self.variance_divisor)


@dataclass(frozen=True)
class Target:
    """A piece of a vector that one rule updates: chunks ``first`` to ``last`` of its table.

    Attributes:
        start: Position in the vector of the first element of the tensors below.
        first: Index of the first chunk.
        last: Index after the last chunk.
        momentum: (n,) fp32, contiguous; the decoded values are written to its chunks.
        master: (n,) fp32, contiguous; updated.
        variance: (n,) fp32, contiguous.
        rule: The rule of the update.
    """

    start: int
    first: int
    last: int
    momentum: torch.Tensor
    master: torch.Tensor
    variance: torch.Tensor
    rule: MoveRule
