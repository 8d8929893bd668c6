"""What a rank reads of a checkpoint when a pipeline will divide the layers: those of its own stages.

[Note: reading a stage] transformers makes a model without values and then opens the files, so where it will be cut is found in between, as
``initialize`` finds it ([Note: held stages]). Tensors that lead to parameters of other stages are left out before anything is read. Where
the cuts are not known (the model does not run without values, it will be refused) or files cannot be read in parts, all is read, and
``initialize`` divides it.
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
    """Where a model will be cut.

    Attributes:
        plan: Who holds what.
        names: All names of each parameter that other ranks hold, tied ones together.
    """

    plan: PipelinePlan
    names: list[list[str]]


def load_stage(load: Load) -> Any:
    """Loads the layers of this rank's stages; see [Note: reading a stage].

    Returns:
        What ``load.whole()`` does; None, with nothing read, where there will be no pipeline, or what it leaves out is not known.
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
    log_rank0(
        "from_pretrained: this rank reads %d of %d tensors, those of its stage of the pipeline", len(slices) - len(others), len(slices)
    )
    return found


def _cuts_of(model: Any) -> _Cuts | None:
    """Return where the pipeline of the configuration in use will cut ``model``; None where there is none, or it is not known."""
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
    except (HfZeroError, ValueError) as error:  # said by initialize: this may be another model than the one to be trained
        log_rank0("from_pretrained reads all of %s, because it cannot be cut beforehand: %s", type(model).__name__, error)
        return None
    names: dict[int, list[str]] = defaultdict(list)
    for name, param in tied.named_parameters(remove_duplicate=False):
        if param.dim() > 0:  # single numbers are everywhere
            names[id(param)].append(name)
    return _Cuts(plan, [found for found in names.values() if index not in placement.ranks_of(plan.holders[found[0]])])


def _left_out(cuts: _Cuts, sources: dict[str, Sources], converters: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Parameters of other stages, each with the tensors in the files that lead to it alone."""
    for names in cuts.names:
        saved = [name for name in names if name in sources]
        if len(saved) == 1 and all(_leads_to_one(converters.get(pattern)) for pattern in sources[saved[0]]):
            yield saved[0], [key for keys in sources[saved[0]].values() for key in keys]


def _leads_to_one(converter: Any) -> bool:
    return converter is None or len(converter.target_patterns) == 1


def _dtype(model: nn.Module, name: str, load_config: Any) -> torch.dtype:
    """Return the type that transformers would give a parameter."""
    from transformers.core_model_loading import build_glob_alternation

    own = model.get_parameter(name).dtype
    if not load_config.dtype_plan:
        return own
    pattern, globs, _ = build_glob_alternation(list(load_config.dtype_plan))
    match = pattern.search(name)
    found: torch.dtype = load_config.dtype_plan[globs[match.lastgroup]] if match is not None and match.lastgroup is not None else own
    return found
