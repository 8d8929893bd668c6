"""Simulate the hardware of a plan: an accelerator and other ranks that do not exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.comm.bootstrap import pretend_distributed
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.plan.inputs import Cluster
from hf_zero.system.planning import DEVICE, Told, only_planning


class _NullStream:
    """A stream or event of the simulated device, which finishes all work at once."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait(self, *_args: Any) -> None:
        """Return at once: no work is pending."""

    wait_stream = wait_event = synchronize = record = wait

    def query(self) -> bool:
        """Return True: all work has finished."""
        return True


class Accelerator:
    """Module ``torch.planned`` of the simulated device, with the functions that libraries call.

    Attributes:
        nbytes: Bytes of memory that ``mem_get_info`` reports: more than any plan needs.
    """

    Stream = Event = _NullStream
    _stream = _NullStream()

    def __init__(self) -> None:
        self.nbytes = 1 << 60

    def is_available(self) -> bool:
        """Return True: the device exists and is initialised."""
        return True

    is_initialized = is_bf16_supported = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return 1, the number of devices of this rank."""
        return 1

    def current_device(self) -> int:
        """Return 0, the index of the only device."""
        return 0

    def set_device(self, *_args: Any) -> None:
        """Do nothing: there is only one device."""

    manual_seed = manual_seed_all = synchronize = empty_cache = set_rng_state = reset_peak_memory_stats = set_device

    def get_rng_state(self, *_args: Any) -> torch.Tensor:
        """Return a placeholder for the state of the random number generator."""
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def device(self, *_args: Any) -> Any:
        """Return a context manager that does nothing."""
        return nullcontext()

    stream = device

    def current_stream(self, *_args: Any) -> _NullStream:
        """Return the only stream."""
        return self._stream

    default_stream = current_stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast may use."""
        return [torch.bfloat16, torch.float16]

    def mem_get_info(self, *_args: Any) -> tuple[int, int]:
        """Return (free, total) bytes of the device; nothing is ever used."""
        return self.nbytes, self.nbytes

    def memory_allocated(self, *_args: Any) -> int:
        """Return 0: the plan's recorder counts memory instead."""
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


_accelerator: Accelerator | None = None


def accelerator() -> torch.device:
    """Return the simulated accelerator; the first call registers it with torch until the process ends.

    Raises:
        UnsupportedError: torch is too old for devices written in Python, or another device uses torch's private back end.
    """
    global _accelerator
    if _accelerator is None:
        try:
            from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
        except ImportError:
            raise UnsupportedError(
                f"torch {torch.__version__} cannot simulate an accelerator: install torch 2.10 or newer, or plan with --device cpu"
            ) from None
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise UnsupportedError(
                f"this process has registered the accelerator {taken!r}, so a plan cannot register another one: plan in a separate process"
            )
        _accelerator = Accelerator()
        register(rename=DEVICE, backend_module=_accelerator)
    return torch.device(DEVICE, 0)


@contextmanager
def pretended_world(cluster: Cluster, rank: int = 0, messages: Told | None = None) -> Iterator[torch.device]:
    """Make this process one rank of a simulated world inside the ``with``; gives the rank's device.

    Args:
        cluster: Number and place of the ranks.
        rank: Number of this rank.
        messages: Messages that ranks planned before have sent; receives this rank's.

    Raises:
        StateError: This process has a process group already.
    """
    if dist.is_initialized():
        raise StateError("a plan simulates a process group, but this process has a process group already: plan in a separate process")
    device = torch.device("cpu") if cluster.on_host else accelerator()
    settings = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(cluster.near), "RANK": str(rank), "WORLD_SIZE": str(cluster.ranks)}
    if cluster.on_host:
        settings["ACCELERATE_USE_CPU"] = "true"
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with only_planning(messages):
            pretend_distributed(rank, cluster.ranks, device)
            try:
                yield device
            finally:
                dist.destroy_process_group()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
