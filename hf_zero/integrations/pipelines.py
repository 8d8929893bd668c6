"""Give the ranks of a pipeline's stages and of context parallelism the same samples under accelerate and Trainer, and count them once.

Stages are the outermost axis of the ranks; context parallelism is the axis next to tensor parallelism ([Note: order of axes]). With a
DeepSpeed plugin accelerate and Trainer support tensor parallelism only, whose ranks are adjacent. This module imports only the standard
library, because every program that uses Trainer imports it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

_MESH = "_hf_zero_mesh"  # attribute of accelerate's state


def mesh_here() -> Any:
    """Return the mesh of the process' Accelerator; None without an Accelerator of ours."""
    module = sys.modules.get("accelerate.state")
    state = vars(module)["AcceleratorState"]._shared_state if module is not None else {}
    return state.get(_MESH)


def stages_here() -> int:
    """Return the number of pipeline stages in the mesh of the process' Accelerator; 1 without a mesh."""
    return int(getattr(mesh_here(), "pp", 1))


def parts_here() -> int:
    """Return the number of ranks that divide the sequences of one batch by context parallelism (times sequence parallelism); else 1."""
    mesh = mesh_here()
    return int(mesh.cp * mesh.sp) if mesh is not None and mesh.cp > 1 else 1


def sharing_parts_here() -> int:
    """Return ``parts_here()``, or 1 inside a step whose batch is cut: its ranks have different tokens, like ranks with other samples."""
    forwards = sys.modules.get("hf_zero.sequence_parallel.context_forward")
    return 1 if forwards is not None and forwards.in_sliced_step() else parts_here()


def get_tp_size(method: Callable[..., Any], trainer: Any) -> int:
    """Replace ``Trainer.get_tp_size``: return the number of ranks with the same samples, including stages and context parallelism.

    Before transformers 5.19 Trainer does not use this size for its loss: it multiplies by the number of processes and counts the tokens of
    all of them. TRL's loss does use it. So with these versions the original size is returned, and Trainer counts the samples of all stages.
    """
    size = int(method(trainer))
    return size * stages_here() * sharing_parts_here() if _counts_by_it() else size


def get_cp_size(method: Callable[..., Any], trainer: Any) -> int:
    """Replace ``Trainer.get_cp_size``: return 1 if ``get_tp_size``, which also scales Trainer's loss, includes these ranks already."""
    return 1 if parts_here() > 1 and _counts_by_it() else int(method(trainer))


@cache
def _counts_by_it() -> bool:
    counted = vars(sys.modules["transformers.trainer"])["Trainer"]._get_num_items_in_batch
    return "get_tp_size" in inspect.unwrap(counted).__code__.co_names


def prepare_data_loader(
    method: Callable[..., Any],
    dataloader: Any,
    device: Any = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace accelerate's ``prepare_data_loader``: give the ranks of all stages and of all parts of a sequence the same samples."""
    stages, parts = stages_here(), parts_here()
    if stages * parts > 1 and num_processes is not None and process_index is not None:
        num_processes //= stages
        process_index %= num_processes
        tensor = int(mesh_here().tp)  # the innermost axis, which accelerate divides by itself
        num_processes //= parts
        process_index = process_index // (parts * tensor) * tensor + process_index % tensor
        if kwargs.get("dispatch_batches") is None:
            kwargs["dispatch_batches"] = False  # else the first rank reads for the ranks of all stages
    return method(dataloader, device, num_processes, process_index, *args, **kwargs)
