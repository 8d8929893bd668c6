"""What a rank reads of a checkpoint when experts will be divided over ranks: all else as ever, and its own experts alone.

[Note: reading a share] transformers opens safetensors files without reading them, renames what is in them, and converts it: experts that
are saved one by one become one tensor. Which names lead to which parameter its own functions say. Of a parameter of experts the entries
of other ranks are left out before anything is read: tensors by their number where experts are saved one by one, a slice of the tensor
where they lie in one. transformers then loads parameters that are made for this rank's experts. At stage 3, where rank 0 reads for all,
every rank reads its experts itself. A layer whose tensors are saved in another way is loaded whole, and ``initialize`` divides it.
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
    """A run of entries along the first dimension of a tensor in a file; stands where transformers expects the file's own slice."""

    def __init__(self, whole: Any, start: int, stop: int) -> None:
        self._whole, self._start, self._stop = whole, start, stop

    def __getitem__(self, index: Any) -> Any:
        if index is not Ellipsis:
            raise UnsupportedError(f"of a rank's share of experts {index!r} was asked for; all of it ([...]) is allowed")
        return self._whole[self._start : self._stop]

    def get_shape(self) -> list[int]:
        """As the file's slice."""
        return [self._stop - self._start, *self._whole.get_shape()[1:]]

    def get_dtype(self) -> str:
        """As the file's slice."""
        return str(self._whole.get_dtype())


@dataclass
class _Share:
    """Layers of which a rank reads its own experts.

    Attributes:
        held: Each layer's module, and what is to be noted on it.
        values: Name in the files -> what is to be read of it; without what other ranks read.
        names: All names in the files that lead to these layers.
        params: Names of their parameters.
    """

    held: list[tuple[nn.Module, Held]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    params: set[str] = field(default_factory=set)


def load_experts(load: Load, rest_of: Callable[[Load], Any]) -> Any:
    """Loads this rank's experts and everything else; see [Note: reading a share].

    Args:
        load: The call.
        rest_of: Leaves more out of what other ranks' experts have been left out of; None where it leaves nothing out.

    Returns:
        What ``load.whole()`` does; None, with nothing read, where experts will not be divided or cannot be told apart.
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
    """Return the layers that an engine will divide, and where this rank stands; none where it will not, or will refuse."""
    from transformers.integrations.deepspeed import deepspeed_config

    ranks, index = expert_ranks(deepspeed_config(), claims_of_load())
    if ranks == 1:
        return [], Place(1, 0)
    try:
        layers = present_experts(model)
    except UnsupportedError:  # said by initialize: this may be another model than the one to be trained
        return [], Place(1, 0)
    return [layer for layer in layers if layer.count % ranks == 0], Place(ranks, index)


def _sharded_already() -> bool:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


# -- which tensors of the files are this rank's --------------------------------------------------------------------------


def _share(model: Any, layers: Iterable[ExpertLayer], place: Place, slices: dict[str, Any], load_config: Any) -> _Share:
    """Layers whose tensors in the files can be told apart by expert, with room for this rank's made in ``model``."""
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
    """The parameters of a layer's experts, each with the number of its expert; None where all lie in one."""
    if isinstance(layer, StackedExperts):
        yield from ((None, param) for param in layer.params.values())
        return
    for number, expert in enumerate(layer.experts):
        yield from ((number, param) for param in expert.parameters())


def _wanted(
    source: Sources | None, number: int | None, count: int, place: Place, slices: dict[str, Any], converters: dict[str, Any]
) -> dict[str, Any] | None:
    """What this rank reads for one parameter; None where that cannot be told.

    Args:
        source: What the files have for it.
        number: Its expert, where it has one.
        count: Number of experts.
        place: Where this rank stands.
        slices: Everything in the files.
        converters: What computes with them.
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
    """Return whether what a converter makes of some experts is the same as those of what it makes of all.

    Args:
        converter: None where tensors are only renamed.
        merges: It is given a tensor of each expert, else one of all.
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
    """Every rank its experts, which leave the shards over all ranks; rank 0 the rest for all; collective."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model

    own, _ = convert_and_load_state_dict_in_model(load.model, share.values, load.config)
    wrong = share.params & {name for name, param in load.model.named_parameters() if param.is_meta}
    if wrong:
        why = "; ".join(map(str, own.conversion_errors.values())) or "their shapes differ"
        raise StateError(
            f"from_pretrained into {type(load.model).__name__}: experts in the checkpoint do not fit the model: "
            f"{', '.join(sorted(wrong)[:5])} ({why}). It belongs to another architecture"
        )
    return load.of({name: _value(value) for name, value in rest.items()})


def _value(found: Any) -> Any:
    """Of a tensor that only rank 0 hands on: the values there, elsewhere its shape."""
    from transformers.modeling_utils import str_to_torch_dtype

    if dist.get_rank() == 0:
        return found[...]
    return torch.empty(found.get_shape(), dtype=str_to_torch_dtype[found.get_dtype()], device="meta")


_EAGER = "eager"  # not in the table: each class has its own
_ours: dict[str, Implementation] = {}  # our functions in the table, by implementation


def dispatch_in_table(modules: Iterable[nn.Module]) -> None:
    """Puts functions in the place of all implementations that send the tokens of divided layers to their experts.

    Args:
        modules: Layers whose experts are divided; for all others the table is what it was.
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
    """The forward that the module's class defines, which is computed where no implementation is chosen."""
    found: Any = type(module).forward
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found  # type: ignore[no-any-return]
