"""Load a pretrained model and split it over tensor-parallel ranks in one call: each rank reads and holds its slices only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.assembly.kept_types import cast_unnamed
from hf_zero.comm.topology import build_topology
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.split import split_model


def tp_from_pretrained(
    model_class: Any, name: str, tp_size: int, dtype: torch.dtype | None = None, plan: TpPlan | None = None
) -> nn.Module:
    """Load a saved model, split over groups of ``tp_size`` adjacent ranks; collective.

    transformers maps safetensors files into memory, where a page is read at its first access. The split copies this rank's slices from
    there, and the cast to ``dtype`` follows on the slices.

    Args:
        model_class: Class with ``from_pretrained``, for example ``AutoModelForCausalLM``.
        name: Folder of a saved model, or an ID on the Hub.
        tp_size: Number of ranks that hold one model together.
        dtype: Type of the parameters, except those that the model keeps in fp32; None keeps the type of the files.
        plan: The tensor-parallel plan; None makes one from the model.

    Raises:
        ConfigError: The sizes of the model are not divisible by ``tp_size``.
    """
    model: nn.Module = model_class.from_pretrained(name, dtype="auto")
    split_model(model, {}, build_topology(model_parallel=tp_size), plan)
    return cast_unnamed(model, dtype) if dtype is not None else model
