"""What the examples measure: bytes of model state, peak memory, seconds."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator


def expected_state_bytes(numel: int, *, stage: int | None, ranks: int, sixteen_bit: bool) -> int:
    """Bytes of parameters and AdamW state that each rank keeps between two steps, by arithmetic (no gradients, no padding).

    Args:
        numel: Parameters of the model.
        stage: ZeRO stage 0 to 3; None for DDP or a single process.
        ranks: Data-parallel ranks.
        sixteen_bit: Whether ZeRO keeps 16-bit parameters beside fp32 masters. DDP keeps fp32 parameters in any case.

    Returns:
        Bytes per rank, rounded up.
    """
    # fp32: 4 for the parameter, which is its own master, and 4 + 4 for AdamW's moments; 16-bit: 2, and 4 + 4 + 4.
    parameter_bytes, optimizer_bytes = (2, 12) if sixteen_bit and stage is not None else (4, 8)
    stage = stage or 0
    optimizer_share = ranks if stage >= 1 else 1
    parameter_share = ranks if stage >= 3 else 1
    return -(-numel * parameter_bytes // parameter_share) + -(-numel * optimizer_bytes // optimizer_share)


def count_parameters(model: torch.nn.Module) -> int:
    """Parameters of the whole model, tied ones once; under ZeRO-3 the real sizes stand in ``ds_numel``."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def _state_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Tensors that hold model state on this rank: parameters, shards, masters, optimizer state; repetitions possible."""
    yield from model.parameters()
    for unit in getattr(model, "units", ()):
        yield from (tensor for tensor in (unit.shard, unit.master) if tensor is not None)
    inner = getattr(optimizer, "optimizer", optimizer)
    for group in inner.param_groups:
        yield from group["params"]
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def measured_state_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """Bytes of the memory behind this rank's parameters, masters and optimizer state, each block of memory once.

    Args:
        model: What `Accelerator.prepare` returned: an engine with ``units``, a DDP wrapper or the plain module.
        optimizer: The prepared optimizer. AdamW creates its state in the first step.
    """
    sizes: dict[tuple[str, int], int] = {}
    for tensor in _state_tensors(model, optimizer):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            sizes[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory use so far: of the device's allocator, or on CPU of the whole process (resident set)."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return torch.get_device_module(device).max_memory_allocated(device)


def maximum_over_ranks(value: int, accelerator: Accelerator) -> int:
    """Largest ``value`` of all ranks, on every rank (collective)."""
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max().item())


@dataclass
class Stopwatch:
    """Seconds of one phase; valid when the ``with`` block of `stopwatch` has ended."""

    seconds: float = 0.0


@contextmanager
def stopwatch(accelerator: Accelerator) -> Iterator[Stopwatch]:
    """Measure a phase from the moment all ranks enter it until all have left it (collective at both ends)."""
    watch = Stopwatch()
    _settle(accelerator)
    start = time.perf_counter()
    yield watch
    _settle(accelerator)
    watch.seconds = time.perf_counter() - start


def _settle(accelerator: Accelerator) -> None:
    """Wait for the queued work of the device, then for the other ranks."""
    if accelerator.device.type != "cpu":
        torch.get_device_module(accelerator.device).synchronize()
    accelerator.wait_for_everyone()
