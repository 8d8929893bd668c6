"""Layers whose experts are modules of a list: each rank computes its own, for the tokens of all."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_zero.core.units.layout import Range
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.expert_parallel.dispatch import Shares, send_to_experts, tell, tokens_of_each
from hf_zero.expert_parallel.exchange import beside_idle, tie
from hf_zero.system.planning import has_values


@dataclass
class _Calls:
    """The calls of experts in one forward of a layer: first noted, then answered.

    Attributes:
        noted: Expert and tokens of each call.
        answers: The result of each; None during the first run.
        answered: Calls of the second run so far.
    """

    noted: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    answers: list[torch.Tensor] | None = None
    answered: int = 0


class ListedLayer:
    """Runs the forward of a layer that calls its experts one by one, with calls answered by the ranks that hold them.

    [Note: two runs of a layer] Which experts a layer calls depends on its tokens, so no call can be a collective. The layer runs twice: the
    first run notes what each expert is called with and answers zeros; then all that was noted travels, once, and the second run
    answers with the results. What experts are called with must depend neither on what others have answered nor on the run: the second
    is compared with the first. Random numbers are drawn alike in both, and the first has copies of its arguments.

    Args:
        module: Its forward calls the experts.
        label: Its name.
        experts: All of them; those of other ranks have empty parameters.
        shares: Who holds which.
    """

    def __init__(self, module: nn.Module, label: str, experts: tuple[nn.Module, ...], shares: Shares) -> None:
        self._module, self._label, self._shares = module, label, shares
        self._own = [(expert, expert.forward) for expert in experts[shares.first : shares.first + shares.here]]
        self._params = [param for expert in experts for param in expert.parameters()]
        self._forward = module.forward
        self._calls: _Calls | None = None
        for index, expert in enumerate(experts):
            expert.forward = partial(self._stand_in, index)  # type: ignore[method-assign]
        module.forward = self.run  # type: ignore[method-assign]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's forward; collective."""
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
                self._forward(*copied[0], **copied[1])
            results, calls.answers = self._compute(calls.noted, tokens)
            output = self._forward(*args, **kwargs)
        finally:
            self._calls = None
        if calls.answered != len(calls.noted):
            raise self._differs(f"{len(calls.noted)} calls in the first, {calls.answered} in the second")
        return _tied(output, results) if torch.is_grad_enabled() and results.requires_grad else output

    def _stand_in(self, index: int, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replace the forward of expert ``index``."""
        if args or kwargs or not isinstance(tokens, torch.Tensor):
            raise UnsupportedError(
                f"expert_parallel: {self._label} calls an expert with more than its tokens, and only these travel to the rank that "
                "holds it. Leave expert_parallel out for this model"
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
            raise self._differs("the second has a further call")
        expert, before = calls.noted[number]
        if expert != index or before.shape != tokens.shape or (has_values(tokens) and not torch.equal(before, tokens)):
            raise self._differs(f"call {number} is of expert {expert} in the first and {index} in the second, or of other tokens")
        return calls.answers[number]

    def _differs(self, how: str) -> UnsupportedError:
        return UnsupportedError(
            f"expert_parallel: {self._label} does not call the same experts with the same tokens when it runs twice ({how}), "
            "so their tokens cannot be collected. Leave expert_parallel out for this model"
        )

    def _compute(self, noted: list[tuple[int, torch.Tensor]], like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the results of all calls, together and one by one; collective.

        Args:
            noted: Expert and tokens of each call.
            like: The layer's tokens, of the type and width of all.
        """
        width = like.shape[-1]
        other = next((found for _, found in noted if found.shape[-1] != width or found.dtype != like.dtype), None)
        if other is not None:
            raise UnsupportedError(
                f"expert_parallel: {self._label} is given {like.dtype} tokens of {width} elements and calls an expert with "
                f"{other.dtype} of {other.shape[-1]}. Leave expert_parallel out for this model"
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
        """Return the results of ``rows``; collective.

        Args:
            rows: (n, width).
            sizes: Runs of them, as expert and number, by rising expert.
            trained: Backward comes through here.
        """
        shared, count = self._shares.shared, len(rows)
        own = shared.own(count) if shared is not None else Range(0, count)
        counts, start = [0] * self._shares.count, 0
        for expert, size in sizes:
            counts[expert] += Range(start, start + size).intersect(own).numel
            start += size
        told = tell(self._shares, torch.tensor(counts, dtype=torch.int64, device=rows.device), self._label)
        if shared is None:
            return send_to_experts(self._shares, rows, told, trained, self._label, self._run_own)
        part = shared.part(rows)
        with shared.own_random(rows.device) if self._module.training else nullcontext():
            results = send_to_experts(self._shares, part, told, trained, self._label, self._run_own)
        return shared.whole(results, count)

    def _run_own(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return this rank's experts, each over the tokens of all ranks at once."""
        world, here = counts.shape
        indices = torch.arange(here, device=tokens.device).repeat(world).repeat_interleave(counts.reshape(-1), output_size=len(tokens))
        order = torch.sort(indices, stable=True)[1]
        parts = tokens[order].split(tokens_of_each(counts, len(tokens)))
        made = [_first(forward(part)) for (_, forward), part in zip(self._own, parts, strict=True) if len(part)]
        results = torch.cat(made) if made else torch.zeros_like(tokens)
        if results.shape != tokens.shape:
            raise UnsupportedError(
                f"expert_parallel: experts of {self._label} make {tuple(results.shape)} of {tuple(tokens.shape)}. Leave "
                "expert_parallel out for this model"
            )
        idle = [param for (expert, _), part in zip(self._own, parts, strict=True) if not len(part) for param in expert.parameters()]
        return beside_idle(torch.empty_like(results).index_copy(0, order, results), idle)


def _first(result: Any) -> torch.Tensor:
    """Return an expert's result for its tokens; some return a bias beside it, which the layer ignores."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _is_tokens(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > 1


def _tied(output: Any, results: torch.Tensor) -> Any:
    """Return ``output``; its first tensor leads backward to ``results`` even where no expert was called."""
    leaves, spec = pytree.tree_flatten(output)
    index = next((number for number, leaf in enumerate(leaves) if _is_tokens(leaf)), None)
    if index is not None:
        leaves[index] = tie(leaves[index], results)
    return pytree.tree_unflatten(leaves, spec)
