"""Let accelerate run in processes that mpirun or srun started: set RANK and LOCAL_RANK, which accelerate reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.launch.placement import export_placement
from hf_zero.launch.rank import end_with_launcher


def start_state(method: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``PartialState.__init__``: first set the rank variables; ``TrainingArguments`` and ``Accelerator`` also make this object."""
    export_placement()
    end_with_launcher()
    method(state, *args, **kwargs)
