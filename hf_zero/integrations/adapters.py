"""Let PEFT make adapters on layers that are sharded at stage 3, also kinds of adapters that read the weights of a layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hf_zero.core.schedule.gathered_parameters import GatheredParameters
from hf_zero.core.units.unit import is_sharded


def inject_adapter(original: Callable[..., None], tuner: Any, *args: Any, **kwargs: Any) -> None:
    """Replace PEFT's ``BaseTuner.inject_adapter``: a sharded layer is whole while PEFT makes its adapter. Collective at stage 3.

    Many kinds of adapters take the shape of ``layer.weight``, decompose it or copy the layer; PEFT gathers for LoRA alone. One layer at a
    time is whole, on all ranks. Values that PEFT writes are equal on all ranks, or an error names the parameter.

    Args:
        original: The replaced method.
        tuner: The tuner, whose ``model`` gets adapters.
        *args: Further arguments of the method.
        **kwargs: Further arguments of the method.
    """
    if isinstance(tuner, sys.modules["peft.tuners.lora"].LoraModel) or not any(map(is_sharded, tuner.model.parameters())):
        original(tuner, *args, **kwargs)
        return
    create = tuner._create_and_replace

    def create_on_whole_layer(config: Any, name: str, target: Any, *more: Any, **named: Any) -> None:
        with GatheredParameters([param for param in target.parameters() if is_sharded(param)]):
            create(config, name, target, *more, **named)

    tuner.__dict__["_create_and_replace"] = create_on_whole_layer
    try:
        original(tuner, *args, **kwargs)
    finally:
        del tuner.__dict__["_create_and_replace"]


def decompose_layers(original: Callable[..., None], tuner: Any, *args: Any, **kwargs: Any) -> None:
    """Replace FRoD's ``_init_frod_projections``, which decomposes all layers of a kind together: they are whole. Collective at stage 3.

    FRoD keeps a copy of these layers on the host until it has decomposed them, so each rank needs memory for them in any case.

    Args:
        original: The replaced method.
        tuner: The tuner, whose ``model`` has the layers.
        *args: Further arguments of the method.
        **kwargs: Further arguments of the method.
    """
    layers = [module.weight for module in tuner.model.modules() if type(module).__name__ in ("Linear", "Conv1D")]
    with GatheredParameters([weight for weight in layers if is_sharded(weight)]):
        original(tuner, *args, **kwargs)
