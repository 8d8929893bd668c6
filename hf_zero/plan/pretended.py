"""The machine of a plan: an accelerator and peers that are not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.comm.bootstrap import pretend_distributed
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.plan.cluster import Cluster
from hf_zero.system.planning import DEVICE, Told, only_planning


class _Ordered:
    """A stream or an event: on a device that does nothing all is over at once."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait(self, *_args: Any) -> None:
        """Nothing is under way."""

    wait_stream = wait_event = synchronize = record = wait

    def query(self) -> bool:
        """Return whether all is over."""
        return True


class Accelerator:
    """``torch.planned``: what libraries ask of a device's module.

    Args:
        nbytes: Memory of the device, for who asks how much there is.
    """

    Stream = Event = _Ordered
    _stream = _Ordered()

    def __init__(self) -> None:
        self.nbytes = 1 << 60

    def is_available(self) -> bool:
        """There is one."""
        return True

    is_initialized = is_bf16_supported = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """One: this rank's."""
        return 1

    def current_device(self) -> int:
        """Its index."""
        return 0

    def set_device(self, *_args: Any) -> None:
        """There is but one."""

    manual_seed = manual_seed_all = synchronize = empty_cache = set_rng_state = reset_peak_memory_stats = set_device

    def get_rng_state(self, *_args: Any) -> torch.Tensor:
        """Return bytes that nobody reads."""
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def device(self, *_args: Any) -> Any:
        """Changes nothing."""
        return nullcontext()

    stream = device

    def current_stream(self, *_args: Any) -> _Ordered:
        """Return the only one."""
        return self._stream

    default_stream = current_stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Types of autocast."""
        return [torch.bfloat16, torch.float16]

    def mem_get_info(self, *_args: Any) -> tuple[int, int]:
        """Free and all bytes."""
        return self.nbytes, self.nbytes

    def memory_allocated(self, *_args: Any) -> int:
        """Return the plan's books count."""
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


_accelerator: Accelerator | None = None


def accelerator() -> torch.device:
    """Return the pretended accelerator, made known to torch for the rest of this process.

    Raises:
        UnsupportedError: This torch has no devices written in Python, or another device has taken the place.
    """
    global _accelerator
    if _accelerator is None:
        try:
            from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
        except ImportError:
            raise UnsupportedError(
                f"torch {torch.__version__} cannot pretend an accelerator: a plan for one needs torch 2.10 or newer; --device cpu works"
            ) from None
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise UnsupportedError(
                f"this process has an accelerator {taken!r}, so none can be pretended beside it: plan in a process of its own"
            )
        _accelerator = Accelerator()
        register(rename=DEVICE, backend_module=_accelerator)
    return torch.device(DEVICE, 0)


@contextmanager
def pretended_world(cluster: Cluster, rank: int = 0, told: Told | None = None) -> Iterator[torch.device]:
    """This process as one of the ranks, on a device of its own; gives the device.

    Args:
        cluster: The ranks.
        rank: Which.
        told: What the ranks of this world that were planned before have told.

    Raises:
        StateError: The process has a process group already.
    """
    if dist.is_initialized():
        raise StateError("a plan pretends a world of ranks, and this process has a process group already: plan in a process of its own")
    device = torch.device("cpu") if cluster.on_host else accelerator()
    settings = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(cluster.near), "RANK": str(rank), "WORLD_SIZE": str(cluster.ranks)}
    if cluster.on_host:
        settings["ACCELERATE_USE_CPU"] = "true"
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with only_planning(told):
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
