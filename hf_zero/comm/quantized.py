"""Collectives whose messages have fewer bits: all-gathers of 8 bits per element or of float8, reduce-scatters of 4 bits per element.

Wang et al., "ZeRO++", arXiv:2306.10209 (qwZ and qgZ). ``native/quantize.py`` makes the codes ([Note: the code of a block]); a back end
carries them as bytes. One rank sends nothing, so nothing is coded there.

[Note: gathers of float8] A layer of torchao casts its weight W to float8 in each forward and backward: with m the largest |W| and s the
float32 nearest to 448 / m (for e4m3), the codes are W * s, rounded. So ranks agree on m, each casts its part with the same s, and the whole
buffer gets codes / s in its own dtype. Cast again, these values have the codes and the scale that W has: an element with the largest code
is shown as m itself, and for all others the rounding to the buffer's dtype is far smaller than half of a step between codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.native.block_codes import KeptError, message_bytes
from hf_zero.native.quantize import dequantize, quantize

WEIGHT_BITS = 8
GRADIENT_BITS = 4
_SMALLEST = 1e-12  # torchao's lower limit of m


class Codes(Protocol):
    """Codes that carry the values of a unit in its all-gathers.

    Attributes:
        kept: Whether the codes need values that are computed from the shards of all ranks, which are then kept between gathers.
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


class Float8Codes:
    """Codes of the parameters of one unit.

    [Note: scales of a step] The largest values m are compared over ranks once: those of all units in one collective after an update
    (``compare_scales``), otherwise those of the unit in its next all-gather. They are kept until a shard changes, see [Note: dropped
    together]: torchao's ``precompute_float8_dynamic_scale_for_fsdp`` does the same for FSDP2.

    Args:
        dtype: Dtype of the codes, of one byte.
        weights: (start, stop) of each parameter in the whole buffer.
        owned: (start, stop) of this rank's shard in the whole buffer.
    """

    kept = True

    def __init__(self, dtype: torch.dtype, weights: Sequence[tuple[int, int]], owned: tuple[int, int]) -> None:
        self._dtype = dtype
        self._weights = list(weights)
        first, last = owned
        self._parts = [(max(start, first) - first, max(min(stop, last), first) - first) for start, stop in weights]
        self._agreed: torch.Tensor | None = None  # m of the present shards, (parameters,); None until the ranks have compared theirs
        self._largest: torch.Tensor | None = None  # m of the last all-gather

    @property
    def agreed(self) -> bool:
        """Return whether the ranks have compared the largest values of their present shards."""
        return self._agreed is not None

    def forget(self) -> None:
        """Let the next all-gather compare the largest values anew."""
        self._agreed = None

    def agree(self, largest: torch.Tensor) -> None:
        """Take the largest absolute value of each parameter over all ranks, (parameters,)."""
        self._agreed = largest

    def largest_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the largest absolute value of each parameter in this rank's ``shard`` (n,): (parameters,) fp32; local."""
        zero = torch.zeros((), dtype=torch.float32, device=shard.device)
        parts = [shard[start:stop] for start, stop in self._parts]
        return torch.stack([part.abs().max().float() if part.numel() else zero for part in parts])

    def all_gather(self, collectives: Collectives, full: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        """Fill ``full`` (world * n,) with the values of the codes of every rank's ``shard`` (n,), this rank's included; collective."""
        if collectives.world == 1:
            return collectives.all_gather(full, shard, unit)
        if self._agreed is None:
            self._agreed = self.largest_of(shard)
            collectives.all_reduce(self._agreed, unit, dist.ReduceOp.MAX).wait()
        self._largest = largest = self._agreed
        codes = torch.zeros(full.numel(), dtype=self._dtype, device=full.device)
        own = codes.chunk(collectives.world)[collectives.rank]
        self._encode(shard, own, largest)
        pending = collectives.all_gather(codes.view(torch.uint8), own.view(torch.uint8), unit)
        return pending.then(lambda _: self._decode(codes, full, self._weights, largest))

    def coded(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard`` (n,) as the last all-gather delivered it, as a new tensor; local."""
        if self._largest is None:
            return shard.clone()
        codes = torch.zeros(shard.numel(), dtype=self._dtype, device=shard.device)
        largest = self._largest.to(shard.device)
        self._encode(shard, codes, largest)
        return self._decode(codes, torch.zeros_like(shard), self._parts, largest)

    def _encode(self, shard: torch.Tensor, codes: torch.Tensor, largest: torch.Tensor) -> None:
        limit = torch.finfo(self._dtype).max
        for (start, stop), scale in zip(self._parts, self._scales(largest), strict=True):
            if stop > start:
                codes[start:stop] = (shard[start:stop].float() * scale).clamp_(-limit, limit).to(self._dtype)

    def _decode(self, codes: torch.Tensor, values: torch.Tensor, weights: Sequence[tuple[int, int]], largest: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(self._dtype).max
        for (start, stop), scale, most in zip(weights, self._scales(largest), largest, strict=True):
            numbers = codes[start:stop].float()
            values[start:stop] = torch.where(numbers.abs() == limit, most.copysign(numbers), numbers / scale)
        return values

    def _scales(self, largest: torch.Tensor) -> torch.Tensor:
        return (torch.finfo(self._dtype).max / largest.double().clamp(min=_SMALLEST)).float()


def compare_scales(shards: Sequence[tuple[Float8Codes, torch.Tensor]], collectives: Collectives) -> None:
    """Compare the largest values of several units over ranks, in one collective, for the gathers that follow.

    Args:
        shards: The codes of each unit, and its shard (n,) on the device; the same units on every rank.
        collectives: Network of the ranks that hold the shards.
    """
    if shards and collectives.world > 1:
        largest = [codes.largest_of(shard) for codes, shard in shards]
        together = torch.cat(largest)
        collectives.all_reduce(together, "float8 scales", dist.ReduceOp.MAX).wait()
        for (codes, _), values in zip(shards, together.split([len(values) for values in largest]), strict=True):
            codes.agree(values)
