"""Run the forwards of one engine's module: unshard each block before it runs."""

from __future__ import annotations

import torch

from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.schedule import UnshardSchedule
from hf_zero.core.schedule.torch_internals import next_node
from hf_zero.observe import span


class ForwardPhase:
    """Actions of the forward hooks outside backward.

    Attributes:
        count: Forwards begun so far: of the complete module, or of a block by itself.
        failed: Training forwards of the complete module that raised, without those that were run again.
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
        self._raised = False  # the last forward of the complete module, recorded by its own hook
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
            else:
                self.unshard(block)
            recomputed_later = self._training and block is not root and not torch.is_grad_enabled()
            block.entered(recomputed_later, first_node=next_node())
            self.stack.append(block)

    def unshard(self, block: Block) -> None:
        """Unshard ``block`` and the parameters of other blocks that it reads; collective."""
        if self._schedule is None:
            return
        if self._root.open:
            self._schedule.forward(block)
        else:  # a part of the model called by itself: there is no pass, the caller decides which modules run
            block.unshard()
            for external in block.externals:
                external.unshard()

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
        """Record that a call of the complete module raised, perhaps after its forward was over: in a later hook than this one; local.

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
        """Take part in a forward that other ranks run and this one does not: its unshards, without computation; collective."""
        self.settle()
        if self._schedule is not None:
            self._schedule.begin_forward(training=False)
            self._schedule.end_forward()
