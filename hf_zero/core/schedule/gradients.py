"""Collect the gradients of one unit from autograd into a flat buffer, reduce them over ranks, and accumulate them over micro-steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Pending
from hf_zero.core.schedule.gradient_sums import GradientExchange, GradientPolicy, GradientSum, Hop
from hf_zero.core.units.layout import ParamSlot
from hf_zero.core.units.marks import forget_calls
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError
from hf_zero.memory import host_memory


class BufferPool:
    """Flat buffers of one backward in host memory, reused by one unit after the other: new memory costs a page fault per 4 KiB there.

    A device's allocator keeps memory by itself, and gives that of one size to another: a head's buffer would be idle in the pool.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised (numel,) tensor."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else host_memory.passing(numel, dtype, device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that nothing reads any more; on a device, free it."""
        if buffer.device.type == "cpu":
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers that are not in use."""
        return [buffer for free in self._free.values() for buffer in free]


# Gradients that are kept until they are copied together take at most this number of bytes per unit. On a host they are still in its
# cache when they are copied.
_KEPT_ON_HOST = 1 << 18
_KEPT_ON_DEVICE = 1 << 25


class Collector:
    """Gradients of one unit on this rank, which it copies from autograd into one flat buffer.

    [Note: stolen gradients] autograd's first accumulation into an empty ``param.grad`` moves the incoming tensor without a copy. Copying it
    into the flat buffer and scaling it on the way is the only pass; giving autograd views of the flat buffer instead costs a zeroing pass
    and an addition that reads both.

    [Note: kept gradients] Slicing the flat buffer and launching a copy takes the host some 10 us, however small the gradient. So small
    gradients are kept as they arrive and copied together, when the unit's last one has arrived or when they would take too many bytes; a
    large one is copied at once. Each gradient is rounded as often as if it were copied alone.

    Attributes:
        flat: The buffer, (padded_numel,), with gradients of any micro-step that were not reduced; None if there are none.
        pool: Pool of flat buffers.
        places: Shape, strides and first element of each parameter inside the unit.
        used: For each parameter, whether a gradient arrived since the last step.
        of_experts: Whether other ranks have other parameters in their units of this name.
        piecemeal: Whether parameters get several gradients in this backward, which delays the unit's reduction to the end of backward. Set
            by the block and by the reducer.
        in_place: Positions of parameters to whose gradients autograd itself adds later gradients of this backward; always the same set.
    """

    def __init__(self, unit: Unit, policy: GradientPolicy, pool: BufferPool) -> None:
        self.flat: torch.Tensor | None = None
        self.pool = pool
        self.places = [(slot.shape, torch.empty(slot.shape, device="meta").stride(), slot.offset) for slot in unit.layout.slots]
        self.used = [False] * len(unit.layout.slots)
        self.piecemeal = False
        self.in_place: set[int] = set()
        self._unit = unit
        self.of_experts = unit.collectives.topology.of_experts
        self._policy = policy
        self._arrived: set[int] = set()  # positions of the parameters that had a gradient in this backward
        self._written = [False] * len(unit.layout.slots)  # for each parameter, whether `flat` has a gradient of it
        self._kept: dict[int, torch.Tensor] = {}  # gradients by position, on their way into `flat`
        self._kept_bytes = 0
        self._most_kept = _KEPT_ON_HOST if unit.collectives.topology.device.type == "cpu" else _KEPT_ON_DEVICE
        self._scale = 1.0  # factor of the kept gradients
        self._aside: torch.Tensor | None = None  # late gradients, (padded_numel,) in the accumulation type

    @property
    def complete(self) -> bool:
        """Return whether every parameter of the unit has received a gradient in this backward."""
        return len(self._arrived) >= len(self._written)

    @property
    def late(self) -> bool:
        """Return whether gradients arrived after the unit's reduction had started."""
        return self._aside is not None

    def unused(self) -> list[str]:
        """Return the names of the parameters that require a gradient and had none on this rank since the last step."""
        owners = zip(self._unit.params, self._unit.layout.slots, self.used, strict=True)
        wanted = ((slot, used) for param, slot, used in owners if param is not None and param.requires_grad and slot.numel)
        return [slot.name for slot, used in wanted if not used]

    def add(self, index: int, grad: torch.Tensor, scale: float, wide: bool) -> bool:
        """Take a gradient, and copy it into the flat buffer now or together with others. Return ``complete``.

        Args:
            index: Position of its parameter in the unit.
            grad: The gradient, of the parameter's full shape.
            scale: Factor of the gradient; the same throughout a backward.
            wide: Sum in the accumulation dtype, because the reduction follows in a later micro-step or after several gradients.

        Raises:
            StateError: The gradient is of an empty tensor: a function read the parameter while it was sharded.
        """
        if not grad.numel():
            _refuse_empty(self._unit.layout.slots[index])
        if grad.is_sparse:
            grad = grad.to_dense()
        if self.flat is None:
            self._allocate(wide)
        if index in self._kept:  # the parameter's second gradient of this backward
            self._write_kept()
        self._scale, self.used[index] = scale, True
        self._arrived.add(index)
        complete = len(self._arrived) >= len(self._written)
        nbytes = grad.nbytes
        if nbytes >= self._most_kept or index in self.in_place:  # autograd adds later gradients directly to the buffer
            self._write({index: grad})
            return complete
        self._kept[index] = grad
        self._kept_bytes += nbytes
        if self._kept_bytes > self._most_kept or (complete and not self.piecemeal):
            self._write_kept()
        return complete

    def _allocate(self, wide: bool) -> torch.Tensor:
        if self.flat is None:
            layout, policy = self._unit.layout, self._policy
            keep_wide = wide or not policy.sharded
            dtype = policy.accumulation_dtype if keep_wide else (policy.message_dtype or layout.dtype)
            # Empty, not zeroed: `whole` zeroes gaps and missing parameters; all other elements are overwritten.
            self.flat = self.pool.take(layout.padded_numel, dtype, self._unit.collectives.topology.device)
        return self.flat

    def _write_kept(self) -> None:
        """Copy the kept gradients into the flat buffer; see [Note: kept gradients]."""
        if self._kept:
            kept, self._kept, self._kept_bytes = self._kept, {}, 0
            self._write(kept)

    def _write(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Scale gradients, by position, and write them to the flat buffer; if it holds one of the same parameter already, add to it."""
        flat, scale = self.flat, self._scale
        if flat is None:
            raise StateError(f"unit {self._unit.name}: gradients without a buffer")
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        start, places, written = flat.storage_offset(), self.places, self._written
        for index, grad in grads.items():
            shape, stride, offset = places[index]  # ``as_strided`` costs half as much as slicing and a view
            (added if written[index] else copied).append((flat.as_strided(shape, stride, start + offset), grad))
            written[index] = True
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

    def place(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return the view of parameter ``index`` in ``flat`` (padded_numel,), of the parameter's shape."""
        shape, stride, offset = self.places[index]
        return flat.as_strided(shape, stride, flat.storage_offset() + offset)

    def whole(self, wide: bool = True) -> torch.Tensor:
        """Return all gradients of this rank that were not reduced, (padded_numel,), with zeros where it has none.

        Args:
            wide: As for ``add``, if no gradient has arrived.
        """
        flat = self._allocate(wide)
        self._write_kept()
        # Elements to which no gradient was written: parameters unused on this rank, gaps, padding.
        for start, stop in self._unit.layout.gaps:
            flat[start:stop].zero_()
        if not all(self._written):
            for slot, written in zip(self._unit.layout.slots, self._written, strict=True):
                if not written:
                    flat[slot.range.start : slot.range.stop].zero_()
        return flat

    def own(self) -> torch.Tensor:
        """Return all gradients of this rank that were not reduced, (padded_numel,), including late ones; allocates no message buffer."""
        if self.flat is not None:
            flat = self.whole()
        else:
            layout, device = self._unit.layout, self._unit.collectives.topology.device
            flat = torch.zeros(layout.padded_numel, dtype=self._policy.accumulation_dtype, device=device)
        return flat if self._aside is None else flat + self._aside

    def replace(self, index: int) -> None:
        """Discard the gradients of one parameter that were not reduced, because a gradient written by the script replaces them."""
        self.used[index] = True  # also if the parameter is frozen
        self._write_kept()
        where = self._unit.layout.slots[index].range
        for waiting in (self.flat, self._aside):
            if waiting is not None:
                waiting[where.start : where.stop].zero_()

    def take(self, wide: bool = False) -> torch.Tensor:
        """Return ``whole()``, and remove these gradients from this object."""
        flat = self.whole(wide)
        if self.in_place:
            self._end_in_place()
        self.flat = None
        self._written = [False] * len(self._written)
        return flat

    def set_aside(self) -> None:
        """Set late gradients aside until the ranks have agreed to reduce them; further micro-steps may add more."""
        if self.flat is not None:
            late = self.take().to(self._policy.accumulation_dtype)
            self._aside = late if self._aside is None else self._aside.add_(late)

    def take_late(self) -> torch.Tensor:
        """Return the late gradients, (padded_numel,), in the accumulation dtype; zeros where this rank has none."""
        self.flat, self._aside = self._aside, None
        if self.flat is not None:
            self._written = [True] * len(self._written)
        return self.take(wide=True)

    def _end_in_place(self) -> None:
        """Stop autograd's in-place additions to gradients."""

    def begin_backward(self) -> None:
        """Begin a new backward: no gradient has arrived yet."""
        self._write_kept()  # the last backward did not complete the unit
        self._end_in_place()
        self._arrived.clear()
        self.piecemeal = False

    def clear(self, total: torch.Tensor | None) -> None:
        """Discard all gradients, after a step or after a backward that failed.

        Args:
            total: The sum of reduced gradients, (shard_numel,), which is discarded too.
        """
        if self.flat is not None:  # the next step's gradients reuse its memory
            self.pool.give(self.flat)
        self.flat = self._aside = None
        self._kept, self._kept_bytes = {}, 0
        self._end_in_place()
        self._arrived.clear()
        self.piecemeal = False
        self._written = [False] * len(self._written)
        self.used = [False] * len(self.used)
        for param in self._unit.params if self.of_experts else ():
            if param is not None:
                forget_calls(param)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that hold gradients now."""
        yield from self._kept.values()
        yield from (tensor for tensor in (self.flat, self._aside) if tensor is not None)


@dataclass
class Reduction:
    """The gradients of a unit during their reduction over ranks.

    Attributes:
        message: Tensor that the hop in flight reads; between two hops, the result of the first one.
        sent: Dtype of the message of the first hop.
        hops: Hops that have not started.
        completes: Whether the gradients complete an optimizer step.
        under_way: The hop in flight; None between two hops.
    """

    message: torch.Tensor
    sent: torch.dtype
    hops: list[Hop]
    completes: bool
    under_way: Pending | None = None


class UnitGradients:
    """The gradients of one trainable unit.

    The reducer takes ``param.grad`` from autograd and gives it to ``collected``, which copies it, scaled, into a flat buffer;
    ``start_reduce`` sends the buffer, by one hop after the other (``start_hop``, ``finish_hop``); the result of the last hop is added to
    ``total``.

    Attributes:
        unit: The unit.
        exchange: Returns the hops of a reduction.
        collected: Gradients of this rank that were not reduced.
        total: Sum of the reduced gradients.
        passed: Whether this backward has passed the unit's block; set by the reducer.
        was_late: Whether gradients once arrived after the unit had been sent; set by the reducer.
    """

    def __init__(self, unit: Unit, exchange: GradientExchange, collected: Collector, total: GradientSum) -> None:
        self.unit = unit
        self.exchange = exchange
        self.collected = collected
        self.total = total
        self.passed = False
        self.was_late = False
        self._reduction: Reduction | None = None

    @property
    def done(self) -> bool:
        """Return whether no more gradients are expected in this backward, so that the unit may be sent when its turn comes."""
        # A unit that was late once got gradients after backward had passed its block, or after all its parameters had one: it is sent at
        # the end.
        return not (self.collected.piecemeal or self.was_late) and (self.passed or self.collected.complete)

    @property
    def has_local(self) -> bool:
        """Return whether this rank has gradients that were not reduced."""
        return self.collected.flat is not None

    @property
    def shard(self) -> torch.Tensor | None:
        """Return the sum over ranks and micro-steps, (shard_numel,), which may not yet have reached its place; None before the first."""
        return self.total.shard

    def begin_backward(self) -> None:
        """Begin a new backward: no gradient has arrived yet."""
        self.collected.begin_backward()
        self.passed = False

    def start_reduce(self, completes: bool, late: bool = False) -> None:
        """Start the reduction of this rank's gradients, with zeros where it has none; collective.

        Args:
            completes: The gradients complete an optimizer step.
            late: Reduce the late gradients.
        """
        if self._reduction is not None:
            raise StateError(f"unit {self.unit.name}: a reduction is in flight already")
        flat = self.collected.take_late() if late else self.collected.take()
        # Sums over micro-steps in the accumulation dtype are sent in this dtype, unless the configuration names another one.
        dtype = self.exchange.policy.message_dtype or flat.dtype
        hops = [*self.exchange.hops(dtype), *self.total.hops(completes)]
        self._reduction = Reduction(flat.to(dtype), dtype, hops, completes)
        self.start_hop()

    def start_hop(self) -> bool:
        """Start the next hop of the reduction, if there is one; collective. See [Note: hops of a reduction].

        Returns:
            Whether a hop was started; ``finish_hop`` ends it.
        """
        reduction = self._reduction
        if reduction is None or reduction.under_way is not None:
            return False
        reduction.under_way = reduction.hops.pop(0)(reduction.message, reduction.sent, self.unit.name)
        return True

    def finish_hop(self) -> None:
        """Wait for the hop in flight, if any, and add the result of the last one to ``total``."""
        reduction = self._reduction
        if reduction is None or reduction.under_way is None:
            return
        message, received = reduction.message, reduction.under_way.received()
        if received is not message and message.numel() == self.unit.layout.padded_numel:
            self.collected.pool.give(message)
        reduction.message, reduction.under_way = received, None
        if not reduction.hops:
            self._reduction = None
            self.total.add(received, reduction.completes)

    def reduced(self) -> torch.Tensor:
        """Return the reduced gradient of this rank's shard, (shard_numel,); zeros if no backward reached the unit.

        If the exchange does not reduce, this is the rank's own gradient of the complete unit, (padded_numel,).
        """
        self.finish_hop()
        return self.total.reduced() if self.exchange.reduces else self.collected.whole()

    def held(self) -> torch.Tensor | None:
        """Return the reduced gradient, ready to be read; None if no backward reached the unit."""
        self.finish_hop()
        return self.total.held()

    def writable(self, index: int) -> torch.Tensor:
        """Return ``reduced()`` in the accumulation dtype, for callers that replace the gradient of parameter ``index``."""
        self.collected.replace(index)
        self.total.shard = self.reduced().to(self.exchange.policy.accumulation_dtype)
        return self.total.shard

    def clear(self) -> None:
        """Discard all gradients, those in flight too, after a step or after a backward that failed."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None and reduction.under_way is not None:
            reduction.under_way.drop()
        self.collected.clear(self.total.clear())
        self.passed = False

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that hold gradients of the unit now, those in flight included; does not wait."""
        yield from self.collected.tensors()
        if self._reduction is not None:
            yield self._reduction.message
        if self.total.shard is not None:
            yield self.total.shard


def _refuse_empty(slot: ParamSlot) -> None:
    if slot.numel:
        raise StateError(
            f"the gradient of {slot.name} is empty, but the parameter has shape {tuple(slot.shape)}: a function outside the "
            "model's forward used the parameter while it was sharded (ZeRO stage 3), and so read an empty tensor. Call the "
            "function in the forward, or inside `with hf_zero.zero.GatheredParameters([parameter]):`"
        )
