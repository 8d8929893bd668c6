"""How many bytes a device can still give this process."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, ranks_on_host: int = 1) -> int | None:
    """Bytes this rank may still allocate on ``device``; None when nobody can say.

    Args:
        device: A GPU: what the driver calls free and what torch's allocator holds unused. The CPU: what the machine and the
            control group have left.
        ranks_on_host: Ranks that share the host's memory evenly.
    """
    if device.type == "cpu":
        known = [size for size in (_machine(), _control_group()) if size is not None]
        return min(known) // ranks_on_host if known else None
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "mem_get_info"):
        return None
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def ranks_on_this_host(world: int) -> int:
    """Ranks of this host as the launcher says, else all of them."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) > 0 else world


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return sizes.get("MemAvailable")


def _control_group() -> int | None:
    """The limit of the container less what is used; page cache that can be dropped does not count as used."""
    v1 = _CGROUP / "memory"
    limit = _number(_CGROUP / "memory.max", v1 / "memory.limit_in_bytes")
    used = _number(_CGROUP / "memory.current", v1 / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    for path in (_CGROUP / "memory.stat", v1 / "memory.stat"):
        if path.is_file():
            statistics = dict(line.split()[:2] for line in path.read_text().splitlines())
            used -= int(statistics.get("inactive_file", 0))
    return max(0, limit - used)


def _number(*paths: Path) -> int | None:
    """The number in the first of these files that there is; None for none, and for a limit that is none (``max``)."""
    for path in paths:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None
