"""Find how many bytes this process can still allocate on a device."""

from __future__ import annotations

import torch

from hf_zero.comm.nodes import ranks_of_node
from hf_zero.memory.budget import free_memory


def free_bytes(device: torch.device, ranks_on_host: int = 1) -> int | None:
    """Return the number of bytes that this rank may still allocate on ``device``; None if it is unknown.

    Args:
        device: Of a GPU, the driver's free memory and the unused memory of torch's allocator are counted. Of the CPU, the remaining memory
            of the machine and of its control groups is counted.
        ranks_on_host: Number of ranks that share the host's memory evenly.
    """
    if device.type == "cpu":
        host = free_memory()
        return host.nbytes // ranks_on_host if host is not None else None
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "mem_get_info"):
        return None
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def ranks_on_this_host(world: int) -> int:
    """Return the number of ranks on this host according to the launcher; ``world`` if the launcher does not report it."""
    return ranks_of_node() or world
