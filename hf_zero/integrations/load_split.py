"""``from_pretrained`` and the split in one call: each rank reads its slices and never holds more."""

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
    """Builds a model of a saved one, split over groups of ``tp_size`` adjacent ranks; collective.

    transformers maps safetensors files into memory, where a page is read when it is touched first; the split copies this rank's slices
    from there. Changing the type comes after it, on slices.

    Args:
        model_class: A class of transformers, ``AutoModelForCausalLM`` and the like included.
        name: Folder of a saved model, or an ID on the Hub.
        tp_size: Ranks that hold one model together.
        dtype: Type of the parameters, but for those that the model keeps in fp32; None takes that of the files.
        plan: What to follow; None makes one.

    Raises:
        ConfigError: The model does not divide.
    """
    model: nn.Module = model_class.from_pretrained(name, dtype="auto")
    split_model(model, {}, build_topology(model_parallel=tp_size), plan)
    return cast_unnamed(model, dtype) if dtype is not None else model
