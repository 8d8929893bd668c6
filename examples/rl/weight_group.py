"""Send weights over a process group from a trainer to a server in another process, several tensors per message.

The group is separate from the trainer's own: its rank 0 is the trainer's first rank, its other ranks are servers. vLLM does the same over
NCCL; gloo works on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=120)
PACK_BYTES = 1 << 28


class WeightGroup:
    """One member of the process group; the constructor returns after all members have connected.

    Args:
        address: Host of rank 0, which listens for the other ranks.
        port: Port of rank 0.
        rank: Rank in the group; 0 is the trainer.
        world: Number of members: the trainer and all servers.
    """

    def __init__(self, address: str, port: int, rank: int, world: int) -> None:
        store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world, TIMEOUT)
        self._store = store

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` from rank 0 to all ranks in place."""
        self._group.broadcast(tensor, 0).wait()


def send(group: WeightGroup, named: Iterable[tuple[str, torch.Tensor]], pack_bytes: int = PACK_BYTES) -> None:
    """Broadcast tensors in packs, which are concatenated bytes of tensors; a pack ends when it has more than ``pack_bytes`` bytes."""
    pack: list[torch.Tensor] = []
    for _, value in named:
        pack.append(as_bytes(value))
        if sum(part.numel() for part in pack) > pack_bytes:
            group.broadcast(torch.cat(pack))
            pack = []
    if pack:
        group.broadcast(torch.cat(pack))


def receive(
    group: WeightGroup, announced: Sequence[tuple[str, torch.dtype, Sequence[int]]], pack_bytes: int = PACK_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive and yield the tensors of ``send``; ``announced`` lists them as (name, dtype, shape) in the same order."""
    pack: list[tuple[str, torch.dtype, Sequence[int], int]] = []
    for position, (name, dtype, shape) in enumerate(announced):
        pack.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
        sizes = [entry[3] for entry in pack]
        if sum(sizes) > pack_bytes or position + 1 == len(announced):
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            group.broadcast(flat)
            for (known, kind, form, _), part in zip(pack, flat.split(sizes), strict=True):
                yield known, part.clone().view(kind).view(*form)  # a clone is aligned for its dtype
            pack = []


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``value`` on the host, a 1-dim uint8 tensor."""
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)
