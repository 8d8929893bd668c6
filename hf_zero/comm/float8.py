"""All-gathers of weights as float8: half of the bytes of bf16, and exactly the values that a layer in float8 computes with.

[Note: gathers of float8] A layer of torchao casts its weight W to float8 in each forward and backward: with m the largest |W| and s the
float32 nearest to 448 / m (for e4m3), the codes are W * s, rounded. So ranks agree on m, each casts its part with the same s, and the whole
buffer gets codes / s in its own dtype. Cast again, these values have the codes and the scale that W has: an element with the largest code
is shown as m itself, and for all others the rounding to the buffer's dtype is far smaller than half of a step between codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_zero.comm.collectives import Collectives, Pending

_SMALLEST = 1e-12  # torchao's lower limit of m


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
