"""Unshard and reshard blocks in forward and backward. Unshard passes have one fixed order, the same on every rank whatever its data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.block import Block, UnshardLimits, UnshardPass
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.torch_internals import next_node
from hf_zero.core.schedule.watched_outputs import UnannouncedBlock
from hf_zero.core.units.shard import HasDerived, drop_changed, exchange_changes
from hf_zero.errors import StateError
from hf_zero.observe import span

_INSIDE = 2  # position of a flag in the vote at the end of a pass: this rank's forward has not raised


class UnshardSchedule:
    """Unshard passes over the blocks: in the model's order in forward, in the reverse order in backward.

    [Note: unshard passes] A pass has a position in the order. A request for block j unshards all sharded blocks from the position to j,
    including blocks that this rank skips, and moves the position behind j; the end of the phase unshards the remaining ones. Each block's
    unshard is therefore issued once per pass and in order, and whether it is issued depends only on which blocks were unsharded when the
    pass began, which is the same on every rank. A request for a block before the position that was resharded (a module that runs twice,
    another order) ends the pass and begins another. At the end of each pass of a forward the ranks vote whether any rank needs another one;
    ranks that do not need it take part in its unshards and vote again. Where every block stays unsharded until backward, no rank can need
    another pass, and there is no vote.

    [Note: blocks that run twice] Such a pass unshards all blocks again. So a block that has run twice in a forward (shared layers, a head
    that computes a loss in tiles) stays unsharded until the end of this and later forwards, as far as the limits allow.

    Args:
        root: Block of the modules that belong to no other block; unsharded throughout.
        blocks: The other blocks, in the model's order.
        limits: Limits on unsharded elements.
        collectives: Network of the ranks that must agree.
    """

    def __init__(self, root: Block, blocks: Sequence[Block], limits: UnshardLimits, collectives: Collectives) -> None:
        self.root = root
        self._all = (root, *blocks)
        self.order = list(blocks)  # in the order of forward; the root, needed throughout, is not part of a pass
        self.limits = limits
        self._collectives = collectives
        self._learned = False  # whether `order` was observed in a forward; until then skipped blocks are not resharded
        self._observed: dict[str, None] = {}  # names of blocks in the order in which they first ran
        self._positions: dict[int, int] | None = None  # see `_place_reductions`; None until it is known
        self._placed = 0  # the value of the reducer's `layouts` for which `_positions` was computed
        self._votes = False  # whether passes of this phase end with a vote
        self._updating = False  # updates of the last step may still be running
        self._pass = UnshardPass((), 0, limits)
        self._reducer: Reducer | None = None  # set during a backward only
        self._unannounced: dict[int, UnannouncedBlock] = {}  # by id of the block
        self._training = False  # the running forward began with gradients on
        self._broke = False  # the last forward of the complete module raised, and other ranks may still be in it
        self._repeats = False  # the error was raised after the pass was over
        self._reads = False  # a forward with gradients that resharded blocks is over, [Note: reads behind the forward]
        self._awaits = False  # a forward with gradients has begun, and no backward or step has ended since

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self, training: bool) -> None:
        """Start the pass of a forward of the complete model and unshard the root; collective.

        [Note: a forward that is run again] If a forward raised on one rank and the script caught the error, its unshard pass is incomplete.
        The other ranks wait in this pass, or in the vote at its end. The next forward of the rank is another pass of the same forward. If
        the error was raised after the pass (in another hook on the model), the other ranks vote when they begin their backward, and take
        part in one more pass.
        """
        for block in self.order:
            block.broken_off()
        if self._broke:
            self._broke = False
            self._again()
            return
        self._serve_reads(self._repeats * (len(self._all) + 1))
        self._repeats = False
        self._reshard_between_passes()
        if not all(block.pinned for block in self._all):  # otherwise each rank generates by itself, and nothing is gathered
            exchange_changes(_keepers(self._all), self._collectives)
        self._begin(self.order)
        self._choose_kept(training)
        self._votes = not all(block.kept or block.pinned for block in self.order)
        self._training = training
        self._pass.unshard(self.root)
        if not self._updating:
            self._pass.prefetch()

    def forward(self, block: Block) -> None:
        """Unshard ``block`` and the parameters of other blocks that it reads, which a forward runs now; collective."""
        for wanted in (block, *block.externals):
            if not self.root.open:  # a part of the model is called by itself: there is no pass, the caller decides which modules run
                wanted.unshard()
                continue
            if not self._learned:
                self._observed.setdefault(wanted.name)
            self.request(wanted)
            skipped = [other for other in self._pass.passed(wanted) if not (other.ran or other.open or other.kept or other.read_elsewhere)]
            # Blocks that this rank skipped may still run (another order): they stay unsharded until the end of forward while the limits
            # allow.
            if skipped and self._learned and self._pass.live > self.limits.max_live_parameters:
                for other in skipped:
                    self._pass.reshard(other)

    def after_forward(self, block: Block) -> None:
        """Reshard ``block`` after its forward unless it is needed again soon."""
        stays = block.repeats and self._pass.live <= self.limits.max_live_parameters
        if not (block.open or block.kept or block.read_elsewhere or stays):
            self._pass.reshard(block)
        if self._updating:
            self._pass.prefetch()

    def end_forward(self) -> None:
        """Unshard the remaining blocks, which this rank skipped, and reshard blocks that are not kept; collective."""
        self._pass.finish()
        while self._votes and self._vote(again=False):
            self._reshard_between_passes()
            self._begin(self._pass.order, again=True)
            self._pass.finish()
        self._reads |= self._training and self._votes
        for block in self.order:
            if block.kept:
                block.unshard()
            else:
                block.reshard(until_backward=self._awaits)
        if not self.root.kept:
            self.root.reshard()
        self._updating = False  # every unit was unsharded since the step, so its update is over
        if not self._learned:
            self._learn(self._collectives.broadcast_object(list(self._observed), 0, "order of blocks"))

    def break_off(self, inside: bool = True) -> None:
        """Note that a forward of the complete model raised, ``inside`` its pass or after the pass was over on this rank; local."""
        self._broke |= inside
        self._repeats |= not inside

    def settle(self) -> None:
        """End a forward that raised as if this rank had skipped its remaining blocks; collective if a forward raised."""
        if self._broke:
            self._broke = False
            self.end_forward()

    def give_up(self) -> bool:
        """Return whether the last forward raised on this rank and was not run again, while other ranks still run it; collective if it
        raised.

        In this case the forward returns on no rank.
        """
        if not self._broke:
            return False
        self._broke = False
        self._pass.finish()
        return self._votes and self._vote_on_pass(again=False, given_up=True)[_INSIDE]

    def begin_update(self) -> None:
        """Reshard all blocks before a step changes the shards, because unsharded values become stale; local."""
        for block in self._all:
            block.updated()
        self.reshard_all()
        self._updating = self.limits.updates_overlap

    def _choose_kept(self, training: bool) -> None:
        """Choose the blocks that stay unsharded from this forward to its backward.

        [Note: reuse distance] Number of elements used between a block's forward and its backward: twice the elements of all later blocks.
        """
        self.root.kept = training
        self._awaits |= training
        behind, live = 0, self.root.numel
        for block in reversed(self.order):
            live += block.numel
            near = 2 * behind + block.numel <= self.limits.max_reuse_distance
            block.kept = training and block.read_in_backward and near and live <= self.limits.max_live_parameters
            behind += block.numel

    def _learn(self, names: Sequence[str]) -> None:
        """Adopt the order in which rank 0 ran the blocks (``names``); blocks that did not run stay after their predecessor."""
        rank = {name: index for index, name in enumerate(names)}
        place, last = {}, -1
        for block in self.order:
            last = rank.get(block.name, last)
            place[block.name] = last
        self.order.sort(key=lambda block: place[block.name])  # stable
        self._learned, self._positions = True, None

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self, reducer: Reducer | None) -> None:
        """Start the pass of a backward and unshard the root; collective.

        [Note: parameters that a function saved] A tensor that autograd saved from a parameter shares the memory of the whole buffer. A
        function that saved the parameter itself reads the values that the parameter shows when backward runs the function. If such a
        function reads a head outside of the head's forward, no hook runs before it. So a head that was read in this way is unsharded first:
        it is the first block of the pass, which issues its all-gather in any case. A later block, or a table that backward does not read,
        shows the values that the root's forward has left: unsharding it here would unshard all blocks before it.

        Args:
            reducer: Sends gradients in the order that this pass determines, see [Note: one order].
        """
        self.settle()  # the loss does not depend on the forward that raised
        self._serve_reads()
        order = [block for block in reversed(self.order) if block.read_in_backward]
        self._reducer = reducer
        if reducer is not None:
            if self._positions is None or self._placed != reducer.layouts:
                self._positions, self._placed = self._place_reductions(), reducer.layouts
            sizes = [block.numel if block.sharded else 0 for block in order]
            reducer.order_with_unshards(self._positions, sizes, self.limits.prefetch_bucket_size)
        self._unannounced = {}
        for block in self._all:
            block.show_written()
        self._begin(order, border=self._border(order))
        self._votes = False  # a block stays unsharded while a backward of it is pending: one pass is enough
        self._pass.unshard(self.root)
        for block in takewhile(lambda block: block.saved_outside, order):
            block.free_kept_memory()
            self.request(block)
        for external in self.root.externals:
            external.show_placeholders()

    def _place_reductions(self) -> dict[int, int]:
        """Return, by id of each block's gradients, the position in backward's order at which they are complete; the root's are missing."""
        positions, position = {}, -1
        for block in reversed(self.order):
            position += block.read_in_backward
            positions.update(dict.fromkeys(map(id, block.gradients), max(position, 0)))
        return positions

    def record_unannounced(self, found: Sequence[UnannouncedBlock]) -> None:
        """Record the blocks whose backward the running backward does not announce in time, [Note: announced backwards]; collective."""
        self._unannounced = {id(entry.block): entry for entry in found}
        self._request_silent(0)

    def _request_silent(self, start: int) -> None:
        """Unshard blocks from position ``start`` on, up to the first block whose output gradients announce its backward in time."""
        for block in self._pass.order[start:] if self._unannounced else ():
            entry = self._unannounced.pop(id(block), None)
            if entry is not None:
                self.request(block)
                if not entry.comes:
                    block.mark_without_gradient()
            if block.awaited:  # this block's outputs announce it
                return

    def backward(self, block: Block) -> list[Block]:
        """Unshard ``block`` and the blocks that it reads in backward; reshard blocks whose backward is over, and return these;
        collective.
        """
        for wanted in (block, *block.externals):
            self.request(wanted)
        index = self._pass.index_of(block)
        if index is not None:
            self._request_silent(index + 1)
        done = [other for other in self._pass.passed(block) if not (other.awaited or other.read_elsewhere or other in block.externals)]
        for other in done:
            self._pass.reshard(other)
        return done

    def finish_pass(self) -> None:
        """Issue the remaining unshards of this pass, and reshard blocks that no pending execution needs; collective."""
        self._pass.finish()

    def end_backward(self) -> None:
        """Issue the remaining unshards of the backward's pass, and reshard all blocks; collective."""
        self._pass.finish()
        self.reshard_all()

    def reshard_all(self) -> None:
        """Reshard every block and discard pending executions; local."""
        for block in self._all:
            block.kept = False
            block.reshard()
        self._reducer = None
        self._reads = self._awaits = False

    # -- passes -------------------------------------------------------------------------------------------------------

    def _begin(self, order: Sequence[Block], border: int | None = None, again: bool = False) -> None:
        live = sum(block.numel for block in self._all if not block.sharded)
        agree = partial(self._collectives.any_rank, unit="below what trains") if border is not None else bool
        self._pass = UnshardPass(order, live, self.limits, self._reducer, border, agree, rerun=again and self._votes)

    @staticmethod
    def _border(order: Sequence[Block]) -> int | None:
        """Return the border of a backward's pass, see [Note: below what trains]; None if there is no border.

        [Note: below what trains] The border is the first position behind all blocks that train at which a block is sharded. A frozen
        backbone has no backward, unless a gradient passes through it to a tensor below: parameters of the root (a prompt), an input. A rank
        knows only from its own graph whether this is so. So the unshards behind the border are issued if any rank requests one of them: the
        vote has a fixed place in the order there, and ranks whose backward does not reach it vote when their backward is over.
        """
        trains = max((index for index, block in enumerate(order) if block.gradients), default=-1)
        return next((index for index in range(trains + 1, len(order)) if order[index].sharded), None)

    def request(self, block: Block) -> None:
        """Unshard ``block``, which runs now, and all blocks before it in the order of the pass, and prefetch; collective."""
        index = self._pass.index_of(block)
        if index is None:  # the root, or an embedding in backward, which a recomputation reads
            self._pass.unshard(block)
            return
        if block.sharded and self._pass.has_passed(index):
            block.repeats |= block.ran
            self._again()
        self._pass.advance(index)
        block.ran = True
        self._pass.unshard(block)
        if not self._updating:
            self._pass.prefetch()

    def _again(self) -> None:
        """End the pass and begin another, which first unshards the blocks that are running."""
        self._pass.finish()
        running = [block for block in self.order if block.open]
        if self._votes:
            self._vote(again=True)
            self._reshard_between_passes()
        self._begin(self._pass.order, again=True)
        for block in running:
            self._pass.advance(self._pass.order.index(block))
            self._pass.unshard(block)

    def _reshard_between_passes(self) -> None:
        """Reshard all blocks that are not kept, so that every rank is in the same state before another pass."""
        for block in self.order:
            if not block.kept:
                block.reshard(until_backward=self._awaits)

    def _vote(self, again: bool) -> bool:
        """Return whether any rank needs another pass; ``again`` is whether this rank does. Collective.

        Raises:
            StateError: The forward raised on a rank that did not run it again.
        """
        anyone, given_up, *_ = self._vote_on_pass(again, given_up=False)
        if given_up:
            raise StateError(
                "the forward raised an error on another rank, and that rank did not run it again; see the error in that rank's "
                "log. Let the error end the run, or catch it and run the forward again, with the same batch"
            )
        return anyone

    def _vote_on_pass(self, again: bool, given_up: bool) -> list[bool]:
        """Vote on another pass; also exchange which shards have changed, where this matters. Collective."""
        kept = _keepers(self._all)
        changed = [any(unit.derived.changed_here for unit in kept)] if kept else []
        answers = self._collectives.any_of([again, given_up, not given_up, *changed], "another round")
        drop_changed(kept, answers[-1])
        return answers

    # -- reads behind the forward -------------------------------------------------------------------------------------

    def read_behind(self, block: Block) -> None:
        """Unshard ``block`` for code that runs between forward and backward; collective.

        [Note: reads behind the forward] A loss may read parameters, on all ranks or on one (to log them). So the ranks vote until no rank
        requests a block: a rank that reads a parameter votes for its block, and a rank that begins a backward, or another forward, for
        none. All ranks unshard the block with the largest vote. Where every block stays unsharded until backward, no rank can need this,
        and there is no vote.
        """
        if not self._reads:
            block.unshard()
        while block.sharded:
            self._serve(self._wanted(self._all.index(block) + 1))

    def _serve_reads(self, own: int = 0) -> None:
        """Vote, and unshard the blocks that other ranks request, until no rank requests one; collective.

        ``own`` is this rank's request: 0 to continue, or the number that stands for one more forward.
        """
        while self._reads:
            wanted = self._wanted(own)
            if wanted == own:
                self._reads = bool(own)
                return
            self._serve(wanted)

    def _wanted(self, number: int) -> int:
        """Return the largest request of all ranks: 0 (none), 1 + the index of a block, or a larger number for one more forward;
        collective.
        """
        return int(self._collectives.largest_of([number], "behind the forward")[0])

    def _serve(self, number: int) -> None:
        if number > len(self._all):
            self._reads = False
            self.begin_forward(self._training)
            self.end_forward()
            return
        block = self._all[number - 1]
        block.read_by(self.root, self.root)
        block.unshard()


def _keepers(blocks: Sequence[Block]) -> list[HasDerived]:
    return [unit for block in blocks for unit in block.keepers]


class ForwardPhase:
    """Actions of the forward hooks outside backward.

    Attributes:
        count: Number of forwards begun so far: of the complete module, or of a block by itself.
        failed: Number of training forwards of the complete module that raised and were not run again.
        stack: Blocks whose forward runs now, outermost first.

    Args:
        root: Block of the modules that belong to no other block.
        schedule: Unshards and reshards; None when nothing is ever resharded.
    """

    def __init__(self, root: Block, schedule: UnshardSchedule | None) -> None:
        self.count = 0
        self.failed = 0
        self.stack: list[Block] = []
        self._root = root
        self._schedule = schedule
        self._raised = False  # whether the last forward of the complete module raised, as this module's own hook recorded
        self._training = False  # whether the forward of the complete module began with gradients on

    def enter(self, block: Block) -> None:
        """Handle a forward of ``block``'s module that begins; collective if parameters are sharded."""
        root = self._root
        with span("pre_forward", block.name):
            if not root.open:
                self.count += 1
            if block is root and not root.open:
                self._training, self._raised = torch.is_grad_enabled(), False
                self.stack.clear()
                if self._schedule is not None:
                    self._schedule.begin_forward(self._training)
            elif self._schedule is not None:
                self._schedule.forward(block)
            recomputed_later = self._training and block is not root and not torch.is_grad_enabled()
            block.entered(recomputed_later, first_node=next_node())
            self.stack.append(block)

    def unshard(self, block: Block) -> None:
        """Unshard ``block`` and the parameters of other blocks that it reads; collective."""
        if self._schedule is not None:
            self._schedule.forward(block)

    def leave(self, block: Block, raised: bool) -> None:
        """Handle a forward of ``block``'s module that ends, perhaps with an error; collective at the end of the complete module."""
        if self.stack and self.stack[-1] is block:
            self.stack.pop()
        block.left()
        if raised:
            if block is self._root and not block.open:
                self._break_off(self._training, inside=True)
        elif self._schedule is not None:
            with span("post_forward", block.name):
                if block is not self._root:
                    self._schedule.after_forward(block)
                elif not block.open:
                    self._schedule.end_forward()

    def read_behind(self, block: Block) -> None:
        """Unshard ``block`` for code that reads it between forward and backward; collective."""
        if self._schedule is not None:
            self._schedule.read_behind(block)

    def _break_off(self, trains: bool, inside: bool) -> None:
        self._raised = inside
        self.failed += trains
        if self._schedule is not None:
            self._schedule.break_off(inside)

    def raised(self, trains: bool) -> None:
        """Record that a call of the complete module raised, perhaps after its forward was over, in a hook that runs later than the
        engine's; local.

        Args:
            trains: The call was for training.
        """
        if not self._raised:
            self._break_off(trains, inside=False)
        self._raised = False

    def settle(self) -> None:
        """Let other ranks end a forward that raised on this rank and is not run again; collective in this case."""
        if self._schedule is not None:
            self._schedule.settle()

    def join(self) -> None:
        """Take part in a forward that other ranks run and this one does not: issue its unshards, without computation; collective."""
        self.settle()
        if self._schedule is not None:
            self._schedule.begin_forward(training=False)
            self._schedule.end_forward()
