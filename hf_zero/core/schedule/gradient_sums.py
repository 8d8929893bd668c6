"""Define how gradients are summed: over ranks by the hops of an exchange, and over micro-steps by a sum that its owner keeps.

``GradientExchange`` sums over all ranks in one hop. ``NodeExchange`` sums inside each node before data is sent to other nodes.
``QuantizedExchange`` sums codes of 8 or 4 bits (ZeRO++). ``ReplicatedSum`` sums inside a shard group, and once per optimizer step over its
replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.nodes import TwoHops
from hf_zero.comm.quantized import reduce_scatter_codes
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError
from hf_zero.native.block_codes import KeptError, message_bytes, scales_of
from hf_zero.native.quantize import can_quantize

# Starts one hop of a reduction; collective. Arguments: the result of the hop before it (for the first hop the message), the dtype of the
# message, and the name of the unit for labels. The result of the returned object is the sum over the ranks of the hop.
#
# [Note: hops of a reduction] A sum over a node is then summed over the nodes, and a sum over a shard group over its replicas. Each hop
# starts when the reducer takes the unit from the queue of the hop before: a position in the order of reductions ([Note: one order]) that
# depends on nothing else. So every hop has one order, on a group of its own, and overlaps with backward.
Hop = Callable[[torch.Tensor, torch.dtype, str], Pending]


@dataclass(frozen=True)
class GradientPolicy:
    """Dtypes, factors and sharding of gradients on the network and in sums.

    Attributes:
        message_dtype: Dtype on the network. None means the dtype of the flat buffer: the parameters' dtype for the gradients of one
            micro-step, the accumulation dtype for sums of several and at stage 0.
        accumulation_dtype: Dtype of the sums over ranks and micro-steps.
        pre_scale: Factor applied as gradients are copied into the flat buffer, before the reduction.
        post_scale: Factor applied to the reduced sum.
        sharded: Whether gradients are reduce-scattered to the owner (stages 1 to 3); else they are all-reduced (stage 0).
    """

    message_dtype: torch.dtype | None
    accumulation_dtype: torch.dtype
    pre_scale: float
    post_scale: float
    sharded: bool


class GradientExchange:
    """Hops by which a unit's gradients are summed over all ranks. An optimizer that communicates itself derives its own class.

    Attributes:
        collectives: Network of the reductions.
        policy: Dtypes and factors.
        reduces: Whether gradients are reduced. If not, each rank keeps its own unsharded gradients for the optimizer. Changes only between
            optimizer steps.
        scale: Factor by which gradients are multiplied as they are copied into the flat buffer.
    """

    def __init__(self, collectives: Collectives, policy: GradientPolicy) -> None:
        self.collectives = collectives
        self.policy = policy
        self.reduces = True
        self.scale = policy.pre_scale

    def hops(self, dtype: torch.dtype) -> tuple[Hop, ...]:
        """Return the hops of a message of ``dtype``, (padded_numel,). The result of the last hop is the sum, (shard_numel,) if gradients
        are sharded.
        """
        return (self.sum_over_ranks,)

    def sum_over_ranks(self, message: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        """Sum ``message`` over all ranks in one collective; see ``Hop``."""
        if self.policy.sharded and self.collectives.world > 1:
            return self.collectives.reduce_scatter(message, self.policy.accumulation_dtype, unit)
        return self.collectives.all_reduce(message, unit).then(lambda _: message)

    def stepped(self, skipped: bool, growth: float) -> None:
        """Note that an optimizer step is over; called on all ranks with the same arguments. For exchanges that keep state between steps.

        Args:
            skipped: The step was skipped and its gradients were dropped.
            growth: The new loss scale divided by the old one.
        """


@dataclass(frozen=True)
class ErrorFeedback:
    """Settings of the quantization errors that later messages correct (Xie et al., "LoCo", arXiv:2407.04480).

    Attributes:
        keep: Weight of the old error when a new one is mixed in, from 0 to 1.
        reset_steps: Number of optimizer steps after which errors are set to zero.
    """

    keep: float
    reset_steps: int


GRADIENT_ERROR = "loco_error"
# Key of the step count; no unit has this name.
_STEPS = "(steps)"
_PARTS = "(parts)"
_SECOND_HOP = " (second hop)"


class QuantizedExchange(GradientExchange):
    """An exchange that reduces 4-bit codes to the owner of each shard: in one hop, or inside nodes and then, encoded again, over nodes.

    [Note: errors of gradients] An error is the difference between a rank's gradients of one unit and the values of its codes, in the loss
    scale of that time; the codes of the second hop have errors of their own. When the loss scale changes, the errors are scaled too. A
    skipped step drops all errors, because the gradients that they belong to are dropped.

    Args:
        collectives: Network of the reductions.
        policy: Dtypes and factors.
        feedback: Settings of kept errors; None keeps no errors.
        nodes: Networks of the two hops over the ranks of ``collectives``; None means one hop.
    """

    def __init__(
        self, collectives: Collectives, policy: GradientPolicy, feedback: ErrorFeedback | None = None, nodes: TwoHops | None = None
    ) -> None:
        super().__init__(collectives, policy)
        self.feedback = feedback
        self.nodes = nodes
        self._errors: dict[str, tuple[KeptError, int]] = {}  # by unit and hop, with the number of elements of a part
        self._loaded: dict[str, torch.Tensor] = {}  # errors from a checkpoint, until they are needed
        self._steps = 0

    def hops(self, dtype: torch.dtype) -> tuple[Hop, ...]:
        if self.collectives.world == 1 or not can_quantize(dtype):
            return super().hops(dtype)
        return (self._sum_codes,) if self.nodes is None else (partial(self._inside, self.nodes), partial(self._across, self.nodes))

    def _sum_codes(self, message: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        error = self._error(message, unit, self.collectives.world)
        return reduce_scatter_codes(self.collectives, message, self.policy.accumulation_dtype, unit, error)

    def _inside(self, nodes: TwoHops, message: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        error = self._error(message, unit, self.collectives.world)
        return reduce_scatter_codes(nodes.inside, message, torch.float32, unit, error, each=nodes.across.world)

    def _across(self, nodes: TwoHops, of_node: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        error = self._error(of_node, unit + _SECOND_HOP, nodes.across.world)
        return reduce_scatter_codes(nodes.across, of_node, self.policy.accumulation_dtype, unit, error)

    def _error(self, message: torch.Tensor, name: str, parts: int) -> KeptError | None:
        """Return the kept error of one hop of a unit (``name``), for a message in ``parts`` parts; None if errors are not kept."""
        if self.feedback is None:
            return None
        if name not in self._errors:
            numel = message.numel() // parts
            codes = torch.zeros(parts, message_bytes(numel, 8), dtype=torch.uint8, device=message.device)
            saved = self._loaded.pop(name, None)
            if saved is not None and saved.numel() == codes.numel():
                codes.view(-1).copy_(saved)
            self._errors[name] = KeptError(codes, self.feedback.keep), numel
        return self._errors[name][0]

    def stepped(self, skipped: bool, growth: float) -> None:
        if self.feedback is None:
            return
        self._steps += 1
        if skipped or self._steps % self.feedback.reset_steps == 0:
            self._errors.clear()
            self._loaded.clear()
        elif growth != 1.0:
            for error, numel in self._errors.values():
                scales_of(error.messages, numel).mul_(growth)

    # -- checkpoints ------------------------------------------------------------------------------------------------------

    def rank_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's errors as codes, (parts * message_bytes,) uint8 per unit and hop, the number of parts, and the number of
        optimizer steps so far.
        """
        if self.feedback is None:
            return {}
        errors = self._loaded | {name: error.messages.view(-1) for name, (error, _) in self._errors.items()}
        return {GRADIENT_ERROR: {**errors, _STEPS: torch.tensor([self._steps]), _PARTS: self._parts()}}

    def _parts(self) -> torch.Tensor:
        """Return the number of parts into which the messages of each hop are divided."""
        return torch.tensor([self.collectives.world, self.nodes.across.world if self.nodes is not None else 1])

    def load_rank_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore the result of ``rank_states`` of this rank; errors that are missing or have another number of parts start from zero."""
        saved = dict(states.get(GRADIENT_ERROR, {}))
        steps, parts = saved.pop(_STEPS, None), saved.pop(_PARTS, None)
        self._steps = int(steps) if steps is not None else 0
        self._errors.clear()
        self._loaded = saved if parts is not None and parts.tolist() == self._parts().tolist() else {}


class NodeExchange(GradientExchange):
    """An exchange that reduces to the owner of each shard in two hops; one sum per element leaves a node, in the dtype of the message.

    So in 16 bit the sum over a node is rounded once before it is sent to other nodes, like the sum over a shard group.

    Args:
        collectives: Network of all ranks of the axis.
        policy: Dtypes and factors.
        nodes: Networks of the two hops over the ranks of ``collectives``.
    """

    def __init__(self, collectives: Collectives, policy: GradientPolicy, nodes: TwoHops) -> None:
        super().__init__(collectives, policy)
        self.nodes = nodes

    def hops(self, dtype: torch.dtype) -> tuple[Hop, ...]:
        return self._inside, self._across

    def _inside(self, message: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        return self.nodes.inside.reduce_scatter(self.nodes.swizzled(message), self.policy.accumulation_dtype, unit)

    def _across(self, of_node: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        return self.nodes.across.reduce_scatter(of_node.to(sent), self.policy.accumulation_dtype, unit)


# Called from any thread with the unit, its gradient so far, and a function that waits until the gradient can be read.
Listener = Callable[[Unit, torch.Tensor, Callable[[Unit], None]], None]


class GradientPlace:
    """The place of sums of reduced gradients over micro-steps: the device where they arrive. Offload has a subclass that sums on the host.

    Args:
        listener: Called with each new sum.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self.listener = listener

    def add(self, unit: Unit, total: torch.Tensor | None, received: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
        """Return the sum of ``total``, if there is one, and ``received`` times ``factor``, both (shard_numel,), in ``dtype``.

        ``received`` may have a narrower dtype; it is multiplied in ``dtype``, maybe in place.
        """
        received = received.to(dtype)
        if factor != 1.0:
            received.mul_(factor)
        return received if total is None else total.add_(received)

    def zeros(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor:
        """Return a zero gradient, (shard_numel,), for a unit that no backward has reached."""
        return torch.zeros(unit.layout.shard_numel, dtype=dtype, device=unit.collectives.topology.device)

    def fetch(self, unit: Unit, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``total`` in ``dtype`` on the device, ready for additions; it may be ``total`` itself."""
        return total.to(dtype)

    def settle(self, unit: Unit) -> None:
        """Wait until the sum can be read; from any thread."""


class GradientSum:
    """Sum of one unit's reduced gradients over micro-steps.

    Attributes:
        unit: The unit.
        policy: Dtypes and factors.
        place: Where the sum is kept.
        shard: The sum, (shard_numel,); None before the first reduction.
    """

    def __init__(self, unit: Unit, policy: GradientPolicy, place: GradientPlace | None = None) -> None:
        self.unit = unit
        self.policy = policy
        self.place = place or GradientPlace()
        self.shard: torch.Tensor | None = None

    def hops(self, completes: bool) -> tuple[Hop, ...]:
        """Return the hops between the exchange's hops and ``add``.

        Args:
            completes: The micro-step completes an optimizer step.
        """
        return ()

    def add(self, received: torch.Tensor, completes: bool) -> None:
        """Add the result of a reduction, (shard_numel,), without ``post_scale``; ``completes`` is that of ``hops``."""
        policy = self.policy
        self.shard = self.place.add(self.unit, self.shard, received, policy.accumulation_dtype, policy.post_scale)
        if self.place.listener is not None:
            self.place.listener(self.unit, self.shard, self.place.settle)

    def held(self) -> torch.Tensor | None:
        """Return the sum, ready to be read; None if no backward reached the unit."""
        if self.shard is not None:
            self.place.settle(self.unit)
        return self.shard

    def reduced(self) -> torch.Tensor:
        """Return the sum, ready to be read; zeros if no backward reached the unit."""
        held = self.held()
        if held is None:
            held = self.shard = self.place.zeros(self.unit, self.policy.accumulation_dtype)
        return held

    def clear(self) -> torch.Tensor | None:
        """Discard the sum, and return it when nothing writes to it any more."""
        if self.shard is not None:
            self.place.settle(self.unit)
        total, self.shard = self.shard, None
        return total


class ReplicatedSum(GradientSum):
    """Sum of one unit's reduced gradients, where other shard groups hold the same shard.

    [Note: two sums] A reduction sums over the ranks of the shard group, and micro-steps are added up there (``_partial``). The backward
    that completes an optimizer step sends each unit's sum to the replicas as soon as its reduction has ended, as a further hop of it
    ([Note: hops of a reduction]). Late gradients pass through all hops once more. The sum of one micro-step is sent in the dtype of its
    reduction, a sum of several in the accumulation dtype. ``post_scale`` is applied last: until then fp16 has the headroom that
    ``pre_scale`` gave it.

    Attributes:
        replicas: Network of the ranks that hold this shard.

    Args:
        unit: The unit.
        policy: Dtypes and factors.
        place: Where the sum is kept.
        replicas: See the attribute.
    """

    def __init__(self, unit: Unit, policy: GradientPolicy, place: GradientPlace | None, replicas: Collectives) -> None:
        super().__init__(unit, policy, place)
        self.replicas = replicas
        self._partial = False  # whether ``shard`` is a sum over the shard group only, without ``post_scale``

    def hops(self, completes: bool) -> tuple[Hop, ...]:
        return (self._over_replicas,) if completes else ()

    def _over_replicas(self, of_group: torch.Tensor, sent: torch.dtype, unit: str) -> Pending:
        if self._partial:
            of_group, sent = self._fetch_partial().add_(of_group), self.policy.accumulation_dtype
        message = of_group.to(self.policy.message_dtype or sent)
        return self.replicas.all_reduce(message, unit).then(lambda _: message)

    def add(self, received: torch.Tensor, completes: bool) -> None:
        if completes:
            super().add(received, completes)
            return
        self._make_partial()
        self.shard = self.place.add(self.unit, self.shard, received, self.policy.accumulation_dtype)
        self._partial = True

    def _fetch_partial(self) -> torch.Tensor:
        """Return the sum over the shard group so far, in the accumulation dtype, and remove it from this object."""
        if self.shard is None:
            raise StateError(f"unit {self.unit.name}: no sum to send to the replicas")
        total, self.shard, self._partial = self.place.fetch(self.unit, self.shard, self.policy.accumulation_dtype), None, False
        return total

    def _make_partial(self) -> None:
        """Turn a sum over all ranks into one to which micro-steps can be added: one replica keeps it, the others start without a sum."""
        if self.shard is None or self._partial:
            return
        if self.replicas.rank > 0:
            self.shard = None
        elif self.policy.post_scale != 1.0:
            self.shard.div_(self.policy.post_scale)

    def reduced(self) -> torch.Tensor:
        """Return the sum; see ``GradientSum.reduced``. Collective if no boundary has sent it to the replicas."""
        if self._partial:
            wide = self.policy.accumulation_dtype
            message = self._fetch_partial().to(self.policy.message_dtype or wide)
            self.replicas.all_reduce(message, self.unit.name).wait()
            super().add(message, completes=True)
        return super().reduced()

    def held(self) -> torch.Tensor | None:
        """Return the sum or None; see ``GradientSum.held``. Collective in the middle of an accumulation, where the sum is a copy."""
        held = super().held()
        if held is None or not self._partial:
            return held
        total = self.place.fetch(self.unit, held, self.policy.accumulation_dtype).clone()
        self.replicas.all_reduce(total, f"{self.unit.name}: gradient so far").wait()
        return total.mul_(self.policy.post_scale)

    def clear(self) -> torch.Tensor | None:
        self._partial = False
        return super().clear()
