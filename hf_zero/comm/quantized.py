"""Collectives whose messages are codes of blocks: all-gathers of 8 bits per element, reduce-scatters of 4.

Wang et al., "ZeRO++", arXiv:2306.10209 (qwZ and qgZ). ``native/quantize.py`` makes the codes ([Note: the code of a block]); a back end
carries them as bytes. One rank sends nothing, so nothing is coded there.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.native.block_codes import KeptError, message_bytes
from hf_zero.native.quantize import dequantize, quantize

WEIGHT_BITS = 8
GRADIENT_BITS = 4


class Codes(Protocol):
    """Codes that carry the values of a unit in its all-gathers.

    Attributes:
        kept: Whether they need values that follow from the shards of all ranks, and keep them between gathers.
    """

    kept: bool

    @property
    def agreed(self) -> bool:
        """Return whether such values are kept now."""

    def forget(self) -> None:
        """Drop these values, because shards have changed; local, on every rank."""

    def all_gather(self, collectives: Collectives, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        """Gather like ``Collectives.all_gather``; every rank's part of ``full``, this one's included, gets the values of its codes."""

    def coded(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard`` (n,) after coding and decoding, as an all-gather delivers it, as a new tensor; local."""


class BlockCodes:
    """8 bits per element, a scale for each block of neighbouring elements."""

    kept = agreed = False

    def forget(self) -> None:
        """Do nothing: the scales are in the messages."""

    def all_gather(self, collectives: Collectives, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        """Call ``all_gather_codes``."""
        return all_gather_codes(collectives, full, shard, unit)

    def coded(self, shard: torch.Tensor) -> torch.Tensor:
        """Call ``coded``."""
        return coded(shard)


def all_gather_codes(collectives: Collectives, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
    """Gather codes of 8 bits like ``Collectives.all_gather``; also replace this rank's own part of ``full`` by the values of its code.

    So all ranks have the same bits.
    """
    world = collectives.world
    if world == 1:
        return collectives.all_gather(full, shard, unit)
    messages = torch.empty(world, 1, message_bytes(shard.numel(), WEIGHT_BITS), dtype=torch.uint8, device=full.device)
    own = messages[collectives.rank]
    quantize(shard, own, WEIGHT_BITS, threads=_threads())
    pending = collectives.all_gather(messages.view(-1), own.view(-1), unit)
    return pending.then(lambda _: dequantize(messages, full, WEIGHT_BITS, _threads()))


def message_of(shard: torch.Tensor) -> torch.Tensor:
    """Return the message of an all-gather of codes for ``shard`` (n,): (message bytes,) uint8; local."""
    message = torch.empty(1, message_bytes(shard.numel(), WEIGHT_BITS), dtype=torch.uint8, device=shard.device)
    quantize(shard, message, WEIGHT_BITS, threads=_threads())
    return message.view(-1)


def values_of(messages: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Decode ``messages`` (parts, message bytes) into ``values`` (parts * n,), and return it; local."""
    dequantize(messages.unsqueeze(1), values, WEIGHT_BITS, _threads())
    return values


def coded(shard: torch.Tensor) -> torch.Tensor:
    """Return ``shard`` (n,) after coding and decoding, as an all-gather of codes would deliver it, as a new tensor; local."""
    return values_of(message_of(shard).unsqueeze(0), torch.empty_like(shard))


def reduce_scatter_codes(
    collectives: Collectives, full: torch.Tensor, dtype: torch.dtype, unit: str, error: KeptError | None = None, each: int = 1
) -> Pending:
    """Reduce codes of 4 bits like ``Collectives.reduce_scatter``, by an all-to-all; summed in fp32 in rank order, on every back end.

    Args:
        collectives: Collectives over two or more ranks.
        full: This rank's values in equal parts, (each * world * n,); rank ``r`` gets parts ``r``, ``r + world``, ...
        dtype: Dtype of the result, (each * n,): fp32, bf16 or fp16.
        unit: Name for labels.
        error: Error of this rank's earlier codes, (each * world, message_bytes(n, 8)).
        each: Number of parts that a rank gets, see [Note: swizzled parts].
    """
    world, numel = collectives.world, full.numel() // (collectives.world * each)
    messages = torch.empty(each * world, message_bytes(numel, GRADIENT_BITS), dtype=torch.uint8, device=full.device)
    quantize(full, messages, GRADIENT_BITS, error, _threads())
    by_rank = messages.view(each, world, -1).transpose(0, 1).reshape(world, -1)

    def sums(received: torch.Tensor | None) -> torch.Tensor:
        total = torch.empty(each * numel, dtype=dtype, device=full.device)
        of_rank = (by_rank if received is None else received).view(world, each, -1)
        dequantize(of_rank.transpose(0, 1).contiguous(), total, GRADIENT_BITS, _threads())
        return total

    return collectives.exchange(by_rank, unit).then(sums)


def _threads() -> int:
    return torch.get_num_threads()
