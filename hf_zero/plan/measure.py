"""Measure this machine's rates for the roofline: matrix products, memory, operations, collectives and copies to a device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero import observe
from hf_zero.errors import ConfigError, StateError

_SECONDS = 0.2  # minimum duration of one measurement
_TIMES = 3  # repetitions, of which the fastest counts
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def measure(config: Mapping[str, Any], ranks: int, on_host: bool) -> dict[str, float]:
    """Return measured rates of this machine by the names of ``rates.WHAT``; starts ranks that measure at the same time.

    Each rank reports the fastest of several measurements, so that other load on the machine has less influence. The result has the value
    of the slowest rank.

    Args:
        config: The DeepSpeed configuration, for the dtype of matrix products.
        ranks: Ranks of one node; at most as many are started as this machine has devices (or cores).
        on_host: Whether ranks compute on CPUs.

    Raises:
        ConfigError: ``on_host`` is False and this machine has no CUDA device.
        StateError: A rank failed.
    """
    if not on_host and not torch.cuda.is_available():
        raise ConfigError("--measure needs a CUDA device, and this machine has none: run it on a machine with one, or give --device cpu")
    count = max(1, min(ranks, (os.cpu_count() or 1) if on_host else torch.cuda.device_count()))
    dtype = next((name for name in _DTYPES if config.get(name, {}).get("enabled") is True), "")
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="hf_zero_measure",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        found = list(elastic_launch(settings, _rank)(dtype, on_host).values())
    except ChildFailedError as error:
        raise StateError(f"--measure: one of {count} ranks failed; its output is above") from error
    worst: dict[str, Callable[..., float]] = {"latency": max, "operation": max}
    return {name: worst.get(name, min)(one[name] for one in found) for name in found[0]}


def _rank(dtype: str, on_host: bool) -> dict[str, float]:
    """Return the rates that one rank measured, without its log lines."""
    with observe.messages_suppressed():
        return _rates_of_rank(dtype, on_host)


def _rates_of_rank(dtype: str, on_host: bool) -> dict[str, float]:
    count, place = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if on_host:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    device = torch.device("cpu") if on_host else torch.device("cuda", place)
    found = _local_rates(device, _DTYPES.get(dtype, torch.float32))
    return found | (_collective_rates(count, device) if count > 1 else {})


def _local_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    on_host = device.type == "cpu"
    side, numel = (768, 1 << 24) if on_host else (8192, 1 << 27)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    one, two = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    found = {
        "tflops": 2 * side**3 / _time(lambda: left @ right, device) / 1e12,
        "memory": 3 * one.nbytes / _time(lambda: torch.add(one, two, out=one), device),
        "operation": _operation(device),
    }
    if not on_host:
        pinned = torch.zeros(numel, pin_memory=True)
        found["host-link"] = pinned.nbytes / _time(lambda: one.copy_(pinned, non_blocking=True), device)
    return found


class _Counting(TorchDispatchMode):
    """Dispatch mode that counts operations like ``StorageRecorder``."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _operation(device: torch.device) -> float:
    """Return the seconds per operation on tiny tensors in forward and backward, with the overhead of modules and autograd."""
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(16))).to(device)
    inputs = torch.ones(4, 4, device=device)
    with _Counting() as counting:
        chain(inputs).sum().backward()
    return _time(lambda: chain(inputs).sum().backward(), device) / counting.count


def _collective_rates(count: int, device: torch.device) -> dict[str, float]:
    """Return the bytes per second that the engine's collectives send, and the seconds of a small collective; collective."""
    from hf_zero.comm.back_end import build_collectives
    from hf_zero.comm.topology import build_topology

    network = build_collectives(build_topology(device=device))
    seconds, sent = [], []
    for numel in (count * 64, count * (1 << 20 if device.type == "cpu" else 1 << 25)):
        full = torch.zeros(numel, device=device)
        shard = torch.zeros(numel // count, device=device)

        def both(full: torch.Tensor = full, shard: torch.Tensor = shard) -> None:
            network.reduce_scatter(full, torch.float32, "measured").wait()
            network.all_gather(full, shard, "measured").wait()

        both()
        before = network.sent_bytes
        both()
        sent.append(network.sent_bytes - before)
        seconds.append(min(_repeat(both, 20, device) for _ in range(_TIMES)))
    dist.destroy_process_group()
    return {"latency": seconds[0] / 2, "node-link": (sent[1] - sent[0]) / max(seconds[1] - seconds[0], 1e-9)}


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds per call of the fastest of several series of calls."""
    call()
    count, taken = 1, 0.0
    while (taken := _repeat(call, count, device) * count) < _SECONDS / 4:
        count *= 2
    return min(taken / count, *(_repeat(call, count, device) for _ in range(_TIMES)))


def _repeat(call: Callable[[], object], count: int, device: torch.device) -> float:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / count
