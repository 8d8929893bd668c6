"""All ranks of the data-parallel axis must bring the same model to ``initialize``: checked before anything is laid out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.grouping import NamedParam
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.tp_shard import is_expert, whole_shape
from hf_zero.core.units.unit import full_shape
from hf_zero.errors import StateError

# What of a digest is compared, by one vote however many ranks there are: so many numbers of so many hexadecimal digits, 24 bits.
_PIECES, _DIGITS = 10, 6


def require_same_model(module: nn.Module, members: Sequence[NamedParam], collectives: Collectives, notes: Sequence[str] = ()) -> None:
    """Returns when all ranks have parameters and buffers of the same names, shapes, types and groups, and the same notes; collective.

    Units would otherwise differ in size, and the first exchange of one would end in an error of the network, or in none.

    Args:
        module: The user's module.
        members: Its parameters.
        collectives: The data-parallel axis.
        notes: What else has to be the same, in words.

    Raises:
        StateError: They differ; on every rank, with the first difference.
    """
    if collectives.world == 1:
        return
    lines = [*notes, *map(_line, members), *_buffer_lines(module)]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    pieces = [int(digest[start : start + _DIGITS], 16) for start in range(0, _PIECES * _DIGITS, _DIGITS)]
    most = collectives.largest_of([*pieces, *(-piece for piece in pieces)], "digest of the model")
    if most[:_PIECES] == [-least for least in most[_PIECES:]]:
        return
    digests = collectives.gather_objects(digest, "digests of the model")
    rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
    first, second = (collectives.broadcast_object(lines, source, "parameters of the model") for source in (0, rank))
    mine, other = next(pair for pair in zip_longest(first, second) if pair[0] != pair[1])
    raise StateError(
        f"the model is not the same on all data-parallel ranks: rank 0 has {mine or 'nothing more'}, rank {rank} has "
        f"{other or 'nothing more'} ({len(first)} and {len(second)} entries in all). Build it from the same "
        "configuration and vocabulary, freeze the same parameters and make the same optimizer and param groups on every rank"
    )


def _line(member: NamedParam) -> str:
    group = "frozen" if member.group == FROZEN else f"in param group {member.group}"
    shape = whole_shape(member.param) if is_expert(member.param) else full_shape(member.param)
    return f"{member.name} {tuple(shape or ())} {member.param.dtype} {group}"


def _buffer_lines(module: nn.Module) -> list[str]:
    """Of the buffers that rank 0 gives to all."""
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if buffer.numel() and not buffer.is_meta)
    return [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers]
