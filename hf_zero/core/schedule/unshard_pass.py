"""Run one unshard pass: the unshards of all blocks in one fixed order, each at most once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.reducer import Reducer


@dataclass(frozen=True)
class UnshardLimits:
    """Limits on unsharded elements; the names are the configuration's names without ``stage3_``.

    Attributes:
        prefetch_bucket_size: Unsharded ahead of use; at least one block unless 0.
        max_live_parameters: Unsharded at the same time; blocks that are needed now are unsharded regardless.
        max_reuse_distance: A block stays unsharded from forward to backward if fewer elements are used in between.
        updates_overlap: Updates may go on after a step, in the first forward. An unshard waits for its unit's update; so a prefetch there
            is issued after the blocks that are needed now.
    """

    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    updates_overlap: bool = False


class UnshardPass:
    """The unshard order of one pass, and the position it has come to: all blocks before it are unsharded or were.

    Attributes:
        order: The blocks, in the order in which they are unsharded.
        live: Elements unsharded now, as far as the schedule has unsharded and resharded them in this pass.

    Args:
        order: See the attribute.
        live: Elements unsharded when the pass begins.
        limits: Limits on unsharded elements.
        reducer: For a backward's pass: sends the reductions between the unshards, see [Note: one order].
        border: Position from which on nothing is unsharded unless a rank asks for it, see [Note: below what trains]; None is no border.
        agree: Collective function; returns whether its argument is True on any rank.
    """

    def __init__(
        self,
        order: Sequence[Block],
        live: int,
        limits: UnshardLimits,
        reducer: Reducer | None = None,
        border: int | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self.order = order
        self.live = live
        self._limits = limits
        self._reducer = reducer
        self._index = {id(block): index for index, block in enumerate(order)}
        self._position = 0
        self._looked_at = 0  # position up to which passed blocks were checked for resharding
        self._border = border
        self._agree = agree
        self._under_way: list[Block] = []  # blocks whose unshards may be running
        for block in order:
            block.ran = False

    def index_of(self, block: Block) -> int | None:
        """Return the position of ``block`` in the order; None for the root, and in backward for blocks whose values it does not read."""
        return self._index.get(id(block))

    def has_lost(self, block: Block) -> bool:
        """Return whether ``block`` was resharded after the pass went by it: only another pass can unshard it."""
        return self._index[id(block)] < self._position and block.sharded

    def advance(self, block: Block) -> None:
        """Issue the unshards up to and including that of ``block``, also of blocks that this rank skips; collective."""
        self._advance(self._index[id(block)])

    def _advance(self, last: int) -> None:
        reducer = self._reducer
        while self._position <= last:
            if self._position == self._border:
                self._crosses(wanted=True)
            block = self.order[self._position]
            if block.sharded:
                if reducer is not None:
                    reducer.send_before_unshard(self._position)
                self.live += block.numel
                block.start_unshard()
                self._under_way.append(block)
            self._position += 1
        if reducer is not None:
            reducer.issued_up_to(self._position)

    def _crosses(self, wanted: bool) -> bool:
        """Return whether the pass continues beyond its border, for this rank or another; collective."""
        if self._reducer is not None:  # reductions before this unshard go before the vote: every rank waits for others in one order
            self._reducer.send_before_unshard(self._position)
        self._border = None
        return self._agree(wanted)

    def unshard(self, block: Block) -> None:
        """Unshard ``block``, whatever its position in the order; collective."""
        if block.sharded:
            self.live += block.numel
        block.unshard()

    def reshard(self, block: Block) -> None:
        """Drop the whole buffers of ``block`` that are not pinned."""
        if not block.sharded:
            block.reshard()
            if block.sharded:
                self.live -= block.numel

    def passed(self, block: Block) -> Sequence[Block]:
        """Return the blocks before ``block`` that were not yet checked since the pass last came to this position."""
        index = self._index.get(id(block))
        if index is None:
            return ()
        start = self._looked_at if self._looked_at <= index else 0
        self._looked_at = index
        return self.order[start:index]

    def prefetch(self) -> None:
        """Issue the next unshards while the limits allow and none is running."""
        room = self._limits.prefetch_bucket_size
        if self._position >= len(self.order) or room <= 0:
            return
        self._under_way = [block for block in self._under_way if block.unsharding]
        ahead = 0
        while self._position < len(self.order) and self._position != self._border:
            block = self.order[self._position]
            if block.sharded:
                first, ahead = not ahead, ahead + block.numel
                if (not first and ahead > room) or self.live + block.numel > self._limits.max_live_parameters:
                    return
                if first and self._under_way:
                    return
                # A prefetch sends no unit incomplete.
                if self._reducer is not None and not self._reducer.is_ready_for_unshard(self._position):
                    return
            self._advance(self._position)

    def finish(self) -> None:
        """Join the remaining unshards, and reshard blocks that no pending execution needs; collective."""
        while self._position < len(self.order):
            if self._position == self._border and not self._crosses(wanted=False):
                self._position = len(self.order)
                if self._reducer is not None:
                    self._reducer.issued_up_to(self._position)
                return
            block = self.order[self._position]
            self._advance(self._position)
            if not (block.kept or block.pending or block.read_elsewhere or block.open):
                self.reshard(block)
