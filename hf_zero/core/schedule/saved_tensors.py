"""Replace hooks of saved tensors that move them to the host by an engine's own pair, while forwards of the engine's module run inside them.

[Note: hooks that move] torch applies only the innermost pair of hooks, and shows which one that is. So a forward that runs inside
``torch.autograd.graph.save_on_cpu``, or similar hooks, enters a pair of its own, ``HostActivations``: it moves the same values to the host,
except for the weights, and the copies overlap with the computation. Where the innermost pair is another one, such as that of
``torch.utils.checkpoint``, no pair is entered: that pair decides what is saved. Hooks that may change values get everything that they get
without an engine, weights included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from hf_zero.activation_checkpointing.host_activations import HostActivations, moves_to_host
from hf_zero.core.schedule.block import Block
from hf_zero.core.units.unit import find_unit
from hf_zero.memory.residents import mark_residents

_FEWEST_BLOCKS = 3  # two stay on the device
_top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in every version of torch


@dataclass
class _Entered:
    """A running forward of a block, and whether it has entered a pair of hooks."""

    block: Block
    hooked: bool


class SavedTensors:
    """Manager of the hooks around forwards of one engine's blocks.

    Attributes:
        host: The hooks.

    Args:
        module: The module; its parameters and buffers that are in no unit stay on the device as well.
        blocks: Number of blocks whose forwards call ``enter``.
        copies_always: See ``HostActivations``.
    """

    def __init__(self, module: nn.Module, blocks: int, copies_always: bool = False) -> None:
        self.host = HostActivations(copies_always)
        self._serves = _top is not None and blocks >= _FEWEST_BLOCKS
        self._entered: list[_Entered] = []
        self._depth = 0  # forwards that have entered hooks
        if self._serves:
            mark_residents(tensor for tensor in chain(module.parameters(), module.buffers()) if find_unit(tensor) is None)

    def enter(self, block: Block, first: bool) -> None:
        """Handle a forward of ``block``'s module that begins.

        Args:
            block: The block.
            first: No other forward of the engine's module runs, so entries that an interrupt has left are discarded.
        """
        if not self._serves:
            return
        if first:
            self._entered, self._depth = [], 0
        hooked = self._hook()
        if self._depth:
            self.host.advance()
        self._entered.append(_Entered(block, hooked))

    def leave(self, block: Block) -> None:
        """Handle a forward of ``block``'s module that ends, perhaps with an error."""
        if self._entered and self._entered[-1].block is block and self._entered.pop().hooked:
            self._unhook()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Enter the hooks around a backward: reentrant checkpointing computes forwards again inside it, without hooks of modules."""
        hooked = self._serves and self._hook()
        try:
            yield
        finally:
            if hooked:
                self._unhook()

    def _hook(self) -> bool:
        found = _top(False)
        if found is None or not moves_to_host(found[0]):
            return False
        torch._C._autograd._push_saved_tensors_default_hooks(self.host.save, self.host.load)
        self._depth += 1
        return True

    def _unhook(self) -> None:
        self._depth -= 1
        torch._C._autograd._pop_saved_tensors_default_hooks()
