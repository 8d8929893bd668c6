"""The process group over which a trainer sends weights to a server in another process, and how tensors are packed for it.

It is apart from the trainer's own group: rank 0 is the trainer's first rank, the others are servers. vLLM has the same over nccl; with gloo
it runs on any machine.
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
    """One end of the group; connected when it has been made.

    Args:
        address: Host of rank 0, which listens there.
        port: Its port.
        rank: 0 for the trainer.
        world: The trainer and all servers.
    """

    def __init__(self, address: str, port: int, rank: int, world: int) -> None:
        store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world, TIMEOUT)
        self._store = store

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies ``tensor`` from rank 0 to all, in place."""
        self._group.broadcast(tensor, 0).wait()


def send(group: WeightGroup, named: Iterable[tuple[str, torch.Tensor]], pack_bytes: int = PACK_BYTES) -> None:
    """Broadcasts tensors in packs: bytes one after the other, until a pack holds more than ``pack_bytes``."""
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
    """The tensors of ``send``, which were announced as (name, dtype, shape) in the same order."""
    pack: list[tuple[str, torch.dtype, Sequence[int], int]] = []
    for position, (name, dtype, shape) in enumerate(announced):
        pack.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
        sizes = [entry[3] for entry in pack]
        if sum(sizes) > pack_bytes or position + 1 == len(announced):
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            group.broadcast(flat)
            for (known, kind, form, _), part in zip(pack, flat.split(sizes), strict=True):
                yield known, part.clone().view(kind).view(*form)  # a clone begins where its type may begin
            pack = []


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of ``value``, 1D, on the host."""
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)
