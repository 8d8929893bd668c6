"""Define a block, which is a module with the units that must be unsharded while it runs, and an unshard pass over all blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.torch_internals import is_recomputed, next_node
from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.shard import HasDerived, keepers
from hf_zero.core.units.unit import Unit
from hf_zero.observe import logger


@dataclass(eq=False)
class Block:
    """A module and its units, with the counts that decide whether the units are still needed. Only the methods here change the counts.

    Attributes:
        name: Dotted name of the module.
        module: The module.
        units: Units of the block, one per dtype and kind (trainable, frozen).
        read_in_backward: Whether backward reads the parameters' values.
        gradients: Gradients of the trainable units; empty if nothing is trained.
        kept: Whether the block stays unsharded from this forward to its backward; the schedule decides.
        ran: Whether the block has run in the present unshard pass, which sets it.
        done: Whether the block has run in an earlier pass of the running forward; the pass sets it.
        repeats: Whether a forward of the model has requested the block again after it had run and was resharded, see
            [Note: blocks that run twice]; the schedule sets it.
        open: Number of forwards of the module that are running.
        pending: Number of forwards whose backward has not begun.
        checkpointed: Number of forwards without gradient inside a training forward, which backward will recompute.
        recomputes: Number of forwards with gradient whose tensors checkpointing has not saved, and which backward will recompute.
        read_elsewhere: Whether other modules read its parameters too, so that it stays unsharded until the phase ends. While it is, the
            root may read it unnoticed, and no hook announces when the root's backward reads it.
        externals: Other blocks whose parameters this module reads.
        silent: Whether a forward with gradients has returned no tensor whose gradient announces its backward, so that tensors which
            autograd saved keep their memory, [Note: announced backwards].
        first_node: Number of the first node of the graph that the forward running now can have made.
    """

    name: str
    module: nn.Module
    units: list[Unit]
    read_in_backward: bool = True
    gradients: list[UnitGradients] = field(default_factory=list)
    kept: bool = False
    ran: bool = False
    done: bool = False
    repeats: bool = False
    open: int = field(default=0, init=False)
    pending: int = field(default=0, init=False)
    checkpointed: int = field(default=0, init=False)
    recomputes: int = field(default=0, init=False)
    read_elsewhere: bool = field(default=False, init=False)
    externals: list[Block] = field(default_factory=list, init=False)
    silent: bool = field(default=False, init=False)
    first_node: int = field(default=0, init=False)

    # -- what happens -------------------------------------------------------------------------------------------------

    def entered(self, recomputed_later: bool, first_node: int = 0) -> None:
        """Count a forward of the module that begins.

        Args:
            recomputed_later: The forward runs without gradient, and backward will recompute it.
            first_node: Number of the next node of the graph.
        """
        if not self.open:
            self.first_node = first_node
        self.open += 1
        if recomputed_later:
            self.checkpointed += 1
            if self.checkpointed > 1:  # its gradients will arrive in several pieces
                for gradients in self.gradients:
                    gradients.collected.piecemeal = True

    def left(self) -> None:
        """Count a forward of the module that ends."""
        self.open = max(0, self.open - 1)

    def broken_off(self) -> None:
        """Note that no forward of the module runs any more, even if one has not ended."""
        self.open = 0

    def watched(self, recomputes: bool) -> None:
        """Count a forward that has ended and whose backward hooks on its outputs will announce; ``recomputes``: see the attribute."""
        self.pending += 1
        self.recomputes += recomputes

    def unwatched(self) -> None:
        """Note that a forward has ended which autograd has recorded, and whose backward no hook announces."""
        self.silent = True

    def backward_began(self) -> None:
        """Count a backward that begins: the first gradient of an output is known."""
        self.pending = max(0, self.pending - 1)

    def mark_without_gradient(self) -> None:
        """Note that the running backward computes no gradient of an output of this block."""
        self.pending = self.recomputes = 0

    def recomputed(self) -> None:
        """Note a forward that begins inside backward: its first node, and that it is no longer to come."""
        self.first_node = next_node()
        if is_recomputed():
            self.recomputes = max(0, self.recomputes - 1)

    def ran_again(self) -> None:
        """Count a recomputation that has ended, of a forward that ran without gradient."""
        self.checkpointed = max(0, self.checkpointed - 1)

    def reset(self) -> None:
        """Reset the counts at the end of an iteration: no forward runs, and no backward is pending."""
        self.open = self.pending = self.checkpointed = self.recomputes = 0
        if self.silent:
            self.silent = False
            for unit in self.units:
                unit.free_kept()

    def read_by(self, reader: Block, root: Block) -> None:
        """Note that ``reader``'s module reads parameters that this block owns: both are unsharded together from now on."""
        self.read_elsewhere = True
        for one in (reader, root):
            if self not in one.externals and one is not self:
                logger.debug("parameters of %s are read inside %s", self.name, one.name)
                one.externals.append(self)

    # -- memory -------------------------------------------------------------------------------------------------------

    @cached_property
    def numel(self) -> int:
        """Return the number of elements that unsharding the block allocates."""
        return sum(unit.layout.padded_numel for unit in self.units)

    def forget_size(self) -> None:
        """Discard the cached ``numel`` and ``keepers``, because the units have changed."""
        self.__dict__.pop("numel", None)
        self.__dict__.pop("keepers", None)

    @cached_property
    def keepers(self) -> list[HasDerived]:
        """Return the units that keep values which follow from the shards of all ranks, [Note: dropped together]."""
        return keepers(self.units)

    @property
    def awaited(self) -> bool:
        """Return whether the running backward will come to this block, as far as its outputs announce: to its functions, or a
        recomputation. An output's gradient may be known long before the block is recomputed ([Note: recomputation]).
        """
        return bool(self.pending or self.checkpointed or self.recomputes)

    @property
    def sharded(self) -> bool:
        """Return whether a unit is neither unsharded nor being unsharded."""
        for unit in self.units:  # noqa: SIM110 - called several times a step for each block; any() takes three times as long
            if unit.state is UnitState.SHARDED:
                return True
        return False

    @property
    def unsharding(self) -> bool:
        """Return whether an unshard of the block is running."""
        for unit in self.units:  # noqa: SIM110
            if unit.state is UnitState.UNSHARDING:
                return True
        return False

    @property
    def unsharded(self) -> bool:
        """Return whether all units are unsharded now."""
        for unit in self.units:  # noqa: SIM110
            if unit.state is not UnitState.UNSHARDED:
                return False
        return True

    @property
    def saved_outside(self) -> bool:
        """Return whether functions outside of the module's forward may have saved its parameters, [Note: parameters that a function
        saved].
        """
        return self.read_elsewhere or any(unit.pinned_in_graph for unit in self.units)

    @property
    def pinned(self) -> bool:
        """Return whether all units are pinned or never reshard, so that the block cannot be resharded now (a generation pins the units)."""
        return all(unit.pinned or not unit.reshards for unit in self.units)

    def unshard(self) -> None:
        """Unshard all units; collective unless they are unsharded."""
        for unit in self.units:
            unit.unshard()

    def reshard(self, until_backward: bool = False) -> None:
        """Free the whole buffers of all units that are not pinned. Tensors that autograd saved for the root keep their memory; other
        buffers are filled again in backward.

        Args:
            until_backward: A backward is awaited, see [Note: parameters that a function saved].
        """
        for unit in self.units:
            unit.reshard(leave=self.read_elsewhere, for_autograd=self.silent or (self.read_elsewhere and until_backward))
            if self.silent:
                unit.show_placeholders()

    def show_written(self) -> None:
        """Copy values of units that are unsharded now to buffers that the coming backward may read: a script may have written to them;
        local.
        """
        for unit in self.units:
            if unit.state is UnitState.UNSHARDED and unit.exact:
                unit.whole.show_older()

    def free_kept_memory(self) -> None:
        """Free the memory that resharding has kept for the root's backward."""
        for unit in self.units:
            unit.whole.free_kept_memory()

    def updated(self) -> None:
        """Prepare for an update of the values: backwards that are still pending would need the old values, and are discarded."""
        self.reset()
        self.free_kept_memory()
        for unit in self.units:
            unit.pinned_in_graph = False

    def show_placeholders(self) -> None:
        """Point sharded parameters at placeholders, which have their shapes but no values."""
        for unit in self.units:
            unit.show_placeholders()


@dataclass(frozen=True)
class UnshardLimits:
    """Limits on unsharded elements; the names are the configuration's names without ``stage3_``.

    Attributes:
        prefetch_bucket_size: Number of elements that may be unsharded ahead of use; at least one block unless 0.
        max_live_parameters: Number of elements that may be unsharded at the same time; blocks that are needed now are unsharded regardless.
        max_reuse_distance: A block stays unsharded from forward to backward if fewer elements are used in between.
        updates_overlap: Whether updates may continue after a step, during the first forward. An unshard waits for its unit's update; so a
            prefetch in this forward is issued after the blocks that are needed now.
    """

    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int
    updates_overlap: bool = False


class UnshardPass:
    """The unshard order of one pass, and its position: all blocks before the position have been unsharded in the pass.

    Attributes:
        order: The blocks, in the order in which they are unsharded.
        live: Elements unsharded now, as far as the schedule has unsharded and resharded them in this pass.

    Args:
        order: See the attribute.
        live: Elements unsharded when the pass begins.
        limits: Limits on unsharded elements.
        reducer: For a backward's pass: sends the reductions between the unshards, see [Note: one order].
        border: Position from which on nothing is unsharded unless a rank requests it, see [Note: below what trains]; None is no border.
        agree: Collective function; returns whether its argument is True on any rank.
        rerun: The pass is another one of the same forward: blocks that have run are unsharded for the sake of other ranks only, one at a
            time.
    """

    def __init__(
        self,
        order: Sequence[Block],
        live: int,
        limits: UnshardLimits,
        reducer: Reducer | None = None,
        border: int | None = None,
        agree: Callable[[bool], bool] = bool,
        rerun: bool = False,
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
        self._rerun = rerun
        for block in order:
            block.done = rerun and (block.done or block.ran)
            block.ran = False

    def index_of(self, block: Block) -> int | None:
        """Return the position of ``block`` in the order; None for the root, and in backward for blocks whose values backward does not
        read.
        """
        return self._index.get(id(block))

    def has_passed(self, index: int) -> bool:
        """Return whether the pass has issued the unshard at this position; if so, only another pass can issue it again."""
        return index < self._position

    def advance(self, last: int) -> None:
        """Issue the unshards up to and including position ``last``, also of blocks that this rank skips; collective."""
        reducer = self._reducer
        while self._position <= last:
            if self._position == self._border:
                self._crosses(wanted=True)
            block = self.order[self._position]
            if block.sharded:
                if reducer is not None:
                    reducer.send_before_unshard(self._position)
                self.live += block.numel
                for unit in block.units:
                    unit.start_unshard()
                self._under_way.append(block)
                if block.done and self._position < last and not self._needs(block):
                    self.reshard(block)
            self._position += 1
        if reducer is not None:
            reducer.issued_up_to(self._position)

    def _crosses(self, wanted: bool) -> bool:
        """Return whether the pass continues beyond its border, because this rank (``wanted``) or another needs it; collective."""
        if self._reducer is not None:  # reductions before this unshard precede the vote: every rank waits for others in the same order
            self._reducer.send_before_unshard(self._position)
        self._border = None
        return self._agree(wanted)

    def unshard(self, block: Block) -> None:
        """Unshard ``block``, whatever its position in the order; collective."""
        if block.sharded:
            self.live += block.numel
        block.unshard()

    def reshard(self, block: Block) -> None:
        """Free the whole buffers of ``block`` that are not pinned."""
        if not block.sharded:
            block.reshard()
            if block.sharded:
                self.live -= block.numel

    def passed(self, block: Block) -> Sequence[Block]:
        """Return the blocks before ``block`` in the order that were not checked for resharding since the pass last reached this
        position.
        """
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
                # A prefetch never makes the reducer send an incomplete unit.
                if self._reducer is not None and not self._reducer.is_ready_for_unshard(self._position):
                    return
            self.advance(self._position)

    def finish(self) -> None:
        """Issue the remaining unshards, which other ranks need, and reshard blocks that no pending execution needs; collective."""
        while self._position < len(self.order):
            if self._position == self._border and not self._crosses(wanted=False):
                self._position = len(self.order)
                if self._reducer is not None:
                    self._reducer.issued_up_to(self._position)
                return
            block = self.order[self._position]
            self.advance(self._position)
            if not self._needs(block):
                self.reshard(block)

    def _needs(self, block: Block) -> bool:
        """Return whether this rank needs a block that was unsharded for other ranks. In another pass of a forward it does not need blocks
        whose backward is pending: backward unshards them again.
        """
        return block.kept or block.read_elsewhere or bool(block.open or ((block.pending or block.recomputes) and not self._rerun))
