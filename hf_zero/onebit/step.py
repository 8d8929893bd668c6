"""Adapt an engine's step to 1-bit Adam: the exchange of gradients, the ranks that get them, and the definition of their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.topology import Topology
from hf_zero.core.schedule.gradient_sums import GradientExchange, GradientPolicy, Hop
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.grad_norm import first_non_finite, global_norm
from hf_zero.core.step.step import StepKind, Stepper
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.onebit.sharded import OneBitSharded
from hf_zero.optim.onebit_adam import OneBitAdam


class OneBitStepper(Stepper):
    """Stepper that works on local gradients once the warm-up is over.

    [Note: the norm of local gradients] In the compressed phase no rank has the averaged gradient. The norm that is reported, used for
    clipping and checked for overflow is then the root mean square, over ranks, of the norms of their own gradients. It is never less than
    the norm of the average. All ranks have the same number, so that clipping scales the average as a whole.
    """

    def prepare(self, boundary: bool) -> None:
        """Decide before a backward whether its gradients stay on each rank, without reduction."""
        super().prepare(boundary)
        if isinstance(self.reducer.exchange, OneBitExchange):
            self.reducer.exchange.keep_whole(self._compresses)

    @property
    def _compresses(self) -> bool:
        return isinstance(self.optimizer, OneBitSharded) and self.optimizer.compresses

    def norm_of(self, shards: Sequence[torch.Tensor], beside: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of the gradients, still multiplied by the loss scale; collective. ``beside`` as in ``Stepper.norm_of``."""
        if not self._compresses:
            return super().norm_of(shards, beside)
        return global_norm(shards, self.collectives, sharded=True, beside=beside) / math.sqrt(self.collectives.world)

    def name_of_non_finite(self, shards: Sequence[torch.Tensor]) -> str:
        """Return the name of the first parameter with a gradient that is not finite; collective."""
        return first_non_finite(self.optimizer.units, shards, self.collectives, whole=self._compresses)


def check_topology(policy: StagePolicy, topology: Topology) -> None:
    """Refuse engines in which no rank has the complete gradients that it must compress.

    Raises:
        UnsupportedError: Gradients, or the model itself, are sharded over ranks.
    """
    if policy.stage >= 2:
        raise UnsupportedError(
            f"OneBitAdam with zero_optimization.stage {policy.stage}: stages 2 and 3 reduce each gradient to its owner in every backward, "
            "which is the traffic that 1-bit Adam avoids; it needs each rank's whole gradient. Use stage 0 or 1, or Adam"
        )
    if topology.replicate is not None:
        raise UnsupportedError(
            f"OneBitAdam with {topology.replicate.world} shard groups (zero_optimization.mics_shard_size, dp_replicate_size) is not "
            "provided: it averages over all ranks itself. Leave the shard groups out, or use Adam"
        )
    if topology.model is not None:
        raise UnsupportedError("OneBitAdam with tensor parallelism or pipelines is not provided: use Adam, or data parallelism alone")
    if topology.expert is not None:
        raise UnsupportedError(
            "OneBitAdam with expert parallelism is not provided: it exchanges the momentum among all ranks, but the gradient "
            "of an expert is reduced among few ranks only. Use Adam, or set expert_parallel.enabled to false"
        )


def step_kind(inner: torch.optim.Optimizer | None, averages: bool) -> StepKind:
    """Return the classes of a step with ``inner``: the ones of 1-bit Adam, or the usual ones for all other optimizers.

    Args:
        inner: The optimizer over the model's parameters.
        averages: See ``OneBitExchange``.
    """
    if not isinstance(inner, OneBitAdam):
        return StepKind()
    return StepKind(OneBitStepper, partial(OneBitExchange, averages=averages), partial(_max_norm, inner.max_grad_norm), "OneBitAdam")


def _max_norm(own: float, gradient_clipping: float) -> float:
    """Return the norm to clip to, from ``gradient_clipping`` or 1-bit Adam's ``max_grad_norm``, which is ``own``.

    Raises:
        ConfigError: Both are given and differ.
    """
    if own and gradient_clipping and own != gradient_clipping:
        raise ConfigError(f"gradient_clipping is {gradient_clipping:g} and optimizer.params.max_grad_norm is {own:g}; give one of them")
    return gradient_clipping or own


class OneBitExchange(GradientExchange):
    """Exchange of gradients: sums in rank order during the warm-up, at stage 0 too; no reduction in the compressed phase.

    Args:
        collectives: Collectives of the reductions.
        policy: Element types and factors.
        averages: Gradients are averaged over ranks; if false they are summed, so each rank's own gradients are multiplied by the number of
            ranks.
    """

    def __init__(self, collectives: Collectives, policy: GradientPolicy, averages: bool) -> None:
        super().__init__(collectives, policy)
        self._own_scale = 1.0 if averages else float(collectives.world)

    def keep_whole(self, compressed: bool) -> None:
        """Keep the gradients of the next backwards on their ranks if the phase is ``compressed``, else reduce them."""
        self.reduces = not compressed
        self.scale = self._own_scale if compressed else self.policy.pre_scale

    def hops(self, dtype: torch.dtype) -> tuple[Hop, ...]:
        return super().hops(dtype) if self.policy.sharded else (self._sum_in_order,)

    def _sum_in_order(self, message: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        return self.collectives.all_reduce_in_order(message, unit).then(lambda _: message)
