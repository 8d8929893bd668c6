"""Run layers of stacked experts: each rank computes its own experts, for the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.errors import StateError, UnsupportedError
from hf_zero.expert_parallel.dispatch import Shares, combine, exchange_counts, send_to_experts
from hf_zero.expert_parallel.exchange import beside_idle

Implementation = Callable[..., torch.Tensor]
_DISPATCHER = "_hf_zero_experts"


class Dispatcher:
    """A dispatcher between the router of one layer and its experts: it sends tokens to the ranks that hold their experts.

    [Note: rows in the order of the joined batch] A rank's experts get the tokens in the order of ranks, and within each rank in that
    rank's order. A single process has the same order for the joined batch. So the matrix product of an expert has the same rows in the same
    order, and bitwise the same result if the library's product of a row does not depend on other rows. The rank that a token came from
    multiplies the weights and sums the choices, as implementations without parallelism do.

    Args:
        label: Name of the layer.
        shares: Experts that each rank holds.
        names: Names of the module's parameters with one entry per expert.
    """

    def __init__(self, label: str, shares: Shares, names: tuple[str, ...]) -> None:
        self.shares, self._names = shares, names
        self._label = label
        self._ran = False

    def run(
        self, experts: nn.Module, implementation: Implementation, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the same result as ``implementation`` with all experts on this rank; collective.

        Args:
            experts: The module, with the experts of this rank.
            implementation: Function (module, tokens, (n, 1) indices of local experts, (n, 1) weights) -> (n, width).
            hidden: (tokens, width) inputs.
            indices: (tokens, choices) indices among all experts; an index out of range gives zero.
            weights: (tokens, choices) weights of the choices.
        """
        self._ran = True
        shared = self.shares.shared
        if shared is None:
            return self._send(experts, implementation, hidden, indices, weights)
        with shared.own_random(hidden.device) if experts.training else nullcontext():
            results = self._send(experts, implementation, *map(shared.part, (hidden, indices, weights)))
        return shared.whole(results, len(hidden))

    def _send(
        self, experts: nn.Module, implementation: Implementation, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the results for the tokens that this rank sends, like ``run``; collective."""
        shares, flat = self.shares, indices.reshape(-1)
        counts = torch.zeros(shares.count + 1, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add_(0, flat.clamp(max=shares.count), torch.ones_like(flat, dtype=torch.int64))
        exchanged = exchange_counts(shares, counts[:-1], self._label)
        _, order = torch.sort(flat, stable=True)
        rows = hidden[order // indices.shape[-1]]
        compute = partial(self._compute, experts, implementation)
        results = send_to_experts(shares, rows, exchanged, self._trains(experts, hidden), self._label, compute)
        return combine(results, order, weights).to(hidden.dtype)

    def _compute(self, experts: nn.Module, implementation: Implementation, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts on the tokens of all ranks and return the results; see ``dispatch.Compute``."""
        if not len(tokens):
            weights = [*(getattr(experts, name) for name in self._names), *experts.parameters()]
            return beside_idle(torch.zeros_like(tokens), {id(weight): weight for weight in weights}.values())
        world, here = counts.shape
        indices = torch.arange(here, device=tokens.device).repeat(world).repeat_interleave(counts.reshape(-1), output_size=len(tokens))
        ones = torch.ones((len(tokens), 1), dtype=tokens.dtype, device=tokens.device)
        return implementation(experts, tokens, indices.unsqueeze(-1), ones)

    def _trains(self, experts: nn.Module, hidden: torch.Tensor) -> bool:
        """Return whether backward will reach these experts, their adapters, or their inputs; the same on every rank."""
        if not torch.is_grad_enabled():
            return False
        return hidden.requires_grad or any(getattr(experts, name).requires_grad for name in self._names)

    def begin(self, *_: Any) -> None:
        """Record that the layer's forward begins (a forward pre-hook)."""
        self._ran = False

    def require_run(self, module: nn.Module, *_: Any) -> None:
        """Refuse a forward that bypassed this dispatcher and so computed with this rank's experts only (a forward hook).

        Raises:
            StateError: The implementation was registered after ``initialize``.
        """
        if not self._ran:
            chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
            raise StateError(
                f"{self._label}: the experts implementation {chosen} was registered after initialize divided the experts over "
                "ranks, so it would compute with this rank's experts only. Register it, and call set_experts_implementation, "
                "before initialize"
            )


def install(module: nn.Module, label: str, shares: Shares, names: tuple[str, ...]) -> None:
    """Install a dispatcher on ``module``, whose parameters ``names`` already have only this rank's experts."""
    dispatcher = Dispatcher(label, shares, names)
    setattr(module, _DISPATCHER, dispatcher)
    module.num_experts = shares.here  # type: ignore[assignment]  # implementations count indices up to it
    module.register_forward_pre_hook(dispatcher.begin)
    module.register_forward_hook(dispatcher.require_run)


def dispatcher_of(module: nn.Module) -> Dispatcher | None:
    """Return the dispatcher of ``module``; None for a module that has all its experts."""
    found = module.__dict__.get(_DISPATCHER)
    return found if isinstance(found, Dispatcher) else None


def dispatching(implementation: Callable[[nn.Module], Implementation]) -> Implementation:
    """Return an implementation that dispatches the tokens of divided layers, and calls the given implementation for other layers.

    Args:
        implementation: Function that returns the implementation for a module.
    """

    def forward(experts: nn.Module, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inner, dispatcher = implementation(experts), dispatcher_of(experts)
        if dispatcher is None:
            return inner(experts, hidden, indices, weights, *args, **kwargs)
        if args or kwargs:
            raise UnsupportedError(
                f"expert_parallel: {type(experts).__name__} takes further arguments beside tokens, expert indices and expert "
                "weights, and these cannot be sent to other ranks. Remove expert_parallel for this model"
            )
        return dispatcher.run(experts, inner, hidden, indices, weights)

    return forward
