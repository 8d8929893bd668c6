"""Collect the gradients of one unit from autograd into a flat buffer, reduce them over ranks, and accumulate them over micro-steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.units.layout import ParamSlot
from hf_zero.core.units.memory_uses import InPlace, memory_to_keep
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError
from hf_zero.memory import host_memory


@dataclass(frozen=True)
class GradientPolicy:
    """Dtypes, factors and sharding of gradients on the network and in sums.

    Attributes:
        message_dtype: Dtype on the network; None is the dtype of the message: the parameters' for one micro-step's gradients,
            the accumulation type for sums of several and at stage 0.
        accumulation_dtype: Type of the sums over ranks and micro-steps.
        pre_scale: Factor applied as gradients are copied into the flat buffer, before the reduction.
        post_scale: Factor applied to the reduced sum.
        sharded: Reduce-scatter to the owner (stages 1 to 3), else all-reduce (stage 0).
    """

    message_dtype: torch.dtype | None
    accumulation_dtype: torch.dtype
    pre_scale: float
    post_scale: float
    sharded: bool


class GradientExchange:
    """Sum of a unit's gradients over all ranks. An optimizer that communicates itself derives its own class.

    Attributes:
        collectives: Network of the reductions.
        policy: Element types and factors.
        keeps_whole: Nothing is reduced: each rank keeps its own gradients, unsharded, for the optimizer. Changes only between optimizer
            steps.
        completes: Whether the running backward completes an optimizer step; set by the reducer.
    """

    def __init__(self, collectives: Collectives, policy: GradientPolicy) -> None:
        self.collectives = collectives
        self.policy = policy
        self.keeps_whole = False
        self.completes = True

    @property
    def scale(self) -> float:
        """Return the factor by which gradients are multiplied as they are copied into the flat buffer."""
        return self.policy.pre_scale

    def start(self, message: torch.Tensor, unit: str) -> Pending:
        """Start the reduction of ``message`` (padded_numel,) of a unit; collective.

        The result of the returned object is the sum, (shard_numel,) if gradients are sharded; if it has no result, ``message`` holds the
        sum.
        """
        if self.policy.sharded and self.collectives.world > 1:
            return self.collectives.reduce_scatter(message, self.policy.accumulation_dtype, unit)
        return self.collectives.all_reduce(message, unit)

    def crosses(self, dtype: torch.dtype) -> bool:
        """Return whether ``start`` sums messages of ``dtype`` over this node only, so that ``cross`` must continue over the other nodes."""
        return False

    def cross(self, partial: torch.Tensor, travelled: torch.dtype, unit: str) -> Pending:
        """Start the sum over nodes of the ``partial`` sum from ``start``; collective. Its result is the sum over all ranks,
        (shard_numel,).

        Args:
            partial: The sums over this node.
            travelled: Dtype of the message that ``start`` sent.
            unit: Name for labels.
        """
        raise StateError(f"unit {unit}: its reduction has one part")

    def stepped(self, skipped: bool, growth: float) -> None:
        """Note that an optimizer step is over, alike on all ranks; for exchanges that keep state from one step to the next.

        Args:
            skipped: The step was skipped and its gradients were dropped.
            growth: The new loss scale divided by the old one.
        """


class BufferPool:
    """Flat buffers of one backward, handed from unit to unit: fresh memory costs a page fault per 4 KiB on a host."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised (numel,) tensor."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else host_memory.passing(numel, dtype, device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that nothing reads any more."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers that are not in use."""
        return [buffer for free in self._free.values() for buffer in free]


# Called from any thread with the unit, its gradient so far, and a function that waits until the gradient can be read.
Listener = Callable[[Unit, torch.Tensor, Callable[[Unit], None]], None]


class GradientPlace:
    """Sum of reduced gradients over micro-steps, kept on the device where they arrive. Offload has a subclass that sums on the host.

    Args:
        listener: Called with each new sum.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self.listener = listener

    def add(self, unit: Unit, total: torch.Tensor | None, received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of ``total`` and ``received``, both (shard_numel,), in ``dtype``; without a ``total``, in the dtype of
        ``received``.
        """
        return received.to(dtype) if total is None else total.add_(received)

    def zeros(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of a unit that no backward has reached."""
        return torch.zeros(unit.layout.shard_numel, dtype=dtype, device=unit.collectives.topology.device)

    def fetch(self, unit: Unit, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``total`` in ``dtype`` on the device, ready for additions; it may be ``total`` itself."""
        return total.to(dtype)

    def settle(self, unit: Unit) -> None:
        """Wait until the sum can be read; from any thread."""


# Gradients that are kept until they are copied together take at most this number of bytes per unit. A host copies them while they are in
# its cache.
_KEPT_ON_HOST = 1 << 18
_KEPT_ON_DEVICE = 1 << 25


class UnitGradients:
    """The flat gradient of one trainable unit.

    Life of a gradient: autograd hands ``param.grad`` over (``collect``), it is scaled into ``_flat`` (padded_numel,) and dropped
    from the parameter; ``start_reduce`` sends ``_flat`` off; ``finish_reduce`` adds the result to ``shard`` (shard_numel,).

    [Note: stolen gradients] autograd's first accumulation into an empty ``param.grad`` moves the incoming tensor without a copy.
    Copying it into the flat buffer and scaling it on the way is the only pass; handing autograd views of the flat buffer instead
    costs a zeroing pass and an addition that reads both. For the second one and further ones of a backward: [Note: added in place].

    [Note: kept gradients] Slicing the flat buffer and launching a copy takes the host some 10 us, however small the gradient. So small ones
    are kept as they arrive and copied together, when the last of the unit is there or when they would take more than a few
    bytes; a large one is copied at once. Each is still rounded as often as if it came alone.

    Attributes:
        unit: The unit.
        exchange: Sums gradients over ranks.
        place: Store of the sums.
        pool: Pool of flat buffers.
        shard: The sum over ranks and micro-steps, (shard_numel,); None before the first reduction.
        passed: Whether this backward has passed the unit's block; set by the reducer.
        piecemeal: In this backward the block runs several times, and its gradients arrive in pieces; set by the block.
        was_late: Whether gradients once came after the unit had been sent; set by the reducer.
        in_place: Parameters whose further gradients of this backward need no hook.
        places: Shape, strides and first element of each parameter inside the unit.
    """

    def __init__(self, unit: Unit, exchange: GradientExchange, pool: BufferPool, place: GradientPlace | None = None) -> None:
        self.unit, self.exchange, self.pool = unit, exchange, pool
        self.place = place or GradientPlace()
        self.shard: torch.Tensor | None = None
        self.passed = self.piecemeal = self.was_late = False
        self._policy = exchange.policy
        self._device = exchange.collectives.topology.device
        self._flat: torch.Tensor | None = None  # (padded_numel,); freed when its reduction ends
        self._written = [False] * len(unit.layout.slots)  # by parameter: whether `_flat` has a gradient of it, of any micro-step
        self._used = [False] * len(unit.layout.slots)  # whether a gradient came since the last `clear`
        self._kept: dict[int, torch.Tensor] = {}  # gradients by position, on their way into `_flat`
        self._kept_bytes = 0
        self._most_kept = _KEPT_ON_HOST if self._device.type == "cpu" else _KEPT_ON_DEVICE
        self._factor = 1.0  # the kept gradients are multiplied with it
        self._several = False  # each parameter gets several gradients in this backward
        self.in_place = InPlace(unit.params)
        self.places = [_place(slot) for slot in unit.layout.slots]
        self._arrived: set[int] = set()  # positions of the parameters that had a gradient in this backward
        self._aside: torch.Tensor | None = None  # gradients that came too late, (padded_numel,) in the accumulation type; see `set_aside`
        self._sent: torch.Tensor | None = None  # the tensor that the reduction in flight reads; back to the pool when it ends
        self._pending: Pending | None = None
        self._halfway: tuple[torch.Tensor, torch.dtype] | None = None  # a sum over the node that waits for its turn to cross, and its dtype
        self._crossing: Pending | None = None
        self._spare: torch.Tensor | None = None  # the last local gradient's memory, for the next one

    @property
    def has_local(self) -> bool:
        """Return whether gradients of this rank wait to be reduced."""
        return self._flat is not None and self._pending is None

    @property
    def complete(self) -> bool:
        """Return whether every parameter of the unit has handed in a gradient in this backward."""
        return len(self._arrived) >= len(self._written)

    @property
    def done(self) -> bool:
        """Return whether no more gradients are expected in this backward, so that the unit may be sent when its turn comes."""
        # A unit that was late once got gradients after backward had passed its block, or after all parameters had one: it waits for the
        # end.
        return not (self.piecemeal or self.was_late) and (self.passed or len(self._arrived) >= len(self._written))

    def unused(self) -> list[str]:
        """Return the names of the parameters that require a gradient and had none on this rank since the last step."""
        owners = zip(self.unit.params, self.unit.layout.slots, self._used, strict=True)
        wanted = ((slot, used) for param, slot, used in owners if param is not None and param.requires_grad and slot.numel)
        return [slot.name for slot, used in wanted if not used]

    def used(self, index: int) -> bool:
        """Return whether parameter ``index`` had a gradient on this rank since the last step."""
        return self._used[index]

    def begin_backward(self) -> None:
        """Begin a new backward: no gradient has arrived yet."""
        self._write_kept()  # the last backward did not complete the unit
        self.in_place.end()
        self._arrived.clear()
        self.passed = self.piecemeal = False

    def collect(self, index: int, deferred: bool, factor: float = 1.0, several: bool = False) -> None:
        """Take the gradient of parameter ``index`` from autograd.

        Args:
            index: Position in the unit.
            deferred: The reduction comes in a later micro-step, so sum in the accumulation type meanwhile.
            factor: Factor of the gradient; the same throughout a backward.
            several: Each parameter gets several gradients in this backward, and the unit is not sent before its end.

        Raises:
            StateError: It is the gradient of an empty tensor: a function read the parameter while it was sharded.
        """
        if index in self.in_place.indices:
            return
        param = self.unit.params[index]
        grad = None if param is None else param.grad
        if param is None or grad is None:
            return
        param.grad = None
        self.accept(index, grad, deferred, factor, several)

    def accept(self, index: int, grad: torch.Tensor, deferred: bool, factor: float = 1.0, several: bool = False) -> None:
        """Take ``grad``, of the full shape, as a gradient of parameter ``index``; the other arguments are those of ``collect``."""
        if not grad.numel():
            _refuse_empty(self.unit.layout.slots[index])
        if grad.is_sparse:
            grad = grad.to_dense()
        if self._pending is not None:
            self.finish_reduce()
        if self._flat is None:
            self._allocate(deferred)
        if index in self._kept:  # the parameter's second gradient of this backward
            self._write_kept()
        self._factor, self._several = factor, several
        self._used[index] = True
        self._arrived.add(index)
        nbytes = grad.nbytes
        if nbytes >= self._most_kept or index in self.in_place.indices:  # later gradients are added to it at once
            self._write({index: grad})
            return
        self._kept[index] = grad
        self._kept_bytes += nbytes
        if self._kept_bytes > self._most_kept or (len(self._arrived) >= len(self._written) and not self.piecemeal):
            self._write_kept()

    def _write_kept(self) -> None:
        """Copy the kept gradients into the flat buffer; see [Note: kept gradients]."""
        if self._kept:
            kept, self._kept, self._kept_bytes = self._kept, {}, 0
            self._write(kept)

    def _write(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Scale gradients, by position, and write them to the flat buffer; if it holds one of the same parameter already, add to it."""
        flat = self._flat
        if flat is None:
            raise StateError(f"unit {self.unit.name}: gradients without a buffer")
        scale = self.exchange.scale * self._factor
        start = flat.storage_offset()
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        places: dict[int, torch.Tensor] = {}
        for index, grad in grads.items():
            shape, stride, offset = self.places[index]
            places[index] = target = flat.as_strided(shape, stride, start + offset)  # this costs half as much as slicing and a view
            (added if self._written[index] else copied).append((target, grad))
            self._written[index] = True
        if added:
            targets, sources = zip(*added, strict=True)
            torch._foreach_add_(targets, sources, alpha=scale)
        if len(copied) == 1 and scale != 1.0 and copied[0][1].dtype == flat.dtype:
            torch.mul(copied[0][1], scale, out=copied[0][0])  # one pass
        elif copied:
            targets, sources = zip(*copied, strict=True)
            torch._foreach_copy_(targets, sources)
            if scale != 1.0:
                torch._foreach_mul_(targets, scale)
        if self._several and scale == 1.0 and flat.dtype == self.unit.layout.dtype:
            self.in_place.begin(places)

    def _allocate(self, deferred: bool) -> torch.Tensor:
        if self._flat is None:
            layout = self.unit.layout
            keep_wide = deferred or not self._policy.sharded
            dtype = self._policy.accumulation_dtype if keep_wide else (self._policy.message_dtype or layout.dtype)
            # Empty, not zeroed: gaps and missing parameters are zeroed in start_reduce, all other elements are overwritten.
            spare, self._spare = self._spare, None
            if spare is None or spare.dtype != dtype:
                spare = self.pool.take(layout.padded_numel, dtype, self._device)
            self._flat = spare
        return self._flat

    def _zero_unwritten(self, flat: torch.Tensor) -> None:
        """Zero the elements to which no gradient was written: parameters unused on this rank, gaps, padding."""
        for start, stop in self.unit.layout.gaps:
            flat[start:stop].zero_()
        if not all(self._written):
            for slot, written in zip(self.unit.layout.slots, self._written, strict=True):
                if not written:
                    flat[slot.range.start : slot.range.stop].zero_()

    def start_reduce(self) -> Pending:
        """Start the reduction of this rank's gradients, with zeros where it has none; collective."""
        if self._pending is not None:
            raise StateError(f"unit {self.unit.name}: a reduction is in flight already")
        flat = self._allocate(deferred=False)
        self._write_kept()
        self.in_place.end()
        self._zero_unwritten(flat)
        # Sums over micro-steps in the accumulation dtype are sent in this dtype, unless the configuration names another one.
        message = flat.to(self._policy.message_dtype or flat.dtype)
        self._pending = self.exchange.start(message, self.unit.name)
        self._sent, self._flat = message, None
        self._written = [False] * len(self._written)
        return self._pending

    @property
    def late(self) -> bool:
        """Return whether gradients of this rank came after the unit had been sent."""
        return self._aside is not None

    def set_aside(self) -> None:
        """Set late gradients aside until the ranks have agreed to reduce them; further micro-steps may add more."""
        if not self.has_local or self._flat is None:
            return
        self._write_kept()
        self.in_place.end()
        late, self._flat = self._flat, None
        self._zero_unwritten(late)
        self._written = [False] * len(self._written)
        wide = late.to(self._policy.accumulation_dtype)
        self._aside = wide if self._aside is None else self._aside.add_(wide)

    def start_reduce_late(self) -> Pending:
        """Start the reduction of the gradients that were set aside, with zeros where this rank has none; collective."""
        self._flat, self._aside = self._aside, None
        if self._flat is not None:
            self._written = [True] * len(self._written)
        self._allocate(deferred=True)
        return self.start_reduce()

    def finish_reduce(self) -> None:
        """Wait for the part of a reduction that is in flight, if any, and add the result of the last part to ``shard``."""
        if self._crossing is not None and self._halfway is not None:
            (_, travelled), total = self._halfway, self._crossing.received()
            self._halfway = self._crossing = None
            self._take(total, travelled)
        if self._pending is None or self._sent is None:
            return
        pending, sent = self._pending, self._sent
        self._pending = self._sent = None
        pending.wait()
        received = sent if pending.result is None else pending.result  # an all-reduce works in place
        if received is not sent:
            self.pool.give(sent)
        if self.exchange.crosses(sent.dtype):
            self._halfway = received, sent.dtype
        else:
            self._take(received, sent.dtype)

    def start_next_part(self) -> bool:
        """Start the next part of the reduction, if there is one; collective.

        [Note: parts of a reduction] A sum over a node goes on to the other nodes, one over a shard group to its replicas. Each part starts
        when the reducer takes the unit from the queue of the part before: a place in the order of reductions ([Note: one order]) that
        depends on nothing else. So every part has one order, on a group of its own, and overlaps with backward.

        Returns:
            Whether a part was started; ``finish_reduce`` ends it too.
        """
        if self._halfway is None or self._crossing is not None:
            return False
        self._crossing = self.exchange.cross(*self._halfway, self.unit.name)
        return True

    def _take(self, received: torch.Tensor, travelled: torch.dtype) -> None:
        """Add a sum over ranks to ``shard``.

        Args:
            received: The sum, (shard_numel,), without ``post_scale``.
            travelled: Its dtype on the network.
        """
        if self._policy.post_scale != 1.0:
            received.mul_(self._policy.post_scale)
        self.shard = self.place.add(self.unit, self.shard, received, self._policy.accumulation_dtype)
        if self.place.listener is not None:
            self.place.listener(self.unit, self.shard, self.place.settle)

    def reduced(self) -> torch.Tensor:
        """Return the reduced gradient of this rank's shard, (shard_numel,); zeros if no backward reached the unit.

        If the exchange does not reduce, this is the rank's own gradient of the complete unit, (padded_numel,).
        """
        if self.exchange.keeps_whole:
            return self.own_whole()
        if (held := self.held()) is None:
            held = self.shard = self.place.zeros(self.unit, self._policy.accumulation_dtype)
        return held

    def own_whole(self) -> torch.Tensor:
        """Return this rank's own gradients, not reduced, of the complete unit, (padded_numel,); zeros where it has none."""
        self.finish_reduce()
        if self._flat is None and not self.exchange.keeps_whole:  # a buffer of this type would be sent by this rank alone
            flat = torch.zeros(self.unit.layout.padded_numel, dtype=self._policy.accumulation_dtype, device=self._device)
        else:
            flat = self._allocate(deferred=True)
            self._write_kept()
            self._zero_unwritten(flat)
        return flat if self._aside is None else flat + self._aside

    def held(self) -> torch.Tensor | None:
        """Return ``reduced()``, ready to be read; None if no backward reached the unit."""
        self.finish_reduce()
        if self.shard is not None:
            self.place.settle(self.unit)
        return self.shard

    def writable(self, index: int) -> torch.Tensor:
        """Return ``reduced()`` in the accumulation dtype, for callers that replace the gradient of parameter ``index``."""
        self._used[index] = True  # of a parameter that is frozen too
        self._write_kept()
        where = self.unit.layout.slots[index].range
        for waiting in (self._flat, self._aside):  # the gradient replaces those that are not reduced yet
            if waiting is not None:
                waiting[where.start : where.stop].zero_()
        self.shard = self.reduced().to(self._policy.accumulation_dtype)
        return self.shard

    def clear(self) -> None:
        """Discard all accumulated gradients, after a step or after a backward that failed."""
        self.held()
        if self.exchange.keeps_whole:
            self._spare = self._flat
        elif self._several and self._device.type == "cpu":  # otherwise the sum may be the host's, of gradients on a device
            self._spare = memory_to_keep(self.shard, self.unit.layout.padded_numel)
        self.shard = self._flat = self._halfway = self._aside = None
        self._kept, self._kept_bytes = {}, 0
        self.begin_backward()
        self._written, self._used = [False] * len(self._written), [False] * len(self._used)


def tensors_of(gradients: UnitGradients) -> list[torch.Tensor]:
    """Return the tensors that hold gradients of a unit now, those in flight included; does not wait."""
    held = [gradients._halfway[0] if gradients._halfway is not None else None, *gradients._kept.values(), *vars(gradients).values()]
    return [value for value in held if isinstance(value, torch.Tensor)]


def _place(slot: ParamSlot) -> tuple[torch.Size, tuple[int, ...], int]:
    """Return the shape, strides and first element of a parameter inside its unit."""
    return slot.shape, torch.empty(slot.shape, device="meta").stride(), slot.offset


def _refuse_empty(slot: ParamSlot) -> None:
    if slot.numel:
        raise StateError(
            f"the gradient of {slot.name} is empty, but the parameter has shape {tuple(slot.shape)}: a function outside the "
            "model's forward used the parameter while it was sharded (ZeRO stage 3), and so read an empty tensor. Call the "
            "function in the forward, or inside `with hf_zero.zero.GatheredParameters([parameter]):`"
        )
