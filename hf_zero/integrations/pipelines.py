"""Ranks that share samples under accelerate and Trainer: those of a pipeline's stages and of context parallelism get the same ones, once.

Stages are the outermost axis of the ranks, context parallelism lies next to tensor parallelism ([Note: order of axes]); of DeepSpeed
plugins accelerate and Trainer know tensor parallelism alone, whose ranks are adjacent. Imports nothing but the standard library: every
program that uses Trainer comes here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

_MESH = "_hf_zero_mesh"  # in accelerate's state


def mesh_here() -> Any:
    """Return the mesh that the process' Accelerator has; None without one."""
    module = sys.modules.get("accelerate.state")
    state = vars(module)["AcceleratorState"]._shared_state if module is not None else {}
    return state.get(_MESH)


def stages_here() -> int:
    """Stages of the mesh that the process' Accelerator has; 1 without one."""
    return int(getattr(mesh_here(), "pp", 1))


def parts_here() -> int:
    """Ranks of that mesh that hold parts of the same whole batch, by context parallelism and sequence parallelism inside it; 1 without."""
    mesh = mesh_here()
    return int(mesh.cp * mesh.sp) if mesh is not None and mesh.cp > 1 else 1


def sharing_parts_here() -> int:
    """``parts_here()``, and 1 while a step has parts of batches: its ranks have other tokens then, as ranks with other samples."""
    forwards = sys.modules.get("hf_zero.sequence_parallel.context_forward")
    return 1 if forwards is not None and forwards.in_sliced_step() else parts_here()


def get_tp_size(method: Callable[..., Any], trainer: Any) -> int:
    """``Trainer.get_tp_size``, by which it counts the ranks that train on the same samples.

    Before transformers 5.19 Trainer multiplies its loss with all processes and counts the tokens of all, but TRL's loss goes by this size:
    so it stays without stages there. The samples that Trainer counts are then those of all stages.
    """
    size = int(method(trainer))
    return size * stages_here() * sharing_parts_here() if _counts_by_it() else size


def get_cp_size(method: Callable[..., Any], trainer: Any) -> int:
    """``Trainer.get_cp_size``: these ranks are in ``get_tp_size`` already, by which Trainer scales its loss too."""
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
    """accelerate's function of that name, for one stage and one part of sequences: the ranks of the others read as these do."""
    stages, parts = stages_here(), parts_here()
    if stages * parts > 1 and num_processes is not None and process_index is not None:
        num_processes //= stages
        process_index %= num_processes
        tensor = int(mesh_here().tp)  # the innermost axis, which accelerate takes off by itself
        num_processes //= parts
        process_index = process_index // (parts * tensor) * tensor + process_index % tensor
        if kwargs.get("dispatch_batches") is None:
            kwargs["dispatch_batches"] = False  # the first rank would read for the ranks of all stages
    return method(dataloader, device, num_processes, process_index, *args, **kwargs)
