"""A pretend nccl: collectives over gloo, with the order of work that nccl has.

A collective of device tensors waits for the current stream, runs on a stream of its own and returns at once; ``Work.wait`` lets the
current stream wait for it and blocks nobody. What the works hold is given back when they have been waited for. So a buffer that is read
before ``wait``, or freed without it, is an error of the pretend accelerator. The host does wait for the other ranks at the call, as gloo
needs it: ranks that issue the collectives of several groups in different orders hang, whoever waits for what.

Tensors of a CPU, which is its own compute stream, go through too. There a collective runs beside the process and ``wait`` stops it, as
it stops the stream of a device; the package takes its way for nccl.

It takes a rank's tensors from one device: nccl would make a communicator on each, and end where ranks have chosen the same (object
collectives go by the current device, which may be nobody's choice).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import pretend

NAME = "pretend_ccl"


class _Work(dist.Work if hasattr(dist, "Work") else dist._Work):  # type: ignore[misc, name-defined]
    """A collective on the network's stream."""

    def __init__(self, event: Any, keep: Sequence[Tensor]) -> None:
        super().__init__()
        self._event, self._keep, self._device = event, list(keep), keep[0].device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._keep = []  # as nccl: at the first of several waits
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        return True


class Network(dist.ProcessGroup):
    """The group; ``inner`` is gloo's."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.inner = inner
        self._stream: Any = None
        self._device: torch.device | None = None

    def _get_backend(self, device: Any) -> Any:
        """Return gloo, which cannot coalesce: torch 2.14 asks before it sends a batch of messages."""
        return self.inner

    def _run(self, tensors: Sequence[Tensor], call: Callable[..., Any]) -> Any:
        """Stages ``tensors`` through the host on the network's stream; ``call`` gets the copies, and the tensors of a host themselves."""
        device = tensors[0].device
        if device.type == "cpu":
            return call(*tensors)
        if self._device not in (None, device):
            raise RuntimeError(f"rank {self.rank()} has a communicator on {self._device} and calls it with a tensor on {device}")
        self._device = device
        module = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream(device)
        self._stream.wait_stream(module.current_stream(device))
        with module.stream(self._stream):
            hosts = [tensor.to("cpu", copy=True) for tensor in tensors]
            call(*hosts).wait()
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host.pin_memory(), non_blocking=True)
            event = module.Event()
            event.record(self._stream)
        return _Work(event, tensors)

    def _exchange(self, output: Tensor, input: Tensor) -> Any:
        return self._run([output, input], lambda out, into: self.inner.alltoall_base(out, into, [], []))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._run(tensors, lambda *hosts: self.inner.broadcast(list(hosts), opts))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._run(tensors, lambda *hosts: self.inner.allreduce(list(hosts), opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._run([*outputs[0], *inputs], lambda *hosts: self.inner.allgather([list(hosts[:-1])], [hosts[-1]]))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._run([output, input], lambda out, into: self.inner._allgather_base(out, into))

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        def call(out: Tensor, into: Tensor) -> Any:
            parts = torch.empty_like(into)
            work = self.inner.alltoall_base(parts, into, [], [])
            return _Then(work, lambda: out.copy_(parts.view(self.size(), -1).float().sum(0)), (out, into))

        return self._run([output, input], call)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(self, output: Tensor, input: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        return self._run([output, input], lambda out, into: self.inner.alltoall_base(out, into, list(out_sizes), list(in_sizes)))

    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:
        hosts = [tensor.cpu() for tensor in tensors]  # what the device has computed by now; a host's tensors are themselves
        return _Then(self.inner.send(hosts, target, tag), lambda: None, [*tensors, *hosts])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._run(tensors, lambda *hosts: self.inner.recv(list(hosts), source, tag))

    def barrier(self, opts: Any = None) -> Any:
        return self.inner.barrier()

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def shutdown(self) -> None: ...

    @property
    def _device_types(self) -> list[torch.device]:  # torch.distributed asks where objects travel
        accelerator = torch.accelerator.current_accelerator()
        return [torch.device(pretend.NAME if accelerator is not None and accelerator.type == pretend.NAME else "cpu")]

    def size(self) -> int:
        return self.inner.size()

    def rank(self) -> int:
        return self.inner.rank()

    def getBackendName(self) -> str:
        return NAME


class _Then(_Work):
    """A work of a host, and what is left to do when it is over."""

    def __init__(self, work: Any, finish: Callable[[], object], keep: Sequence[Tensor]) -> None:
        super().__init__(None, keep)
        self._work, self._finish = work, finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._work is not None:
            self._work.wait()
            self._finish()
            self._work = None
        return super().wait(timeout)

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


def register() -> None:
    """Makes the back end known to torch.distributed, as the one of pretend devices and for tensors of the CPU."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch 2.15 records the collectives of groups that have a back end in C++
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, devices=[pretend.NAME, "cpu"])
    dist.Backend.default_device_backend_map[pretend.NAME] = NAME


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Network:
    return Network(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)
