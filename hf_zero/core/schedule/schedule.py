"""When blocks are gathered and released at stage 3: rounds in one fixed order, the same on every rank whatever its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from hf_zero.core.schedule.backward_order import BackwardOrder
from hf_zero.core.schedule.reducer import AT_THE_END, Reducer
from hf_zero.core.units.state import UnitState
from hf_zero.core.units.unit import Unit


@dataclass(frozen=True)
class UnshardLimits:
    """How much may be gathered, in elements; the names are those of the configuration without ``stage3_``.

    Attributes:
        prefetch_bucket_size: Gathered ahead of use; at least one block unless 0.
        max_live_parameters: Gathered at once, for what is not strictly needed now.
        max_reuse_distance: A block stays gathered from forward to backward if fewer elements are used in between.
        updates_overlap: Updates may go on after a step, in the first forward. A gather waits for its unit's; so what is prefetched there
            is asked for behind what is needed now.
    """

    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    updates_overlap: bool = False


@dataclass(eq=False)
class Block:
    """A module and the units that must be whole while it runs, with the counts that say when they no longer must.

    Attributes:
        name: Dotted name of the module.
        module: The module.
        units: One per dtype and kind (trainable, frozen).
        read_in_backward: Whether backward reads the parameters' values.
        open: Forwards of the module running now.
        pending: Forwards whose backward is still to come.
        checkpointed: Forwards without gradient inside a training forward: a recomputation is still to come.
        keep: Stays gathered from this forward to its backward.
        sticky: Used by other modules too: stays gathered until the end of the phase.
        executed: Has run in the current round.
        externals: Other blocks whose parameters this module reads.
        read_by_root: The root's own forward reads parameters, and nothing says when its backward will.
    """

    name: str
    module: nn.Module
    units: list[Unit]
    read_in_backward: bool = True
    open: int = 0
    pending: int = 0
    checkpointed: int = 0
    keep: bool = False
    sticky: bool = False
    executed: bool = False
    externals: list[Block] = field(default_factory=list)
    read_by_root: bool = False

    @cached_property
    def numel(self) -> int:
        """Elements that gathering it allocates."""
        return sum(unit.layout.padded_numel for unit in self.units)

    @property
    def resident(self) -> bool:
        """Whether all units are gathered or on their way."""
        return all(unit.state is not UnitState.SHARDED for unit in self.units)

    @property
    def pinned(self) -> bool:
        """Whether nothing can release it now (a ``GatheredParameters`` around a generation)."""
        return all(unit.pinned or not unit.reshards for unit in self.units)

    @property
    def coming(self) -> bool:
        """Whether a gather of it is under way."""
        return any(unit.state is UnitState.UNSHARDING for unit in self.units)

    @property
    def unsharded(self) -> bool:
        """Whether all units are whole now."""
        return all(unit.state is UnitState.UNSHARDED for unit in self.units)

    def start_unshard(self) -> None:
        """Starts the all-gathers; collective."""
        for unit in self.units:
            unit.start_unshard()

    def unshard(self) -> None:
        """Makes all units whole; collective unless they are."""
        for unit in self.units:
            unit.unshard()

    def reshard(self) -> None:
        """Drops all units that nobody pins. What autograd saved for the root keeps its memory; else it is filled again in backward."""
        for unit in self.units:
            unit.reshard(leave=self.read_by_root)

    def show_placeholders(self) -> None:
        """Gives parameters that are released their shapes, without values."""
        for unit in self.units:
            unit.show_placeholders()


class UnshardSchedule:
    """Rounds over the blocks: up in forward, down in backward.

    [Note: rounds] A round has a cursor. Asking for block j gathers all blocks from the cursor to j that are not resident, those that
    this rank skipped included, and moves the cursor behind j; the end of the phase joins the rest. Each block's gather is therefore
    issued once per round and in order, and whether it is issued depends only on what was resident when the round began, which is
    the same on every rank. Asking for a block behind the cursor that was released (a module that runs twice, another order) ends the
    round and begins another. At the end of each round of a forward the ranks vote whether anyone needs another; those that do not
    join its gathers and vote again. Where every block stays gathered until backward nobody can need one, and nobody votes.

    Args:
        root: Block of what belongs to no other block; gathered throughout.
        blocks: The others, in the model's order.
        limits: How much may be gathered.
        vote: Collective; says on every rank whether any rank said True.
    """

    def __init__(self, root: Block, blocks: Sequence[Block], limits: UnshardLimits, vote: Callable[[bool], bool]) -> None:
        self.root = root
        self.order = list(blocks)  # in the order of forward; the root, needed throughout, is not part of a round
        self.limits = limits
        self.learned = False  # whether `order` is what forward was seen to do; until then nothing skipped is released
        self.observed: dict[str, None] = {}  # names of blocks in the order in which they first ran
        self._vote = vote
        self._votes = False  # whether rounds of this phase end with a vote
        self._cursor = 0
        self._swept = 0  # position up to which passed blocks were looked at for release
        self._line: list[Block] = []  # the order of the current round
        self._position: dict[int, int] = {}  # id of a block -> its place in the line
        self._live = 0  # elements gathered now, as far as this schedule has gathered and released them in this phase
        self._coming: list[Block] = []  # blocks whose gathers may be under way
        self._updating = False  # updates of the last step may still go on
        self._reducer: Reducer | None = None  # in backward
        self._backward_order: BackwardOrder | None = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self, training: bool) -> None:
        """Starts the round of a forward of the whole model and gathers the root."""
        for block in self.order:
            block.open = 0
            if not block.keep:
                block.reshard()
        self._begin(self.order)
        self._choose_kept(training)
        self._votes = not all(block.keep or block.pinned for block in self.order)
        self._unshard(self.root)
        if not self._updating:
            self._prefetch()

    def forward(self, block: Block) -> None:
        """Makes ``block`` whole inside a forward of the whole model; collective."""
        if not self.learned:
            self.observed.setdefault(block.name)
        self._request(block)
        skipped = [other for other in self._passed(block) if not (other.executed or other.open or other.keep or other.sticky)]
        # What this rank skipped may still come (another order): it stays whole until the end of forward while there is room.
        if skipped and self.learned and self._live > self.limits.max_live_parameters:
            for other in skipped:
                self._reshard(other)

    def after_forward(self, block: Block) -> None:
        """Releases ``block`` after its forward unless it is needed again soon."""
        if not (block.open or block.keep or block.sticky):
            self._reshard(block)
        if self._updating:
            self._prefetch()

    def end_forward(self) -> None:
        """Joins the gathers of the blocks this rank skipped; releases what is not kept; collective."""
        self.finish_round()
        while self._votes and self._vote(False):
            self._reshard_for_round()
            self._begin(self._line)
            self.finish_round()
        for block in self.order:
            if block.keep:
                block.unshard()
            else:
                block.reshard()
        if not self.root.keep:
            self.root.reshard()
        self._updating = False  # every unit was gathered since

    def begin_update(self) -> None:
        """A step changes the shards: what is gathered becomes stale, so it is released; local."""
        self.reshard_all()
        self._updating = self.limits.updates_overlap

    def _choose_kept(self, training: bool) -> None:
        """[Note: reuse distance] Elements used between a block's forward and its backward: twice all that runs behind it."""
        self.root.keep = training
        behind, live = 0, self.root.numel
        for block in reversed(self.order):
            live += block.numel
            near = 2 * behind + block.numel <= self.limits.max_reuse_distance
            block.keep = training and block.read_in_backward and near and live <= self.limits.max_live_parameters
            behind += block.numel

    def learn(self, names: Sequence[str]) -> None:
        """Takes the order in which rank 0 saw the blocks run; unseen ones keep their place behind their predecessor."""
        rank = {name: index for index, name in enumerate(names)}
        place, last = {}, -1
        for block in self.order:
            last = rank.get(block.name, last)
            place[block.name] = last
        self.order.sort(key=lambda block: place[block.name])  # stable
        self.learned = True

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self, reducer: Reducer | None) -> None:
        """Starts the round of a backward and gathers the root; collective.

        Args:
            reducer: Sends gradients off in the order that this round gives, see [Note: one order].
        """
        line = [block for block in reversed(self.order) if block.read_in_backward]
        self._reducer = reducer
        if reducer is not None:
            sizes = [0 if block.resident else block.numel for block in line]
            self._backward_order = reducer.begin_backward(sizes, self.limits.prefetch_bucket_size)
        self._begin(line)
        self._votes = False  # a block stays gathered while a backward of it is pending: one round is enough
        self._unshard(self.root)
        for external in self.root.externals:
            external.show_placeholders()

    def place_in_backward(self) -> Callable[[Unit], int]:
        """For each unit the position of backward's line whose block completes it; ``AT_THE_END`` for those of the root."""
        places, position = {}, -1
        for block in reversed(self.order):
            position += block.read_in_backward
            places.update({id(unit): max(position, 0) for unit in block.units})
        return lambda unit: places.get(id(unit), AT_THE_END)

    def backward(self, block: Block) -> list[Block]:
        """Makes ``block`` and what it reads elsewhere whole inside backward; collective. Releases what is done, and returns it."""
        self._request(block)
        for external in block.externals:
            self._request(external)
        done = [
            other for other in self._passed(block) if not (other.pending or other.checkpointed or other.sticky or other in block.externals)
        ]
        for other in done:
            self._reshard(other)
        return done

    def end_backward(self) -> None:
        """Joins the gathers that are left and releases everything; collective."""
        self.finish_round()
        self.reshard_all()

    def reshard_all(self) -> None:
        """Releases every block and forgets what was to come; local."""
        for block in (self.root, *self.order):
            block.open = block.pending = block.checkpointed = 0
            block.keep = False
            block.reshard()
        self._reducer = self._backward_order = None

    # -- one round ----------------------------------------------------------------------------------------------------

    def _begin(self, line: list[Block]) -> None:
        self._line = line
        self._position = {id(block): index for index, block in enumerate(line)}
        self._cursor = self._swept = 0
        self._live = sum(block.numel for block in (self.root, *self.order) if block.resident)
        self._coming = []
        for block in line:
            block.executed = False

    def _unshard(self, block: Block) -> None:
        if not block.resident:
            self._live += block.numel
        block.unshard()

    def _reshard(self, block: Block) -> None:
        if block.resident:
            block.reshard()
            self._live -= 0 if block.resident else block.numel

    def _passed(self, block: Block) -> list[Block]:
        """Blocks of the line before ``block`` that were not yet looked at since the line last reached this far."""
        position = self._position.get(id(block))
        if position is None:
            return []
        start = self._swept if self._swept <= position else 0
        self._swept = position
        return self._line[start:position]

    def _request(self, block: Block) -> None:
        position = self._position.get(id(block))
        if position is None:  # the root, or an embedding in backward: a recomputation reads it after all
            self._unshard(block)
            return
        if position < self._cursor and not block.resident:
            self._again()
        self._advance(position)
        block.executed = True
        self._unshard(block)
        if not self._updating:
            self._prefetch()

    def _again(self) -> None:
        """Ends the round and begins another; what runs now is gathered again first."""
        self.finish_round()
        running = [block for block in self.order if block.open]
        if self._votes:
            self._vote(True)
            self._reshard_for_round()
        self._begin(self._line)
        for block in running:
            self._advance(self._position[id(block)])
            self._unshard(block)

    def _reshard_for_round(self) -> None:
        """Brings every rank to the same state before another round."""
        for block in self.order:
            if not block.keep:
                block.reshard()

    def _advance(self, position: int) -> None:
        """Issues the gathers up to and including ``position``; blocks skipped on the way are dropped by the callers."""
        while self._cursor <= position:
            block, order = self._line[self._cursor], self._backward_order
            if not block.resident:
                if order is not None and self._reducer is not None:
                    self._reducer.send(order.before(self._cursor))
                self._live += block.numel
                block.start_unshard()
                self._coming.append(block)
            self._cursor += 1
            if order is not None:
                order.issued = max(order.issued, self._cursor)

    def _prefetch(self) -> None:
        """Issues the next gathers while there is room and none is under way."""
        if self._cursor >= len(self._line) or self.limits.prefetch_bucket_size <= 0:
            return
        self._coming = [block for block in self._coming if block.coming]
        ahead = 0
        while self._cursor < len(self._line):
            block = self._line[self._cursor]
            if not block.resident:
                first, ahead = not ahead, ahead + block.numel
                if (not first and ahead > self.limits.prefetch_bucket_size) or self._live + block.numel > self.limits.max_live_parameters:
                    return
                if (first and self._coming) or not self._may_precede(self._cursor):
                    return
            self._advance(self._cursor)

    def _may_precede(self, position: int) -> bool:
        """Whether the reductions that go before the gather at ``position`` are done: prefetching sends nothing off incomplete."""
        order, reducer = self._backward_order, self._reducer
        return order is None or reducer is None or reducer.has(order.before(position))

    def finish_round(self) -> None:
        """Joins the gathers that are left of this round, and releases what nobody waits for; collective."""
        while self._cursor < len(self._line):
            block = self._line[self._cursor]
            self._advance(self._cursor)
            if not (block.keep or block.pending or block.sticky or block.open):
                self._reshard(block)
