"""Types of the functions that `deepspeed.initialize` takes in place of an optimizer and of a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

DeepSpeedOptimizerCallable = Callable[[Iterable[torch.nn.Parameter] | list[dict[str, Any]]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], LRScheduler]
