"""The state of one unit in the compressed phase of 1-bit Adam: its errors, its codes, and its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.segments import OwnedSegment
from hf_zero.core.units.layout import ALIGNMENT, Range, UnitLayout, round_up
from hf_zero.core.units.unit import Unit
from hf_zero.memory import host_memory
from hf_zero.native.chunks import ChunkTable, Fresh, Sent, Target, build_chunks
from hf_zero.native.codes import compress, decompress, recompress, take
from hf_zero.optim.onebit_adam import move_rule

_SCALE_BYTES = 4


def part_numel(padded_numel: int, world: int) -> int:
    """Return the number of elements that one rank averages of a unit: equal for all ranks, so the last parts may exceed the unit's end."""
    return round_up(-(-padded_numel // world), ALIGNMENT)


def part_ranges(layout: UnitLayout, part: Range) -> list[Range]:
    """Return the ranges of parameters inside ``part``, counted from its start."""
    pieces = (slot.range.intersect(part).shift(-part.start) for slot in layout.slots)
    return [piece for piece in pieces if piece.numel]


class CompressedUnit:
    """Errors and momentum of one unit, and the three phases of a step: ``pack``, ``serve``, ``finish``.

    The unit is cut into one part per rank. A rank encodes its complete momentum and sends each rank its part. It averages the parts
    that it receives, encodes the average and sends it to all ranks. The error of a code is added before the next encoding:
    ``worker_error`` before the first, ``server_error`` before the second. All vectors are fp32 and as long as all parts together.

    Attributes:
        unit: The unit.
        worker_error: (world * part,).
        server_error: (part,), for this rank's part.
    """

    def __init__(self, unit: Unit, segments: Sequence[OwnedSegment], inner: torch.optim.Optimizer, collectives: Collectives) -> None:
        self.unit = unit
        self._segments = list(segments)
        self._inner = inner
        self._collectives = collectives
        layout, device = unit.layout, unit.shard.device
        world, rank = collectives.world, collectives.rank
        self._part = part_numel(layout.padded_numel, world)
        parts = [Range(index * self._part, (index + 1) * self._part) for index in range(world)]
        pieces = [part_ranges(layout, part) for part in parts]
        self._tables = [build_chunks([(piece.start, piece.stop) for piece in found], self._part, device) for found in pieces]
        self._starts = [table.starts.cpu() for table in self._tables]
        self._rank = rank
        # A message is a part's scales, then its bits; its length is a multiple of the alignment of fp32 views.
        scale_bytes = round_up(max(table.chunks for table in self._tables) * _SCALE_BYTES, ALIGNMENT)
        self._bits = slice(scale_bytes, scale_bytes + self._part // 8)
        self._message_bytes = round_up(self._bits.stop, ALIGNMENT)
        self.worker_error = _zeros(world * self._part, device)
        self.server_error = _zeros(self._part, device)
        self._spans = _group_spans(layout)
        self._sharded = layout.world > 1
        self._code: torch.Tensor | None = None  # messages of the common momentum, (world, message bytes), if only its shard is kept in fp32
        self._momentum = None if self._sharded else self._adopt_momentum()
        self._alive = self._find_alive()

    # -- state from the warm-up -------------------------------------------------------------------------------------------

    def _state(self, segment: OwnedSegment) -> dict[str, Any]:
        state: dict[str, Any] = self._inner.state[segment.tensor]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(segment.tensor)
        return state

    def _flat(self, name: str) -> torch.Tensor:
        """Return this rank's part of state ``name`` as one vector, (shard_numel,), with zeros outside segments."""
        flat = _zeros(self.unit.layout.shard_numel, self.unit.shard.device)
        for segment in self._segments:
            flat[segment.range.start : segment.range.stop] = self._state(segment)[name]
        return flat

    def _whole(self, name: str) -> torch.Tensor:
        """Return state ``name`` of the complete unit, as long as all parts together; collective if the state is sharded."""
        flat = self._flat(name)
        whole = _zeros(self._collectives.world * self._part, flat.device)
        if self._sharded:
            self._collectives.all_gather(whole, flat, f"{self.unit.name}: {name}").wait()
        else:
            whole[: flat.numel()] = flat
        return whole

    def _adopt_momentum(self) -> torch.Tensor:
        """Move the momentum of all segments into one vector; the segments' states become views of it."""
        whole = self._whole("exp_avg")
        for segment in self._segments:
            self._state(segment)["exp_avg"] = whole[segment.range.start : segment.range.stop]
        return whole

    def _find_alive(self) -> torch.Tensor | None:
        """Return a mask of the elements that have a variance; None if all have one.

        [Note: elements without variance] An element without a gradient in the warm-up has no variance to scale its update by: a bit of its
        chunk's scale, divided by ``eps``, would move it far away. It takes no part in the compressed phase.
        """
        alive = self._whole("exp_avg_sq") > 0
        return None if int(alive.sum()) == sum(int(table.counts.sum()) for table in self._tables) else alive

    def still_parameters(self) -> list[str]:
        """Return the names of parameters without any element that has a variance."""
        if self._alive is None:
            return []
        ranges = [(slot.name, slot.range) for slot in self.unit.layout.slots if slot.numel]
        return [name for name, part in ranges if not bool(self._alive[part.start : part.stop].any())]

    def holds_state(self) -> bool:
        """Return whether the optimizer's states are still the vectors of this object; a load replaces them."""
        if self._momentum is None:
            return True
        start = self._momentum.data_ptr()
        states = (self._inner.state.get(segment.tensor, {}).get("exp_avg") for segment in self._segments)
        return all(
            state is not None and state.data_ptr() == start + segment.range.start * state.element_size()
            for state, segment in zip(states, self._segments, strict=True)
        )

    # -- one step ---------------------------------------------------------------------------------------------------------

    def pack(self, grad: torch.Tensor) -> torch.Tensor:
        """Encode this rank's momentum, with its own gradient added.

        Args:
            grad: This rank's gradient of the complete unit, (padded_numel,) fp32.

        Returns:
            (world, message bytes) uint8: row ``r`` is for rank ``r``.
        """
        fresh = self._fresh(grad)
        messages = torch.zeros(self._collectives.world, self._message_bytes, dtype=torch.uint8, device=grad.device)
        for index, (row, table) in enumerate(zip(messages, self._tables, strict=True)):
            piece = self._piece(index)
            part = None if fresh is None else replace(fresh, momentum=fresh.momentum[piece], grad=fresh.grad[piece])
            compress(self.worker_error[piece], table, row[self._bits], _scales_of(row, table), self._alive_in(index), part, _threads())
        return messages

    def _fresh(self, grad: torch.Tensor) -> Fresh | None:
        """Return the momentum to encode; None if the worker error already contains it, because groups differ in ``beta1``."""
        previous = self._previous()
        groups = [(self._inner.param_groups[group]["betas"][0], part) for group, part in self._spans]
        if len({beta1 for beta1, _ in groups}) == 1:
            beta1 = groups[0][0]
            return Fresh(previous, grad, beta1, 1 - beta1)
        for beta1, part in groups:
            piece = slice(part.start, part.stop)
            self.worker_error[piece].add_(previous[piece].mul(beta1).add_(grad[piece].mul(1 - beta1)))
        return None

    def _previous(self) -> torch.Tensor:
        """Return the common momentum of the last step, as long as all parts together."""
        if self._momentum is not None:
            return self._momentum
        if self._code is None:
            return self._whole("exp_avg")
        whole = _zeros(self._collectives.world * self._part, self._code.device)
        for index, (row, table) in enumerate(zip(self._code, self._tables, strict=True)):
            decompress(whole[self._piece(index)], table, self._sent(row.unsqueeze(0), table), self._alive_in(index), _threads())
        return whole

    def serve(self, received: torch.Tensor) -> torch.Tensor:
        """Average the received momenta of this rank's part, and encode the average.

        Args:
            received: (world, message bytes) uint8: row ``r`` is from rank ``r``.

        Returns:
            (message bytes,) uint8, to send to all ranks.
        """
        table, alive = self._tables[self._rank], self._alive_in(self._rank)
        message = torch.zeros_like(received[0])
        sent = self._sent(received, table)
        recompress(self.server_error, table, sent, message[self._bits], _scales_of(message, table), alive, _threads())
        return message

    def finish(self, gathered: torch.Tensor, step: int) -> None:
        """Decode the common momentum and update this rank's segments of the masters; local.

        Args:
            gathered: (world, message bytes) uint8: the averages of all parts; kept until the next step.
            step: Number of this step, from 1.
        """
        if self._sharded:
            self._code = gathered
        for index in [self._rank] if self._sharded else range(self._collectives.world):
            message, table = gathered[index], self._tables[index]
            take(table, message[self._bits], _scales_of(message, table), self._targets(index, step), self._alive_in(index), _threads())
        for segment in self._segments:
            state = self._state(segment)
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).fill_(float(step))

    def _targets(self, index: int, step: int) -> list[Target]:
        """Return the targets of decoding: the pieces of this rank's segments inside part ``index``; no chunk crosses a segment's end."""
        part, targets = Range(index * self._part, (index + 1) * self._part), []
        for segment in self._segments:
            here = segment.range.shift(self.unit.owned.start)
            both = here.intersect(part)
            if not both.numel:
                continue
            state, group = self._state(segment), self._inner.param_groups[segment.group]
            inside = slice(both.start - here.start, both.stop - here.start)
            first, last = torch.searchsorted(self._starts[index], torch.tensor([both.start, both.stop]) - part.start).tolist()
            momentum, master, variance = (tensor[inside] for tensor in (state["exp_avg"], segment.tensor.data, state["exp_avg_sq"]))
            rule = move_rule(group, step, int(group["frozen_at"]))
            targets.append(Target(both.start - part.start, first, last, momentum, master, variance, rule))
        return targets

    def _piece(self, index: int) -> slice:
        """Return part ``index`` as a slice of the unit's vectors."""
        return slice(index * self._part, (index + 1) * self._part)

    def _alive_in(self, index: int) -> torch.Tensor | None:
        return None if self._alive is None else self._alive[self._piece(index)]

    def _sent(self, messages: torch.Tensor, table: ChunkTable) -> Sent:
        """Return the codes of a part, from messages of shape (workers, message bytes)."""
        return Sent(messages[:, self._bits], messages.view(torch.float32)[:, : table.chunks])


def _zeros(numel: int, device: torch.device) -> torch.Tensor:
    """Return (numel,) fp32 zeros, for tensors that are read and written once a step."""
    return host_memory.empty(numel, torch.float32, device).zero_()


def _threads() -> int:
    return torch.get_num_threads()


def _scales_of(message: torch.Tensor, table: ChunkTable) -> torch.Tensor:
    """Return the scales at the start of one message, a (chunks,) fp32 view."""
    return message[: table.chunks * _SCALE_BYTES].view(torch.float32)


def _group_spans(layout: UnitLayout) -> list[tuple[int, Range]]:
    """Return each param group of a unit with its range of elements; the unit's parameters are sorted by group."""
    spans: dict[int, Range] = {}
    for slot in layout.slots:
        if slot.numel:
            known = spans.get(slot.group)
            spans[slot.group] = Range(known.start if known else slot.range.start, slot.range.stop)
    return list(spans.items())
