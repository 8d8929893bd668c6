"""Read only the layers of this rank's stages from a checkpoint if a pipeline will divide the model.

[Note: reading a stage] transformers makes a model without values and then opens the files. Between the two, the cuts of the pipeline are
found in the same way as in ``initialize`` ([Note: held stages]). Tensors of other stages are left out before any value is read. If the cuts
cannot be found (the model does not run without values, or will be refused) or the files cannot be read in parts, all tensors are read, and
``initialize`` divides the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.assembly.mesh import pipeline_ranks
from hf_zero.config.schema.parallel import Pipeline as Settings
from hf_zero.errors import HfZeroError
from hf_zero.integrations.checkpoint_slices import Load, Sources, converters_of, sources_of
from hf_zero.integrations.distributed_config import claims_of_load
from hf_zero.observe import log_rank0
from hf_zero.pipeline.apply import placement_of
from hf_zero.pipeline.held import hold, make_room
from hf_zero.pipeline.partition import make_plan
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.tensor_parallel.skeleton import skeleton


@dataclass(frozen=True)
class _Cuts:
    """The cuts of a model into pipeline stages.

    Attributes:
        plan: The stage that holds each parameter.
        names: For each parameter that only other ranks hold, all its names (several if it is tied).
    """

    plan: PipelinePlan
    names: list[list[str]]


def load_stage(load: Load) -> Any:
    """Load the layers of this rank's stages only; see [Note: reading a stage].

    Returns:
        The result of ``load.whole()``; None, with no value read, if there is no pipeline or no tensor can be left out.
    """
    cuts = _cuts_of(load.model)
    if cuts is None:
        return None
    with ExitStack() as files:
        slices = load.open(files)
        left_out = dict(_left_out(cuts, sources_of(load.model, slices, load.config), converters_of(load.config)))
        if not left_out:
            return None
        others = {key for keys in left_out.values() for key in keys}
        make_room(load.model, {name: _dtype(load.model, name, load.config) for name in left_out})
        found = load.of({key: value for key, value in slices.items() if key not in others})
    found[0].missing_keys -= left_out.keys()
    hold(load.model, cuts.plan, [name for names in cuts.names if left_out.keys() & set(names) for name in names])
    log_rank0("from_pretrained: this rank reads %d of %d tensors: only its pipeline stage", len(slices) - len(others), len(slices))
    return found


def _cuts_of(model: Any) -> _Cuts | None:
    """Return the cuts that the pipeline of the configuration in use makes in ``model``; None without a pipeline, or if they are unknown."""
    from transformers.integrations.deepspeed import deepspeed_config

    source = deepspeed_config()
    try:
        ranks, index = pipeline_ranks(source, claims_of_load())
        if ranks == 1:
            return None
        settings = Settings.model_validate(source.get("pipeline") or {})
        placement = placement_of(settings, ranks)
        tied = skeleton(model)  # transformers ties weights after it has read them
        tie: Any = tied.tie_weights
        tie(recompute_mapping=False)
        plan = make_plan(tied, placement.stages, settings.partition_method)
    except (HfZeroError, ValueError) as error:  # initialize raises it: this may not be the model to be trained
        log_rank0("from_pretrained reads all of %s, because its pipeline stages cannot be planned yet: %s", type(model).__name__, error)
        return None
    names: dict[int, list[str]] = defaultdict(list)
    for name, param in tied.named_parameters(remove_duplicate=False):
        if param.dim() > 0:  # every rank has the scalars
            names[id(param)].append(name)
    return _Cuts(plan, [found for found in names.values() if index not in placement.ranks_of(plan.holders[found[0]])])


def _left_out(cuts: _Cuts, sources: dict[str, Sources], converters: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each parameter of other stages with the names of its tensors in the files, if these belong to no other parameter."""
    for names in cuts.names:
        saved = [name for name in names if name in sources]
        if len(saved) == 1 and all(_leads_to_one(converters.get(pattern)) for pattern in sources[saved[0]]):
            yield saved[0], [key for keys in sources[saved[0]].values() for key in keys]


def _leads_to_one(converter: Any) -> bool:
    return converter is None or len(converter.target_patterns) == 1


def _dtype(model: nn.Module, name: str, load_config: Any) -> torch.dtype:
    """Return the type in which transformers would load the parameter ``name``."""
    from transformers.core_model_loading import build_glob_alternation

    own = model.get_parameter(name).dtype
    if not load_config.dtype_plan:
        return own
    pattern, globs, _ = build_glob_alternation(list(load_config.dtype_plan))
    match = pattern.search(name)
    found: torch.dtype = load_config.dtype_plan[globs[match.lastgroup]] if match is not None and match.lastgroup is not None else own
    return found
