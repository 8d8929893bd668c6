"""Process groups as scripts make them and hand them over."""

from __future__ import annotations

import torch.distributed as dist


class Mpu:
    """Process groups as scripts hand them to ``initialize``."""

    def __init__(self, model: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        self.model, self.data = model, data

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.model

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.data


def made(lines: list[list[int]]) -> dist.ProcessGroup:
    found = [dist.new_group(line) for line in lines]
    return next(group for group, line in zip(found, lines, strict=True) if dist.get_rank() in line)
