"""How many bytes a device can still give this process."""

from __future__ import annotations

import torch

from hf_zero.comm.nodes import ranks_of_node
from hf_zero.memory.budget import free_memory


def free_bytes(device: torch.device, ranks_on_host: int = 1) -> int | None:
    """Return bytes this rank may still allocate on ``device``; None when nobody can say.

    Args:
        device: A GPU: what the driver calls free and what torch's allocator holds unused. The CPU: what the machine and the
            control groups have left.
        ranks_on_host: Ranks that share the host's memory evenly.
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
    """Ranks of this host as the launcher says, else all of them."""
    return ranks_of_node() or world
