"""Run layers whose experts are modules in a list: each rank computes its own experts, for the tokens of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, note_call
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.expert_parallel.dispatch import Shares, exchange_counts, send_to_experts, tokens_of_each
from hf_zero.expert_parallel.exchange import beside_idle, join_experts, tie
from hf_zero.system.planning import has_values


@dataclass
class _Calls:
    """The calls of experts in one forward of a layer: recorded in the first run, given their results in the second.

    Attributes:
        noted: Index of the expert and tokens of each call.
        answers: Result of each call; None during the first run.
        answered: Number of calls in the second run so far.
    """

    noted: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    answers: list[torch.Tensor] | None = None
    answered: int = 0


class ListedLayer:
    """A replacement of the forward of a layer that calls its experts one by one; the ranks that hold the experts compute the calls.

    [Note: two runs of a layer] The experts that a layer calls depend on its tokens, so a call cannot be a collective. Therefore the layer's
    forward runs twice. The first run records the tokens of each call and returns zeros. Then all recorded tokens are sent at once, and in
    the second run the calls return the results. The tokens of a call must not depend on results of other experts or on the run, so the
    second run is compared with the first. Both runs draw the same random numbers, the first gets copies of the arguments, and after it the
    buffers of the layer (statistics of its router) have their values of before.

    Args:
        module: Module whose forward calls the experts.
        label: Name of the layer.
        experts: Modules of all experts; those of other ranks have empty parameters.
        shares: Assignment of experts to ranks.
    """

    def __init__(self, module: nn.Module, label: str, experts: tuple[nn.Module, ...], shares: Shares) -> None:
        self._module, self._label, self._shares = module, label, shares
        self._own = [(expert, expert.forward) for expert in experts[shares.first : shares.first + shares.here]]
        self._params = [param for expert in experts for param in expert.parameters()]
        inside = {id(part) for expert in experts for part in expert.modules()}
        self._others = [part for part in module.modules() if id(part) not in inside]
        self._forward = module.forward
        self._calls: _Calls | None = None
        for index, expert in enumerate(experts):
            expert.forward = partial(self._skip_expert, index)  # type: ignore[method-assign]
        module.forward = self.run  # type: ignore[method-assign]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward twice and return its output; collective ([Note: two runs of a layer])."""
        tokens = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tokens(leaf)), None)
        if tokens is None:
            raise UnsupportedError(f"expert_parallel: {self._label} was called without a tensor of tokens")
        self._calls = calls = _Calls()
        device = self._shares.collectives.topology.device
        try:
            with torch.random.fork_rng(
                [] if device.type == "cpu" else [device], device_type="cuda" if device.type == "cpu" else device.type
            ):
                copied = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
                with _unchanged_buffers(self._others):
                    self._forward(*copied[0], **copied[1])
            results, calls.answers = self._compute(calls.noted, tokens)
            output = self._forward(*args, **kwargs)
        finally:
            self._calls = None
        if calls.answered != len(calls.noted):
            raise self._differs(f"{len(calls.noted)} calls in the first run, {calls.answered} in the second")
        return _tied(output, results) if torch.is_grad_enabled() and results.requires_grad else output

    def _skip_expert(self, index: int, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record a call of expert ``index``, or return its result; replaces its forward."""
        if args or kwargs or not isinstance(tokens, torch.Tensor):
            raise UnsupportedError(
                f"expert_parallel: {self._label} calls an expert with further arguments besides its tokens, but only tokens can be sent "
                "to other ranks. Remove expert_parallel for this model"
            )
        return self._call(index, tokens)

    def _call(self, index: int, tokens: torch.Tensor) -> torch.Tensor:
        calls = self._calls
        if calls is None:
            raise StateError(f"{self._label}: an expert was called outside its layer; with expert_parallel other ranks may hold it")
        if calls.answers is None:
            calls.noted.append((index, tokens))
            return torch.zeros_like(tokens)
        number, calls.answered = calls.answered, calls.answered + 1
        if number >= len(calls.noted):
            raise self._differs("the second run has a further call")
        expert, before = calls.noted[number]
        if expert != index or before.shape != tokens.shape or (has_values(tokens) and not torch.equal(before, tokens)):
            raise self._differs(f"call {number} is to expert {expert} in the first run and {index} in the second, or has other tokens")
        return calls.answers[number]

    def _differs(self, how: str) -> UnsupportedError:
        return UnsupportedError(
            f"expert_parallel: {self._label} does not call the same experts with the same tokens when it runs twice ({how}), "
            "so their tokens cannot be collected. Remove expert_parallel for this model"
        )

    def _compute(self, noted: list[tuple[int, torch.Tensor]], like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Compute all recorded calls; return their results in one tensor and as a list by call; collective.

        Args:
            noted: Index of the expert and tokens of each call.
            like: The layer's input tokens, which have the type and width that the tokens of all calls must have.
        """
        width = like.shape[-1]
        other = next((found for _, found in noted if found.shape[-1] != width or found.dtype != like.dtype), None)
        if other is not None:
            raise UnsupportedError(
                f"expert_parallel: {self._label} gets {like.dtype} tokens of {width} elements, but calls an expert with {other.dtype} "
                f"tokens of {other.shape[-1]}. Remove expert_parallel for this model"
            )
        order = sorted(range(len(noted)), key=lambda call: noted[call][0])
        parts = [noted[call][1].reshape(-1, width) for call in order]
        rows = torch.cat(parts) if parts else like.reshape(-1, width)[:0]
        sizes = [(noted[call][0], len(part)) for call, part in zip(order, parts, strict=True)]
        trained = torch.is_grad_enabled() and (like.requires_grad or any(param.requires_grad for param in self._params))
        results = self._send(rows, sizes, trained)
        answers: list[torch.Tensor] = [results] * len(noted)
        for call, part in zip(order, results.split([len(part) for part in parts]) if parts else (), strict=True):
            answers[call] = part.view(noted[call][1].shape)
        return results, answers

    def _send(self, rows: torch.Tensor, sizes: list[tuple[int, int]], trained: bool) -> torch.Tensor:
        """Send ``rows`` to the ranks of their experts and return the results; collective.

        Args:
            rows: (n, width) tokens in the order of their experts.
            sizes: Consecutive pieces of ``rows``, as (index of the expert, number of rows).
            trained: Whether backward will run through this layer.
        """
        shared, count = self._shares.shared, len(rows)
        own = shared.own(count) if shared is not None else Range(0, count)
        counts, start = [0] * self._shares.count, 0
        for expert, size in sizes:
            counts[expert] += Range(start, start + size).intersect(own).numel
            start += size
        exchanged = exchange_counts(self._shares, torch.tensor(counts, dtype=torch.int64, device=rows.device), self._label)
        if shared is None:
            return send_to_experts(self._shares, rows, exchanged, trained, self._label, self._run_own)
        part = shared.part(rows)
        with shared.own_random(rows.device) if self._module.training else nullcontext():
            results = send_to_experts(self._shares, part, exchanged, trained, self._label, self._run_own)
        return shared.whole(results, count)

    def _run_own(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run each of this rank's experts once, on the tokens of all ranks, and return the results (see ``dispatch.Compute``)."""
        world, here = counts.shape
        indices = torch.arange(here, device=tokens.device).repeat(world).repeat_interleave(counts.reshape(-1), output_size=len(tokens))
        order = torch.sort(indices, stable=True)[1]
        parts = tokens[order].split(tokens_of_each(counts, len(tokens)))
        made = [_first(forward(part)) for (_, forward), part in zip(self._own, parts, strict=True) if len(part)]
        results = torch.cat(made) if made else torch.zeros_like(tokens)
        if results.shape != tokens.shape:
            raise UnsupportedError(
                f"expert_parallel: experts of {self._label} return shape {tuple(results.shape)} for {tuple(tokens.shape)}, which must be "
                "equal. Remove expert_parallel for this model"
            )
        # Some layers call an expert that has no tokens, and so give it gradients of zero; others leave it out. They do so on all ranks.
        called = {index for index, _ in self._calls.noted} if self._calls is not None else set()
        idle: list[nn.Parameter] = []
        for index, ((expert, _), part) in enumerate(zip(self._own, parts, strict=True), self._shares.first):
            for param in expert.parameters() if torch.is_grad_enabled() else ():
                note_call(param, bool(len(part)) or index in called)
            idle += [] if len(part) else expert.parameters()
        return beside_idle(torch.empty_like(results).index_copy(0, order, results), idle)


@contextmanager
def _unchanged_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the buffers of ``modules`` at the end of the context."""
    before = [
        (module._buffers, key, buffer, buffer.clone())
        for module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None and has_values(buffer)
    ]
    yield
    for buffers, key, buffer, values in before:
        buffer.data.copy_(values)  # without a comparison, for which the host would wait for the device
        buffers[key] = buffer


def _first(result: Any) -> torch.Tensor:
    """Return the result tensor of an expert; some experts also return a bias in a tuple, which the layer ignores."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _is_tokens(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > 1


def _tied(output: Any, results: torch.Tensor) -> Any:
    """Return ``output`` with its first tensor tied to ``results``, so that backward reaches them even if no expert was called."""
    leaves, spec = pytree.tree_flatten(output)
    index = next((number for number, leaf in enumerate(leaves) if _is_tokens(leaf)), None)
    if index is not None:
        leaves[index] = tie(leaves[index], results)
    return pytree.tree_unflatten(leaves, spec)


def join_listed(values: torch.Tensor, part: TpShard, collectives: Collectives, counts: bool, label: str) -> torch.Tensor:
    """Return a parameter of one expert, which one of the ranks holds, on all ranks; collective, see ``join_experts``.

    A script that goes through the experts of its rank (the list of DeepSpeed's layer has only these) reads another expert on each rank. So
    the ranks compare the names first: if they differ, each rank gets its own.

    Raises:
        StateError: On all ranks, if the names differ, and a rank does not hold the expert that it reads.
    """
    number = zlib.crc32(label.encode()) & 0xFFFFFF  # the vote has 24 bits
    most, least, missing = collectives.largest_of([number, -number, int(not part.ranges)], "experts that are read")
    if most == -least:
        return join_experts(values, part, collectives, counts, label)
    if missing:
        raise StateError(
            f"{label}: the ranks read parameters of different experts at the same time, and one rank does not hold the expert that it "
            "reads. Read the same parameter on all ranks, or on each rank parameters of its own experts"
        )
    return values
