"""Define settings: which state an engine keeps off its device, and how it accesses the state."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_zero.offload.files import IoSettings


@dataclass(frozen=True)
class OptimizerOffload:
    """Settings of masters and optimizer states.

    Attributes:
        device: "none" (the device that trains), "cpu" or "nvme".
        folder: Folder of the files, with "nvme"; None is the working folder.
        ratio: Share of the elements whose states are offloaded.
        pin_memory: Page-lock host memory.
        buffer_count: Number of buffers for files, each of the size of the largest block's shard.
        pipeline_read: Read ahead.
        pipeline_write: Write while the next is updated.
        cores: Share of the host's cores that updates may use.
        sub_group_size: Elements that are updated at a time.
    """

    device: str = "none"
    folder: str | None = None
    ratio: float = 1.0
    pin_memory: bool = False
    buffer_count: int = 4
    pipeline_read: bool = False
    pipeline_write: bool = False
    cores: float = 1.0
    sub_group_size: int = 1_000_000_000


@dataclass(frozen=True)
class ParamOffload:
    """Settings of the shards of parameters at stage 3.

    Attributes:
        device: "none" (the device that trains), "cpu" or "nvme".
        folder: Folder of the files, with "nvme"; None is the working folder.
        pin_memory: Page-lock host memory.
        buffer_count: Number of buffers for files, each of the size of the largest block's shard.
        max_in_cpu: Elements of this rank that stay in host memory with "nvme".
    """

    device: str = "none"
    folder: str | None = None
    pin_memory: bool = False
    buffer_count: int = 5
    max_in_cpu: int = 1_000_000_000


@dataclass(frozen=True)
class OffloadSettings:
    """Settings of all offloaded state.

    Attributes:
        optimizer: Masters and optimizer states.
        param: Shards of parameters.
        overlap: When updates on the host may go on after a step: "auto", "none", "forward" or "full".
        io: Settings of file access.
    """

    optimizer: OptimizerOffload = field(default_factory=OptimizerOffload)
    param: ParamOffload = field(default_factory=ParamOffload)
    overlap: str = "auto"
    io: IoSettings = field(default_factory=IoSettings)
