"""accelerate in processes that mpirun or srun started: it reads RANK and LOCAL_RANK, which these do not set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.launch.parent import end_with_launcher
from hf_zero.launch.placement import export_placement


def start_state(method: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> None:
    """``PartialState(...)``, after the environment has been given what it reads; TrainingArguments and Accelerator make one as well."""
    export_placement()
    end_with_launcher()
    method(state, *args, **kwargs)
