"""Send tensors from one rank of an axis to another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.process_groups import serving_backend


class Link:
    """Sends and receives between the ranks of an axis; each pair of ranks matches its calls in order.

    Sent tensors stay alive until ``settle``. If a host back end serves a device, copies on the host are sent.

    Attributes:
        axis: The axis of the ranks.

    Args:
        axis: See the attribute.
    """

    def __init__(self, axis: Collectives) -> None:
        topology = axis.topology
        self.axis = axis
        self._group = topology.group
        self._device = topology.device
        self._by_host = topology.device.type != "cpu" and serving_backend(topology.group, topology.device) == "gloo"
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, tensors: Sequence[torch.Tensor], target: int, label: str) -> None:
        """Send ``tensors`` to rank ``target`` of the axis; return before they have arrived."""
        for tensor in tensors:
            value = tensor.detach().contiguous()
            value = value.cpu() if self._by_host else value
            self.axis.sent_bytes += value.nbytes
            work = self.axis.launch(f"send {label}", partial(dist.isend, value, group=self._group, group_dst=target))
            self._under_way.append((work, value))

    def receive(self, like: Sequence[torch.Tensor], source: int, label: str) -> list[torch.Tensor]:
        """Return new tensors, of the shapes and dtypes of ``like``, that rank ``source`` of the axis has sent."""
        found = []
        for meta in like:
            place = torch.empty(meta.shape, dtype=meta.dtype, device="cpu" if self._by_host else self._device)

            work = self.axis.launch(f"receive {label}", partial(dist.irecv, place, group=self._group, group_src=source))
            self.axis.launch(f"receive {label}", work.wait)
            found.append(place.to(self._device))
        return found

    def settle(self, label: str) -> None:
        """Wait until all sends have completed."""
        while self._under_way:
            work, _ = self._under_way.pop()
            self.axis.launch(f"send {label}", work.wait)
