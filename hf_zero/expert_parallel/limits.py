"""What expert parallelism is not combined with."""

from __future__ import annotations

from hf_zero.config.schema.root import ZeroConfig
from hf_zero.errors import UnsupportedError


def require_provided(config: ZeroConfig) -> None:
    """Refuses, by its key, what experts do not follow.

    Raises:
        UnsupportedError: It is asked for.
    """
    if config.checkpoint.use_node_local_storage:
        raise UnsupportedError(
            "checkpoint.use_node_local_storage and expert parallelism are not provided together: ranks that hold the same experts may be "
            "on several nodes, and share out what is written. Save to a folder that all nodes see, or set expert_parallel.enabled to false"
        )
