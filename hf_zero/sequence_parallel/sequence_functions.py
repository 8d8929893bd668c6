"""Functions of transformers that pass states along the tokens, over slices: their heads or channels are exchanged for whole sequences.

[Note: sequence functions] Linear attention, gated delta rules, state-space layers and short convolutions of transformers call functions
that stand for kernels, one per kernel, whose arguments every model shares. A recurrence computes each head (or channel) by itself:
each rank gets whole sequences of its part of them (one exchange there, one back), and uses its part of the values per head. A
convolution sees a few tokens back: each rank gets the last ones of the rank before. The modules' own code around the functions sees
slices. Fused kernels that do all at once say that they are not there, as they do on a CPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.exchange import all_to_all, exchangeable, key_heads
from hf_zero.sequence_parallel.joining import cut, join

Function = Callable[..., Any]


@dataclass(frozen=True)
class Recurrence:
    """Layout of a function's arguments.

    Attributes:
        leader: The argument whose heads the result has.
        tokens: Dimension of the tokens, by argument.
        heads: Dimension of heads or channels, by argument.
        grouped: Arguments that may have fewer heads, each for several of the leader's.
        shared: Arguments with tokens that all heads read.
        states: Arguments that must be absent: they continue another sequence, or tell samples apart.
    """

    leader: str
    tokens: dict[str, int]
    heads: dict[str, int]
    grouped: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    states: tuple[str, ...] = ()


_DELTA = Recurrence(
    "value",
    dict.fromkeys(("query", "key", "value", "g", "beta"), 1),
    dict.fromkeys(("query", "key", "value", "g", "beta"), 2),
    grouped=("query", "key"),
    states=("initial_state", "cu_seqlens"),
)
RECURRENCES: dict[str, Recurrence] = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Recurrence(
        "hidden_states",
        dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 1),
        {"hidden_states": 2, "dt": 2, "B": 2, "C": 2, "z": 2, "A": 0, "D": 0, "dt_bias": 0},
        grouped=("B", "C"),
        states=("initial_states", "seq_idx", "cu_seqlens"),
    ),
    "mamba_selective_scan": Recurrence(
        "hidden_states",
        dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2),
        {"hidden_states": 1, "dt": 1, "z": 1, "A": 0, "D": 0, "delta_bias": 0},
        shared=("B", "C"),
        states=("seq_idx", "cu_seqlens"),
    ),
}
CONVOLUTION = "causal_conv1d_fn"
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
_NAMES = (*RECURRENCES, CONVOLUTION, *FUSED)

_under_way: list[Collectives] = []  # groups of the modules that run now and see slices, one inside the other


def enter(collectives: Collectives) -> None:
    """Begin the call of a module whose functions get slices."""
    _under_way.append(collectives)


def leave() -> None:
    """End it."""
    _under_way.pop()


def functions_in(modules: Iterable[ModuleType]) -> list[tuple[ModuleType, str, Function]]:
    """Return the functions of the table that Python modules of a model name: (module, name there, function)."""
    return [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value) and name in _NAMES and value.__module__.startswith("transformers.")
    ]


def exchange_heads_in_functions(modules: Iterable[ModuleType]) -> None:
    """Replace functions of the table by ones that exchange heads during forwards over slices, and call the originals otherwise."""
    for module, name, function in functions_in(modules):
        if not hasattr(function, "_hf_zero_exchanges_heads"):
            setattr(module, name, _dispatching(name, function))


def _dispatching(name: str, function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _under_way:
            return function(*args, **kwargs)
        if name in FUSED:
            return None
        run = convolve if name == CONVOLUTION else functools.partial(recur, RECURRENCES[name])
        return run(_under_way[-1], function, args, kwargs)

    call._hf_zero_exchanges_heads = True  # type: ignore[attr-defined]
    return call


def named(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; those of ``**kwargs`` too."""
    names = [item.name for item in inspect.signature(function).parameters.values() if item.kind is item.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def problem_of(name: str, given: dict[str, Any], ranks: int) -> str:
    """Return why ``ranks`` cannot exchange heads in this call; "" if they can."""
    layout = RECURRENCES.get(name)
    if layout is None:
        return ""
    heads = given[layout.leader].shape[layout.heads[layout.leader]]
    counts = [given[key].shape[layout.heads[key]] for key in layout.grouped if given.get(key) is not None]
    if all(exchangeable(heads, count, ranks) for count in (heads, *counts)):
        return ""
    return f"{ranks} ranks do not divide its {heads} heads"


def recur(layout: Recurrence, collectives: Collectives, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a recurrence on this rank's heads of whole sequences; collective, differentiable.

    Args:
        layout: Where tokens and heads are.
        collectives: The sequence-parallel group.
        function: The recurrence.
        args: Its arguments, of slices.
        kwargs: Likewise.

    Returns:
        The slice of its result, for all heads; states of the end are of this rank's heads.

    Raises:
        UnsupportedError: The call continues from a state, or tells packed samples apart.
    """
    given = named(function, args, kwargs)
    states = [key for key in layout.states if given.get(key) is not None]
    if states:
        raise UnsupportedError(
            f"sequence parallelism: {function.__name__} got {', '.join(states)}, which slices cannot have: sequences begin anew, and "
            "samples are one per row"
        )
    ranks, rank = collectives.world, collectives.rank
    total = given[layout.leader].shape[layout.heads[layout.leader]]
    own = slice(rank * (total // ranks), (rank + 1) * (total // ranks))
    exchanged = [key for key in layout.tokens if key in layout.heads and given.get(key) is not None]
    rows = [_rows(given[key], layout.heads[key], total if key in layout.grouped else None, ranks) for key in exchanged]
    for key, received in zip(exchanged, all_to_all(collectives, *rows), strict=True):
        given[key] = _joined(received, layout.tokens[key])
    for key in layout.shared:
        given[key] = join(collectives, given[key], layout.tokens[key])
    for key, dim in layout.heads.items():
        if key not in layout.tokens and given.get(key) is not None:
            given[key] = given[key].narrow(dim, own.start, own.stop - own.start)
    result = function(**given)
    output, further = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
    (back,) = all_to_all(collectives, _rows(output, layout.tokens[layout.leader], None, ranks))
    whole = _joined(back, layout.heads[layout.leader])
    return whole if further is None else (whole, *further)


def _rows(tensor: torch.Tensor, dim: int, heads: int | None, ranks: int) -> torch.Tensor:
    """Return ``tensor`` cut into ``ranks`` parts along ``dim``, stacked; with ``heads``, of which each of its own serves several, each rank
    gets those it needs.
    """
    if heads is not None:
        sent = key_heads(heads, tensor.shape[dim], ranks).sent
        if sent is not None:
            tensor = tensor.index_select(dim, torch.tensor(sent, device=tensor.device))
    return tensor.unflatten(dim, (ranks, -1)).movedim(dim, 0)


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def convolve(collectives: Collectives, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Run a causal convolution over slices: with the last tokens of the rank before; collective, differentiable.

    Args:
        collectives: The sequence-parallel group.
        function: Takes (batch, channels, tokens) and a weight (channels, width), and pads with zeros in front.
        args: Its arguments, of slices.
        kwargs: Likewise.
    """
    given = named(function, args, kwargs)
    if given.get("seq_idx") is not None or given.get("initial_states") is not None:
        raise UnsupportedError(
            f"sequence parallelism: {function.__name__} got seq_idx or initial_states; pass one sample per row and no state"
        )
    hidden, back = given["hidden_states"], given["weight"].shape[-1] - 1
    length, ranks, rank = hidden.shape[2], collectives.world, collectives.rank
    if length < back:  # the rank before does not have them all
        result: torch.Tensor = function(**{**given, "hidden_states": join(collectives, hidden, 2)})
        return cut(collectives, result, 2)
    if not back:
        return function(**given)  # type: ignore[no-any-return]
    ends = join(collectives, hidden[:, :, length - back :].contiguous(), 2)
    before = ends.unflatten(2, (ranks, back))[:, :, rank - 1] if rank else ends[:, :, :back] * 0  # of the graph on every rank
    found: torch.Tensor = function(**{**given, "hidden_states": torch.cat([before, hidden], dim=2)})
    return found[:, :, back:]
