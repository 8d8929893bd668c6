"""Compare facts over ranks: models and optimizers at ``initialize``, values of parameters, and at each boundary all facts that must be
equal.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives, as_sent
from hf_zero.core.units.checksums import windows
from hf_zero.core.units.grouping import NamedParam
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.marks import is_expert, whole_shape
from hf_zero.core.units.shard import strided_parts
from hf_zero.core.units.unit import full_shape
from hf_zero.errors import StateError
from hf_zero.memory.host_memory import mapped_files
from hf_zero.observe import warn_once

T = TypeVar("T", int, str)

# Digests are compared as ``_PIECES`` numbers of ``_DIGITS`` hexadecimal digits, 24 bits each.
_PIECES, _DIGITS = 10, 6
_MOST_KINDS = 4  # number of kinds of ranks that a message distinguishes


@dataclass(frozen=True)
class Kind:
    """Ranks with the same facts.

    Attributes:
        ranks: Positions of the ranks on the axis.
        lines: Facts of these ranks.
    """

    ranks: list[int]
    lines: list[str]

    @property
    def named(self) -> str:
        """Return the ranks in words, see ``name_ranks``."""
        return name_ranks(self.ranks)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"; of more than eight ranks, the first eight and the number of the others."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def ranks_by_facts(lines: Sequence[str], collectives: Collectives, what: str) -> list[Kind]:
    """Group the ranks by their ``lines``, rank 0's kind first; one kind if all ranks have the same lines. Collective.

    The ranks compare digests in one vote, and exchange their lines only if these differ. If there are many kinds, the first few are
    returned.

    Args:
        lines: This rank's facts, in an order that all ranks use.
        collectives: Network of the ranks that must have the same facts.
        what: Subject of the facts, for labels.
    """
    everybody = list(range(collectives.world))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    pieces = [int(digest[start : start + _DIGITS], 16) for start in range(0, _PIECES * _DIGITS, _DIGITS)]
    most = collectives.largest_of([*pieces, *(-piece for piece in pieces)], f"digest of the {what}")
    if most[:_PIECES] == [-least for least in most[_PIECES:]]:
        return [Kind(everybody, list(lines))]
    ranks: dict[str, list[int]] = {}
    for rank, theirs in enumerate(collectives.gather_objects(digest, f"digests of the {what}")):
        ranks.setdefault(theirs, []).append(rank)
    kinds = list(ranks.values())[:_MOST_KINDS]
    return [Kind(kind, collectives.broadcast_object(list(lines), kind[0], what)) for kind in kinds]


def fact(key: str, value: object) -> str:
    """Return a line that states the value of ``key``."""
    return f"{key}\t{value}"


def is_fact(line: str | None) -> bool:
    """Return whether ``line`` was made by ``fact``."""
    return line is not None and "\t" in line


def differing(kinds: Sequence[Kind], default: Callable[[str], str] = lambda _key: "not there", most: int = 8) -> list[str]:
    """Return, for each fact that differs between kinds of ranks, a clause with its key, all values and their ranks.

    Args:
        kinds: Ranks grouped by their facts.
        default: Returns the value of a key that a kind does not have.
        most: The largest number of clauses.
    """
    tables = [dict(line.split("\t", 1) for line in kind.lines if is_fact(line)) for kind in kinds]
    clauses = []
    for key in dict.fromkeys(key for table in tables for key in table):
        by_value: dict[str, list[int]] = {}
        for kind, table in zip(kinds, tables, strict=True):
            by_value.setdefault(table[key] if key in table else default(key), []).extend(kind.ranks)
        if len(by_value) > 1:
            clauses.append(f"{key} is " + ", ".join(f"{value} on {name_ranks(sorted(ranks))}" for value, ranks in by_value.items()))
    return clauses[:most] + ([f"and {len(clauses) - most} more"] if len(clauses) > most else [])


def require_same_model(module: nn.Module, members: Sequence[NamedParam], collectives: Collectives, notes: Sequence[str] = ()) -> None:
    """Raise unless all ranks have parameters and buffers of the same names, shapes, dtypes and groups, and the same notes; collective.

    Otherwise units would differ in size, and their first exchange would end with an error of the network, or with wrong values.

    Args:
        module: The user's module.
        members: The module's parameters.
        collectives: Network of the data-parallel axis.
        notes: Further lines that must be the same: the optimizer, the hyper-parameters of its groups.

    Raises:
        StateError: The ranks differ; raised on every rank, with the first difference, or with all differences of the optimizer.
    """
    if collectives.world == 1:
        return
    kinds = ranks_by_facts([*notes, *map(_line, members), *_buffer_lines(module)], collectives, "model")
    if len(kinds) > 1:
        different = next(pair for pair in zip_longest(*(kind.lines for kind in kinds)) if len(set(pair)) > 1)
        if any(is_fact(line) for line in different):
            raise _other_optimizer(kinds)
        text = ", ".join(f"{kind.named} has {line or 'nothing more'}" for kind, line in zip(kinds, different, strict=True))
        counts = " and ".join(str(len(kind.lines)) for kind in kinds)
        raise StateError(
            f"the model is not the same on all data-parallel ranks: {text} ({counts} entries in all). Build it from the same "
            "configuration and vocabulary, freeze the same parameters and make the same optimizer and param groups on every rank"
        )


def require_same_optimizer(notes: Sequence[str], collectives: Collectives) -> None:
    """Raise unless all ranks have the same ``notes``, for ranks that hold different parts of one model; collective.

    Raises:
        StateError: The ranks differ; raised on every rank, with all differences.
    """
    if collectives.world > 1:
        kinds = ranks_by_facts(notes, collectives, "optimizer")
        if len(kinds) > 1:
            raise _other_optimizer(kinds)


def _other_optimizer(kinds: Sequence[Kind]) -> StateError:
    text = "; ".join(differing(kinds))
    return StateError(
        f"the optimizer is not the same on all ranks: {text}. Each rank updates its part of the parameters by its own rule: make the same "
        "optimizer with the same hyper-parameters on every rank"
    )


def _line(member: NamedParam) -> str:
    group = "frozen" if member.group == FROZEN else f"in param group {member.group}"
    shape = whole_shape(member.param) if is_expert(member.param) else full_shape(member.param)
    return f"{member.name} {tuple(shape or ())} {member.param.dtype} {group}"


def _buffer_lines(module: nn.Module) -> list[str]:
    """Return a line for each buffer that rank 0 broadcasts to all ranks."""
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if buffer.numel() and not buffer.is_meta)
    return [
        f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" + "".join(f" {tuple(part.shape)}" for part in strided_parts(buffer)[1:])
        for name, buffer in buffers
    ]


_WINDOWS, _WINDOW = 4, 256  # number and size (elements) of the windows that are read of a weight that is mapped from a file


def equal_values(tensors: Mapping[str, torch.Tensor], collectives: Collectives, group: str) -> None:
    """Copy rank 0's values of tensors that differ between the ranks of a group to all of them; collective.

    Args:
        tensors: Tensors by name, with the same names, shapes and dtypes on every rank; tensors without values are skipped.
        collectives: Network of the group.
        group: Name of the group, for the warning.
    """
    if not tensors or collectives.world == 1 or collectives.pretended:
        return
    files, device = mapped_files(), collectives.topology.device
    marks = [_mark(tensor, any(start <= tensor.data_ptr() < stop for start, stop in files)) for tensor in tensors.values()]
    own = torch.tensor(marks, dtype=torch.float64, device=device)
    first = own.clone()
    collectives.broadcast(first, 0, "sums of rank 0's values")
    differing = (own != first).to(torch.float32)
    collectives.all_reduce(differing, "equal values").wait()
    unequal = [named for named, ranks in zip(tensors.items(), differing.tolist(), strict=True) if ranks]
    if not unequal:
        return
    warn_once(f"the ranks of {group} start with different weights: rank 0's are used")
    with torch.no_grad():
        for name, tensor in unequal:
            if has_no_values(tensor):
                continue
            values = tensor.detach().to(device).contiguous()
            collectives.broadcast(values, 0, name)
            tensor.data.copy_(values)


def _mark(tensor: torch.Tensor, in_file: bool) -> float:
    """Return a sum that very probably differs if values differ.

    ``from_pretrained`` returns weights that are mapped from their files, and reading an element loads its page. Only a few windows of such
    weights are read, so that a rank loads little more than its own shards.
    """
    if tensor.numel() == 0 or tensor.is_meta or has_no_values(tensor):
        return 0.0
    values = as_sent(tensor.detach()).reshape(-1)
    if in_file and values.numel() > _WINDOWS * _WINDOW:
        values = windows(values, _WINDOWS, _WINDOW)
    return float(values.sum(dtype=torch.float64))


def has_no_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a placeholder for values that other stages of a pipeline have ([Note: held stages])."""
    return tensor.dim() > 0 and not any(tensor.stride())


@dataclass(frozen=True)
class SharedFact:
    """A fact that must be the same on all ranks.

    Attributes:
        numbers: This rank's values: a few floats or integers.
        refuse: Called with the network on every rank if the numbers differ; may exchange more, and raises.
    """

    numbers: Sequence[float]
    refuse: Callable[[Collectives], NoReturn]


# How gradients change the set of parameters that are updated, in rising order; 0 is not at all:
MISSES = 1  # a parameter that was updated in the last step, and may rest, has no gradient
RESTED = 2  # a parameter that rested in the last step has one
JOINS = 3  # a parameter that is in no trained unit has one


class Agreed(NamedTuple):
    """Result of a boundary's vote, the same on all ranks.

    Attributes:
        written: Whether a script has written gradients on any rank.
        signal: Number of a signal that asks a rank to end (the highest of several); 0 if no rank has received one.
        news: The largest of ``MISSES``, ``RESTED`` and ``JOINS`` that applies on any rank; 0 without.
        buffers: The largest ``WrittenBuffers.news`` of any rank.
        changed: Whether the norm of the gradients must be taken anew, because no rank has taken it or some gradient has changed since.
        reads: Whether a rank must know that the norm is finite before it launches the update.
    """

    written: bool
    signal: int
    news: int
    buffers: int
    changed: bool
    reads: bool

    @property
    def waits(self) -> bool:
        """Return whether a parameter that the last step has not updated has a gradient on any rank."""
        return self.news >= RESTED


def agree(collectives: Collectives, facts: Sequence[SharedFact], anywhere: Sequence[int] = ()) -> list[int]:
    """Compare the facts of all ranks in one message; collective, on the host.

    The message has a digest of 24 bits for all facts that must be the same. The number of micro-steps is one of the facts, so the digest
    changes at each boundary: if two digests are equal by chance, they very probably differ at the next boundary.

    Args:
        collectives: Network of the ranks.
        facts: Facts that must be the same on all ranks; for the first that differs, ``refuse`` is called.
        anywhere: Numbers of this rank; the result is the maximum over ranks.

    Returns:
        For each number in ``anywhere``, its maximum over all ranks.
    """
    brought = [array("d", one.numbers).tobytes() for one in facts]
    digest = int.from_bytes(hashlib.blake2b(b"".join(brought), digest_size=3).digest(), "big")
    most, least, *answers = collectives.largest_of([digest, -digest, *anywhere], "micro-steps")
    if most != -least:
        by_rank = collectives.gather_objects(brought, "what differs at the boundary")
        next(one for index, one in enumerate(facts) if len({line[index] for line in by_rank}) > 1).refuse(collectives)
    return [int(answer) for answer in answers]


def _ranks_by(value: T, label: str, collectives: Collectives) -> list[tuple[T, list[int]]]:
    """Return each value that ranks have, in order, with the ranks that have it; collective, ``label`` names the operation."""
    found: dict[T, list[int]] = {}
    for rank, one in enumerate(collectives.gather_objects(value, label)):
        found.setdefault(one, []).append(rank)
    return sorted(found.items())


def same_call(what: str) -> SharedFact:
    """Return the function that the script has called as a fact for a vote; all votes between a backward and its step begin with it.

    The error is a StateError that names the ranks and their calls.
    """

    def refuse(collectives: Collectives) -> NoReturn:
        text = "; ".join(f"{name_ranks(ranks)}: {call}" for call, ranks in _ranks_by(what, "calls", collectives))
        raise StateError(
            f"the ranks have come to different calls that all of them must make ({text}): read param.grad of the same parameters on every "
            "rank, and print or log on one rank afterwards"
        )

    return SharedFact([zlib.crc32(what.encode())], refuse)


def same_micro_steps(micro_steps: int) -> SharedFact:
    """Return the number of micro-steps as a fact for a vote, which detects ranks that make fewer or more of them than others.

    Args:
        micro_steps: Number of backwards that this rank has begun so far, and of training forwards that raised.

    The error is a StateError that names the ranks and their numbers.
    """

    def refuse(collectives: Collectives) -> NoReturn:
        by_count = _ranks_by(micro_steps, "micro-steps", collectives)
        text = "; ".join(f"{count} on rank(s) {', '.join(map(str, ranks))}" for count, ranks in by_count)
        raise StateError(
            f"the ranks have begun different numbers of micro-steps: {text}, so they would train on different batches. Either "
            "a rank skipped a batch because its loader is shorter (even_batches=False, a sampler that does not divide "
            "evenly), or the script caught an exception in a forward or backward and continued. Give all ranks the same number "
            "of batches, and let an exception end the run"
        )

    return SharedFact([micro_steps], refuse)


_NOTHING = 1e30  # stands for values that are not numbers
_NUMBERS = frozenset((float, bool, int))


def facts_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the class of ``optimizer``, and each hyper-parameter of each of its groups, one line each.

    Numbers are rounded to single precision, so that a learning rate is the same as a number and as a tensor.
    """
    kind = type(optimizer)
    lines = [fact("optimizer", f"{kind.__module__}.{kind.__qualname__}"), fact("number of param groups", len(optimizer.param_groups))]
    for index, group in enumerate(optimizer.param_groups):
        lines += [fact(f"{key} of param group {index}", _shown(group[key])) for key in sorted(optimizer.defaults) if key in group]
    return lines


def same_groups(optimizer: torch.optim.Optimizer) -> SharedFact:
    """Return the numeric hyper-parameters of ``optimizer`` as a fact for the vote of a boundary.

    If a scheduler differs on a rank, or a callback changes one rank's learning rate, each rank would update its part of the parameters by a
    rule of its own. Learning rates on a device are not read, because the host would have to wait. The error is a StateError that names
    group, key, values and ranks.
    """

    def refuse(collectives: Collectives) -> NoReturn:
        kinds = ranks_by_facts(facts_of(optimizer), collectives, "param groups")
        raise StateError(
            f"hyper-parameters are not the same on all ranks: {'; '.join(differing(kinds))}. A scheduler, a callback or the script has "
            "changed them on some ranks only, and each rank updates its part of the parameters by its own: change them on all ranks alike"
        )

    numbers = array("f")
    keys = list(optimizer.defaults)
    for group in optimizer.param_groups:
        for key in keys:
            value: Any = group.get(key)
            if type(value) in _NUMBERS:
                numbers.append(value)
            else:
                numbers.extend(_numbers(value))
    return SharedFact(numbers, refuse)


def same_clipping(max_norm: float) -> SharedFact:
    """Return the norm that gradients are clipped to as a fact for the vote of a boundary. The error is a StateError that names all
    values.
    """

    def refuse(collectives: Collectives) -> NoReturn:
        kinds = ranks_by_facts([fact("the norm that gradients are clipped to", max_norm)], collectives, "clipping")
        raise StateError(f"{'; '.join(differing(kinds))} (0 is off): call clip_grad_norm_ with the same number on every rank")

    return SharedFact([max_norm], refuse)


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a hyper-parameter: one, the items of a list, or ``_NOTHING`` for other values."""
    if isinstance(value, (tuple, list)):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"):
        return [float(value)]
    return [_NOTHING]


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = float(value)
    if isinstance(value, float):
        single = array("f", [value])
        return next(
            (text for text in (f"{value:.{digits}g}" for digits in range(6, 9)) if array("f", [float(text)]) == single), f"{value:.9g}"
        )
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return str(value) if value is None or isinstance(value, (bool, int, str)) else type(value).__name__
