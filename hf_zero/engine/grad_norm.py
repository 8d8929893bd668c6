"""The global gradient norm over shards, clipping, and the name of the first gradient that is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.sharding.unit import Unit

# torch.nn.utils.clip_grad_norm_ adds the same, so that a clipped step is PyTorch's to the digit.
_EPSILON = 1e-6

# torch's CPU norm adds up in fp32: over a flat unit of 6 million elements it is off by 1.7e-4, in pieces of this size by 2e-7.
_CHUNK_NUMEL = 1 << 16


def global_norm(shards: Sequence[torch.Tensor], collectives: Collectives, sharded: bool) -> torch.Tensor:
    """The 2-norm of all gradients together; collective if ``sharded``.

    Args:
        shards: This rank's gradients, one 1D tensor per unit.
        collectives: The axis the units are divided over.
        sharded: Each rank holds another part; otherwise all hold the same.

    Returns:
        0-dim fp32 tensor, the same on every rank.
    """
    if not shards:
        return torch.zeros((), device=collectives.topology.device)
    pieces = [piece for shard in shards for piece in _pieces(shard)]
    square = torch.stack(torch._foreach_norm(pieces)).double().square().sum()
    if sharded:
        collectives.all_reduce(square, "gradient norm").wait()
    return square.sqrt().float()


def _pieces(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values = shard if shard.dtype == torch.float32 else shard.float()
    return values.split(_CHUNK_NUMEL) if values.device.type == "cpu" else (values,)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that brings ``norm`` down to ``max_norm``; 1 when it is below, or when ``max_norm`` is 0."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


def first_non_finite(units: Sequence[Unit], shards: Sequence[torch.Tensor], collectives: Collectives) -> str:
    """The name of the first parameter, in the model's order, with a gradient that is not finite on any rank; collective."""
    found: tuple[int, str] | None = None
    position = 0
    for unit, shard in zip(units, shards, strict=True):
        for index, slot in enumerate(unit.layout.slots):
            position += 1
            part = unit.shard_part(index, shard)
            if found is None and part.numel() and not bool(torch.isfinite(part).all()):
                found = (position, slot.name)
    everywhere = [entry for entry in collectives.gather_objects(found, "non-finite gradient") if entry is not None]
    return min(everywhere)[1] if everywhere else "none found (the norm itself overflowed)"
