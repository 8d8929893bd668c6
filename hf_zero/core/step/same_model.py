"""All ranks of the data-parallel axis must bring the same model to ``initialize``: checked before anything is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.step.same_facts import Kind, differing, is_fact, ranks_by_facts
from hf_zero.core.units.grouping import NamedParam
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.tp_shard import is_expert, whole_shape
from hf_zero.core.units.unit import full_shape
from hf_zero.errors import StateError


def require_same_model(module: nn.Module, members: Sequence[NamedParam], collectives: Collectives, notes: Sequence[str] = ()) -> None:
    """Returns when all ranks have parameters and buffers of the same names, shapes, types and groups, and the same notes; collective.

    Units would otherwise differ in size, and the first exchange of one would end in an error of the network, or in none.

    Args:
        module: The user's module.
        members: Its parameters.
        collectives: The data-parallel axis.
        notes: What else has to be the same, in words: of the optimizer, its groups' hyper-parameters.

    Raises:
        StateError: They differ; on every rank, with the first difference, or all of those of the optimizer.
    """
    if collectives.world == 1:
        return
    kinds = ranks_by_facts([*notes, *map(_line, members), *_buffer_lines(module)], collectives, "model")
    if len(kinds) > 1:
        different = next(pair for pair in zip_longest(*(kind.lines for kind in kinds)) if len(set(pair)) > 1)
        if any(is_fact(line) for line in different):
            raise _other_optimizer(kinds)
        told = ", ".join(f"{kind.named} has {line or 'nothing more'}" for kind, line in zip(kinds, different, strict=True))
        counts = " and ".join(str(len(kind.lines)) for kind in kinds)
        raise StateError(
            f"the model is not the same on all data-parallel ranks: {told} ({counts} entries in all). Build it from the same "
            "configuration and vocabulary, freeze the same parameters and make the same optimizer and param groups on every rank"
        )


def require_same_optimizer(notes: Sequence[str], collectives: Collectives) -> None:
    """Returns when all ranks have the same ``notes``, for ranks that hold different parts of one model; collective.

    Raises:
        StateError: They differ; on every rank, with all of the differences.
    """
    if collectives.world > 1:
        kinds = ranks_by_facts(notes, collectives, "optimizer")
        if len(kinds) > 1:
            raise _other_optimizer(kinds)


def _other_optimizer(kinds: Sequence[Kind]) -> StateError:
    told = "; ".join(differing(kinds))
    return StateError(
        f"the optimizer is not the same on all ranks: {told}. Each rank updates its part of the parameters by its own rule: make the same "
        "optimizer with the same hyper-parameters on every rank"
    )


def _line(member: NamedParam) -> str:
    group = "frozen" if member.group == FROZEN else f"in param group {member.group}"
    shape = whole_shape(member.param) if is_expert(member.param) else full_shape(member.param)
    return f"{member.name} {tuple(shape or ())} {member.param.dtype} {group}"


def _buffer_lines(module: nn.Module) -> list[str]:
    """Of the buffers that rank 0 gives to all."""
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if buffer.numel() and not buffer.is_meta)
    return [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers]
