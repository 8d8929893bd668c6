"""Records one optimizer step with torch's profiler, for `hf-zero trace`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hf_zero.errors import ConfigError
from hf_zero.observe import log_rank0, logger
from hf_zero.system import own_files


class RecordedStep:
    """Records what one optimizer step of this rank does, update included, and writes ``<folder>/rank<N>.json`` in Chrome's format.

    Args:
        folder: Made if it is not there.
        step: Optimizer steps before the one that is recorded.
        rank: This process'.
        module: The user's module; evaluations in between are no training steps.
        device: Where it trains.

    Raises:
        ConfigError: The folder cannot be made.
    """

    def __init__(self, folder: Path, step: int, rank: int, module: nn.Module, device: torch.device) -> None:
        try:
            own_files.make_folders(folder)
        except OSError as error:
            raise ConfigError(f"hf_zero.trace_folder is {str(folder)!r}, which cannot be made: {error}") from error
        self._path = folder / f"rank{rank}.json"
        self._module = module
        self._left = step
        self._activities = [ProfilerActivity.CPU]
        if device.type != "cpu":
            kinds = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
            self._activities.append(kinds.get(device.type, ProfilerActivity.PrivateUse1))
        self._profile: profile | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around each phase of the engine."""
        trains = name != "forward" or (self._module.training and torch.is_grad_enabled())
        if self._left == 0 and self._profile is None and name == "forward" and trains:
            self._begin()
        yield
        if name != "step":
            return
        if self._profile is not None:
            self._end(self._profile)
        self._left -= 1

    def _begin(self) -> None:
        threads: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # updates run in one of their own
        self._profile = profile(activities=self._activities, experimental_config=threads)
        self._profile.start()

    def _end(self, running: profile) -> None:
        running.stop()
        self._profile = None
        try:
            with own_files.for_library(self._path.parent) as inside:
                running.export_chrome_trace(str(inside / self._path.name))
        except OSError as error:  # of this rank's disk: the others train on, and so does this one
            logger.error("the recorded step is lost, %s cannot be written: %s", self._path, error)
            return
        log_rank0("one step was recorded: hf-zero trace %s", self._path.parent)
