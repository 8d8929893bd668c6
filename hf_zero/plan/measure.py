"""Times what a roofline needs on the machine at hand: matrix products, memory, operations, collectives, copies to a device."""

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

_SECONDS = 0.2  # that one thing is repeated for, at least
_TIMES = 3
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def measure(config: Mapping[str, Any], ranks: int, on_host: bool) -> dict[str, float]:
    """Rates of this machine, by the names of ``rates.WHAT``; of several ranks the slowest one's, all at work at once.

    Of each thing the fastest of several times counts, so that other work of the machine does not.

    Args:
        config: The DeepSpeed configuration, for the type of matrix products.
        ranks: Of one node; as many as this machine has devices (or cores) for are started.
        on_host: Ranks compute on CPUs.

    Raises:
        ConfigError: Without ``on_host`` and without a device.
        StateError: A rank failed.
    """
    if not on_host and not torch.cuda.is_available():
        raise ConfigError("--measure times the machine at hand, and it has no CUDA device: measure on one that has, or give --device cpu")
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
        raise StateError(f"--measure: a rank of {count} failed; what it printed is above") from error
    worst: dict[str, Callable[..., float]] = {"latency": max, "operation": max}
    return {name: worst.get(name, min)(one[name] for one in found) for name in found[0]}


def _rank(dtype: str, on_host: bool) -> dict[str, float]:
    """What one rank measured."""
    with observe.hushed():
        return _measured(dtype, on_host)


def _measured(dtype: str, on_host: bool) -> dict[str, float]:
    count, place = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if on_host:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    device = torch.device("cpu") if on_host else torch.device("cuda", place)
    found = _alone(device, _DTYPES.get(dtype, torch.float32))
    return found | (_together(count, device) if count > 1 else {})


def _alone(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
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
    """Counts operations as the books of a plan do."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _operation(device: torch.device) -> float:
    """Return seconds of an operation on next to nothing in a forward and its backward, modules and autograd included."""
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(16))).to(device)
    inputs = torch.ones(4, 4, device=device)
    with _Counting() as counting:
        chain(inputs).sum().backward()
    return _time(lambda: chain(inputs).sum().backward(), device) / counting.count


def _together(count: int, device: torch.device) -> dict[str, float]:
    """Return bytes per second that the engine's own collectives send, and how long a small one takes."""
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
    """Return seconds of one call, the fastest of several series."""
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
