"""Read only this rank's experts from a checkpoint if experts will be divided over ranks; all other weights are read as usual.

[Note: reading a share] transformers opens safetensors files without reading them, renames their tensors and converts them: experts that
are saved one by one become one tensor. Its own functions give the parameter that each name belongs to. The experts of other ranks are left
out before any value is read: whole tensors if each expert is saved as a tensor, a slice if one tensor holds all experts. transformers then
loads parameters that have room for this rank's experts only. At stage 3, where rank 0 reads for all ranks, every rank reads its own experts
itself. A layer whose tensors are saved in another layout is loaded with all experts, and ``initialize`` divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.assembly.mesh import expert_ranks
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.expert_parallel.find import ExpertLayer, StackedExperts, present_experts
from hf_zero.expert_parallel.held import Held, Place, hold, make_room
from hf_zero.expert_parallel.stacked import Implementation, dispatching
from hf_zero.integrations.checkpoint_slices import Load, Sources, converters_of, sources_of
from hf_zero.integrations.distributed_config import claims_of_load

_MERGE, _TRANSPOSE = "MergeModulelist", "Transpose"
_ALONG_ONE = ("Concatenate", "Chunk", "Interleave")


class _Part:
    """A contiguous range of entries along the first dimension of a tensor in a file; has the interface of the file's own slice."""

    def __init__(self, whole: Any, start: int, stop: int) -> None:
        self._whole, self._start, self._stop = whole, start, stop

    def __getitem__(self, index: Any) -> Any:
        if index is not Ellipsis:
            raise UnsupportedError(f"a rank's part of the experts was indexed with {index!r}; only [...] (all of it) is allowed")
        return self._whole[self._start : self._stop]

    def get_shape(self) -> list[int]:
        """Return the shape of this part; safetensors' name for it."""
        return [self._stop - self._start, *self._whole.get_shape()[1:]]

    def get_dtype(self) -> str:
        """Return the element type as safetensors names it, for example "BF16"."""
        return str(self._whole.get_dtype())


@dataclass
class _Share:
    """The layers whose experts this rank reads by itself.

    Attributes:
        held: Module of each layer, and the record to store on it after loading.
        values: Tensors or parts of tensors for this rank's experts, by name in the files.
        names: Names in the files of all tensors that belong to these layers, on whichever rank.
        params: Names of the layers' parameters in the model.
    """

    held: list[tuple[nn.Module, Held]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    params: set[str] = field(default_factory=set)


def load_experts(load: Load, rest_of: Callable[[Load], Any]) -> Any:
    """Load this rank's experts and all other weights; see [Note: reading a share].

    Args:
        load: The call of transformers.
        rest_of: Function that leaves out further tensors (those of other pipeline stages) and loads; it returns None if it has none to
            leave out.

    Returns:
        The result of ``load.whole()``; None, with no value read, if experts are not divided or the files do not separate them.
    """
    layers, place = _to_divide(load.model)
    if not layers:
        return None
    with ExitStack() as files:
        slices = load.open(files)
        share = _share(load.model, layers, place, slices, load.config)
        if not share.held:
            return None
        rest = {name: found for name, found in slices.items() if name not in share.names}
        found = _load_apart(load, share, rest) if _sharded_already() else _load_with(load, {**rest, **share.values}, rest_of)
    found[0].missing_keys -= share.params
    for module, held in share.held:
        hold(module, held)
        for name, part in held.parts.items():
            module.get_parameter(name).ds_shape = part.full_shape  # type: ignore[attr-defined]  # peft makes adapters of this shape
    return found


def _load_with(load: Load, values: dict[str, Any], rest_of: Callable[[Load], Any]) -> Any:
    found = rest_of(replace(load, values=values))
    return found if found is not None else load.of(values)


def _to_divide(model: nn.Module) -> tuple[list[ExpertLayer], Place]:
    """Return the expert layers that an engine will divide, and this rank's place; no layers if it will not divide or will refuse."""
    from transformers.integrations.deepspeed import deepspeed_config

    ranks, index = expert_ranks(deepspeed_config(), claims_of_load())
    if ranks == 1:
        return [], Place(1, 0)
    try:
        layers = present_experts(model)
    except UnsupportedError:  # initialize raises it: this may not be the model to be trained
        return [], Place(1, 0)
    return [layer for layer in layers if layer.count % ranks == 0], Place(ranks, index)


def _sharded_already() -> bool:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


# -- which tensors of the files are this rank's --------------------------------------------------------------------------


def _share(model: Any, layers: Iterable[ExpertLayer], place: Place, slices: dict[str, Any], load_config: Any) -> _Share:
    """Return the layers whose tensors in the files separate by expert, and shrink their parameters in ``model`` to this rank's experts."""
    share, sources, converters = _Share(), sources_of(model, slices, load_config), converters_of(load_config)
    paths = {id(param): name for name, param in model.named_parameters()}
    for layer in layers:
        found = [(paths[id(param)], number) for number, param in _params(layer)]
        wanted = [_wanted(sources.get(name), number, layer.count, place, slices, converters) for name, number in found]
        if not wanted or any(values is None for values in wanted):
            continue
        for (name, _), values in zip(found, wanted, strict=True):
            share.values.update(values or {})
            share.names.update(key for keys in sources[name].values() for key in keys)
            share.params.add(name)
        share.held.append((layer.module, make_room(layer, place)))
    return share


def _params(layer: ExpertLayer) -> Iterator[tuple[int | None, nn.Parameter]]:
    """Yield the parameters of a layer's experts, each with the index of its expert; None if one parameter holds all experts."""
    if isinstance(layer, StackedExperts):
        yield from ((None, param) for param in layer.params.values())
        return
    for number, expert in enumerate(layer.experts):
        yield from ((number, param) for param in expert.parameters())


def _wanted(
    source: Sources | None, number: int | None, count: int, place: Place, slices: dict[str, Any], converters: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the tensors, or parts of them, that this rank reads for one parameter; None if the files do not separate its experts.

    Args:
        source: Names in the files for the parameter, by converter pattern.
        number: Index of the parameter's expert; None if the parameter holds all experts.
        count: Number of experts.
        place: Place of this rank among the ranks that hold all experts.
        slices: All tensors in the files, by name.
        converters: Weight converters of transformers, by pattern.
    """
    if source is None:
        return None
    own = place.own(count)
    if number is not None:
        keys = source.get("", []) if len(source) == 1 else []
        if len(keys) != 1:
            return None
        return {keys[0]: slices[keys[0]]} if own.start <= number < own.stop else {}
    values: dict[str, Any] = {}
    for pattern, keys in source.items():
        converter = converters.get(pattern)
        if len(keys) == count and _keeps_experts_apart(converter, merges=True):
            values.update({key: slices[key] for key in keys[own.start : own.stop]})
        elif len(keys) == 1 and slices[keys[0]].get_shape()[:1] == [count] and _keeps_experts_apart(converter, merges=False):
            values[keys[0]] = _Part(slices[keys[0]], own.start, own.stop)
        else:
            return None
    return values


def _keeps_experts_apart(converter: Any, merges: bool) -> bool:
    """Return whether a converter computes each expert independently: converting some experts gives the same as converting all.

    Args:
        converter: The converter; None if the tensors are only renamed.
        merges: Whether the converter takes one tensor per expert; otherwise one tensor with all experts.
    """
    operations = list(converter.operations) if converter is not None else []
    if converter is not None and len(converter.target_patterns) != 1:
        return False
    if merges:
        if not operations or type(operations[0]).__name__ != _MERGE or operations[0].dim != 0:
            return False
        operations = operations[1:]
    return all(_leaves_first_dim(operation) for operation in operations)


def _leaves_first_dim(operation: Any) -> bool:
    kind = type(operation).__name__
    if kind == _TRANSPOSE:
        return bool(min(operation.dim0, operation.dim1) > 0)
    return kind in _ALONG_ONE and bool(operation.dim > 0)


# -- stage 3 -------------------------------------------------------------------------------------------------------------


def _load_apart(load: Load, share: _Share, rest: dict[str, Any]) -> Any:
    """Load at stage 3: every rank reads its own experts, which leave their shards; rank 0 reads the rest for all. Collective."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model

    own, _ = convert_and_load_state_dict_in_model(load.model, share.values, load.config)
    wrong = share.params & {name for name, param in load.model.named_parameters() if param.is_meta}
    if wrong:
        why = "; ".join(map(str, own.conversion_errors.values())) or "their shapes differ"
        raise StateError(
            f"from_pretrained into {type(load.model).__name__}: the experts in the checkpoint do not fit the model: "
            f"{', '.join(sorted(wrong)[:5])} ({why}). The checkpoint belongs to another architecture; load it into its own class"
        )
    return load.of({name: _value(value) for name, value in rest.items()})


def _value(found: Any) -> Any:
    """Return the values of a tensor on rank 0, which sends them to the others; on other ranks a meta tensor of its shape and type."""
    from transformers.modeling_utils import str_to_torch_dtype

    if dist.get_rank() == 0:
        return found[...]
    return torch.empty(found.get_shape(), dtype=str_to_torch_dtype[found.get_dtype()], device="meta")


_EAGER = "eager"  # not in the table: each class has its own implementation
_ours: dict[str, Implementation] = {}  # our functions in the table, by implementation


def dispatch_in_table(modules: Iterable[nn.Module]) -> None:
    """Replace all implementations in transformers' table of expert functions by ones that send the tokens of divided layers to their ranks.

    Args:
        modules: Layers whose experts are divided. Other layers still run the implementation that was in the table.
    """
    if not list(modules):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as functions

    for name in [*functions.valid_keys(), _EAGER]:
        present = functions.get(name)
        if present is not None and present is _ours.get(name):
            continue
        functions[name] = _ours[name] = dispatching(_eager if present is None else _always(present))


def _always(implementation: Implementation) -> Callable[[nn.Module], Implementation]:
    return lambda module: implementation


def _eager(module: nn.Module) -> Implementation:
    """Return the forward that the module's class defines, which runs if no implementation is chosen."""
    found: Any = type(module).forward
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found  # type: ignore[no-any-return]
