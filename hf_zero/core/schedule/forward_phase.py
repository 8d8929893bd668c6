"""Forwards of one engine's module: makes each block whole before it runs."""

from __future__ import annotations

import torch

from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.schedule import UnshardSchedule
from hf_zero.core.schedule.torch_internals import next_node
from hf_zero.observe import span


class ForwardPhase:
    """What forward hooks do outside backward.

    Attributes:
        count: Forwards begun so far: of the whole module, or of a block by itself.
        failed: Forwards of the whole module for training that raised, without those that were run again.
        stack: Blocks whose forward runs now, outermost first.

    Args:
        root: Block of what belongs to no other block.
        schedule: Unshards and reshards; None when nothing is ever resharded.
    """

    def __init__(self, root: Block, schedule: UnshardSchedule | None) -> None:
        self.count = 0
        self.failed = 0
        self.stack: list[Block] = []
        self._root = root
        self._schedule = schedule
        self._raised = False  # the last forward of the whole module, noticed by its own hook
        self._training = False  # the forward of the whole module began with gradients on

    def enter(self, block: Block) -> None:
        """A forward of ``block``'s module begins; collective where parameters are sharded."""
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
        """Makes ``block`` and what it reads elsewhere whole; collective."""
        if self._schedule is None:
            return
        if self._root.open:
            self._schedule.forward(block)
        else:  # a part of the model called by itself: no pass, the caller decides what runs
            block.unshard()
            for external in block.externals:
                external.unshard()

    def leave(self, block: Block, raised: bool) -> None:
        """A forward of ``block``'s module ends, if need be with an error; collective at the end of the whole module's."""
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
        """Makes ``block`` whole for code that reads it between forward and backward; collective."""
        if self._schedule is not None:
            self._schedule.read_behind(block)

    def _break_off(self, trains: bool, inside: bool) -> None:
        self._raised = inside
        self.failed += trains
        if self._schedule is not None:
            self._schedule.break_off(inside)

    def raised(self, trains: bool) -> None:
        """A call of the whole module raised, maybe when its forward was over: a hook behind this one's; local.

        Args:
            trains: It was one for training.
        """
        if not self._raised:
            self._break_off(trains, inside=False)
        self._raised = False

    def settle(self) -> None:
        """A forward that raised on this rank is not run again: lets the others end theirs; collective then."""
        if self._schedule is not None:
            self._schedule.settle()

    def join(self) -> None:
        """Takes part in a forward that other ranks run and this one does not: its unshards, no computation; collective."""
        self.settle()
        if self._schedule is not None:
            self._schedule.begin_forward(training=False)
            self._schedule.end_forward()
