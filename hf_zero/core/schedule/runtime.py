"""Put the hooks of one engine on one module, and act on calls of the engine between them.

[Note: hooks that move] torch applies only the innermost pair of hooks of saved tensors, and shows which one that is. So a forward that runs
inside ``torch.autograd.graph.save_on_cpu``, or similar hooks, enters a pair of its own, ``HostActivations``: it moves the same values to
the host, except for the weights, and the copies overlap with the computation. Where the innermost pair is another one, such as that of
``torch.utils.checkpoint``, no pair is entered: that pair decides what is saved. Hooks that may change values get everything that they get
without an engine, weights included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import nn

from hf_zero.activation_checkpointing.host_activations import HostActivations, mark_residents, moves_to_host
from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.backward_phase import BackwardPhase, release_held
from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.forward_hooks import RAISED, ForwardHooks
from hf_zero.core.schedule.outside_reads import OutsideReads
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.schedule import ForwardPhase, UnshardSchedule
from hf_zero.core.schedule.script_clipping import LossScale, OnClip, clip_by_norm, clip_by_value
from hf_zero.core.schedule.torch_internals import (
    around_clipping,
    around_clipping_by_value,
    before_zero_grad,
    compiled_call,
    in_backward,
    is_compiled_wrapper,
    is_recomputed,
)
from hf_zero.core.units.divided import PartsInLoss
from hf_zero.core.units.guards import unguard_unprepared
from hf_zero.core.units.registration import make_picklable, remove_pickling
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.errors import StateError

_FEWEST_BLOCKS = 3  # two stay on the device
_top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in every version of torch
_ATTRIBUTE = "_hf_zero_runtime"  # attribute of a module with hooks


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


class Handle(Protocol):
    """Object that can be removed from a module, such as a hook handle."""

    def remove(self) -> None:
        """Remove it from the module."""


class Draws(Protocol):
    """Comparison of the random numbers that ranks which hold layers together draw in forwards."""

    @property
    def drew(self) -> bool:
        """Return whether a forward has drawn random numbers since the last step; local."""

    def look(self, begins: bool) -> None:
        """Record the random state at the beginning or the end of a forward of the model; local."""

    def require_same(self, drawn: bool, everyone: Collectives) -> None:
        """Raise on all ranks if some have drawn other numbers than the ranks that hold layers together with them since the last call;
        ``drawn``: a rank has drawn some. Collective then.
        """


class Runtime:
    """Translator of forwards of modules and events of autograd into unshards, reshards and reductions.

    Attributes:
        module: The user's module.
        root: Block of the modules that belong to no other block.
        blocks: The other blocks, in the model's order.
        schedule: Unshards and reshards; None when nothing is ever resharded.
        forward: Actions of the hooks outside backward.
        backward: Actions of the hooks in backward.
        saved: Hooks of what functions save for backward.
        on_zero_grad: Called with parameters whose gradients a script clears; returns the ids of those whose ``grad`` stays.
        on_clip: Called with parameters whose gradients a script clips, and the order of the norm, or None to clip by value; returns the
            gradients, or None if none wait.
        scaler: Owner of the loss scale that the gradients contain.
        joining: Returns the ids of parameters whose gradients are those of this rank until the step, because they did not train before.
        updated: Returns the param groups, by id, of the tensors that the engine's optimizer holds in place of parameters.
        on_forward: Called when a forward of the module begins outside of a backward.
        draws: Compares random numbers of ranks that hold layers together; None if there are no such ranks.

    Args:
        module: See the attribute.
        root: See the attribute.
        blocks: See the attribute.
        schedule: See the attribute.
        reducer: Gradients on their way; None without optimizer.
        root_alone: Only forwards of the complete module need hooks: nothing is resharded, and no block runs without gradient first.
    """

    def __init__(
        self,
        module: nn.Module,
        root: Block,
        blocks: list[Block],
        schedule: UnshardSchedule | None,
        reducer: Reducer | None,
        root_alone: bool = False,
    ) -> None:
        self.module = module
        self.root = root
        self.blocks = blocks
        self.schedule = schedule
        self.forward = ForwardPhase(root, schedule)
        self._parts = PartsInLoss(module)
        self.backward = BackwardPhase(root, blocks, schedule, reducer, self.forward.stack, self._parts)
        self.on_zero_grad: WeakMethod[Callable[[Sequence[nn.Parameter]], frozenset[int]]] | None = None
        self.on_clip: OnClip | None = None
        self.scaler: LossScale | None = None
        self.updated: WeakMethod[Callable[[], dict[int, int]]] | None = None
        self.joining: WeakMethod[Callable[[], set[int]]] | None = None
        self.on_forward: Callable[[], None] | None = None
        self.draws: Draws | None = None
        self._outside_reads = OutsideReads(module, root, blocks, self.forward, self.backward, self._parts)
        self._hooks: list[ForwardHooks] = []
        self._handles: list[Handle] = []
        self._moved: list[tuple[str, ref[torch.Tensor]]] = []  # parameters that units of other engines have taken over
        self._hooked = (root,) if root_alone else (root, *blocks)
        self.saved = SavedTensors(module, 0 if root_alone else len(blocks))
        entries = {id(entry.unit): entry for entry in (reducer.gradients if reducer is not None else ())}
        for block in (root, *blocks):
            block.gradients = [entries[id(unit)] for unit in block.units if id(unit) in entries]

    # -- hooks --------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on the module; ``detach`` removes them."""
        before: Runtime | None = self.module.__dict__.pop(_ATTRIBUTE, None)
        if before is not None and before.module is self.module:  # otherwise this module is a deep copy of the engine's module
            before.detach()
        unguard_unprepared(self.module)
        self.module.__dict__[_ATTRIBUTE] = self
        make_picklable(self.module)
        _attached[self] = None
        before_zero_grad(_clear)
        around_clipping(partial(clip_by_norm, _attached))
        around_clipping_by_value(partial(clip_by_value, _attached))
        if self.schedule is not None:
            self._outside_reads.attach(self.enter, self.leave)
        else:
            self._outside_reads.guard_parts()
        for block in self._hooked:
            parts = self._outside_reads.parts.get(id(block.module), [])
            self._hooks.append(ForwardHooks(block.module, partial(self.enter, block), partial(self.leave, block), parts))
        self.follow_compile(inside=True)
        self.backward.attach()
        self._parts.rest()
        for unit in self.units():
            unit.belongs_to = ref(self)

    def release_param(self, unit: Unit, index: int) -> None:
        """Stop training a parameter that moves to another unit: another engine takes its gradients."""
        param = unit.params[index]
        if param is not None:
            self.backward.release_param(unit, index)
            self._moved.append((unit.layout.slots[index].name, ref(param)))

    @property
    def lost(self) -> str:
        """Return the names of the first few parameters that this engine was made to train and another engine has taken; empty if there are
        none.
        """
        if not self._moved:
            return ""
        own = {id(unit) for block in (self.root, *self.blocks) for unit in block.units}
        owners = [(name, find_unit(param)) for name, refers in self._moved if (param := refers()) is not None]
        names = [name for name, owner in owners if owner is None or id(owner[0]) not in own]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    @property
    def trains(self) -> bool:
        """Return whether an engine trains the module."""
        return self.attached and self.backward.reducer is not None

    def detach(self) -> None:
        """Remove all hooks. Sharded parameters stay sharded until another engine takes the module."""
        for handle in (*self._hooks, *self._handles):
            handle.remove()
        self._hooks = []
        self._handles = []
        self.backward.detach()
        self._outside_reads.detach()
        _attached.pop(self, None)
        remove_pickling(self.module)
        if self.module.__dict__.get(_ATTRIBUTE) is self:
            del self.module.__dict__[_ATTRIBUTE]

    def follow_compile(self, inside: bool = False) -> None:
        """Move the hooks of modules that torch.compile has compiled out of their graphs, [Note: compiled modules].

        Args:
            inside: Look at the parts inside of blocks too, which takes longer.
        """
        traced = _below_compiled(self.module) if inside else set()
        for hooks in self._hooks:
            hooks.follow_compile()
            if hooks.parts and (inside or hooks.module is self.root.module):
                hooks.drop_parts(traced)
                for part in hooks.parts:
                    part.follow_compile()
        if self._hooks and self._hooks[0].compiled:  # the root's: all parts lie in its graphs, between the hooks of the blocks
            for hooks in self._hooks:
                hooks.drop_parts()

    def keep(self, handle: Handle) -> None:
        """Keep ``handle``, which ``detach`` removes together with the hooks."""
        self._handles.append(handle)

    @property
    def attached(self) -> bool:
        """Return whether this runtime's hooks are on the module; another engine on the same module replaces them."""
        return bool(self._hooks)

    def enter(self, block: Block) -> None:
        """Handle a forward of ``block``'s module that begins; collective if parameters are sharded."""
        self.saved.enter(block, first=block is self.root and not block.open and not self.backward.begun)
        if self.backward.begun and not self.backward.mixed:
            if in_backward():
                self.backward.recompute(block)
                return
            self.backward.break_off()
        if block is self.root or not self.forward.stack:
            self._parts.hide()
        if self.backward.reducer is not None and torch.is_grad_enabled():  # a backward may follow
            self.backward.reducer.shown.end()
        if block is self.root:
            self._parts.require_own()
            if self.on_forward is not None:
                self.on_forward()
            if self.draws is not None:
                self.draws.look(begins=True)
        self.backward.outputs.follow()
        self.forward.enter(block)

    def leave(self, block: Block, output: Any) -> None:
        """Handle a forward of ``block``'s module that ends; ``output`` is ``RAISED`` if it failed."""
        self.saved.leave(block)
        if not self.backward.begun or self.backward.mixed:
            raised = output is RAISED
            if not (raised or self.backward.begun):
                self.backward.watch(block, output)
            self.forward.leave(block, raised)
            if self.draws is not None and block is self.root:
                self.draws.look(begins=False)
        elif block.checkpointed and torch.is_grad_enabled() and not (output is RAISED or is_recomputed()):
            block.ran_again()  # without gradients, an inner checkpoint will run it once more
            self.backward.watch(block, output)
        if not self.forward.stack:
            self._outside_reads.end_forward()

    # -- interface for the engine -------------------------------------------------------------------------------------

    def units(self) -> list[Unit]:
        """Return all units, block by block in the model's order."""
        return [unit for block in (self.root, *self.blocks) for unit in block.units]

    @property
    def idle(self) -> bool:
        """Return whether no forward or backward runs, and no backward of the forwards so far can follow."""
        return not (self.forward.stack or self.backward.begun or self.backward.awaited)

    @property
    def forwards(self) -> int:
        """Return the number of forwards begun so far: of the complete module, or of a block by itself, outside backward."""
        return self.forward.count

    @property
    def micro_steps(self) -> int:
        """Return the number of micro-steps begun so far, including micro-steps whose forward raised."""
        return self.backward.micro_steps + self.forward.failed

    def forget_broken(self) -> None:
        """End a backward that the script started and that failed without notice to the engine; collective then."""
        if self.backward.begun and not self.backward.mixed and not in_backward():
            self.backward.break_off()

    def begin_clearing(self) -> None:
        """Prepare for a script that clears gradients: end a broken backward, and forget the gradients of the last step."""
        self.forget_broken()
        if self.backward.reducer is not None and self.backward.reducer.shown.reads.keeps:
            self.backward.reducer.shown.end()

    def require_forward(self, what: str) -> None:
        """Raise if the last forward raised on this rank and other ranks wait for it, collective then; or if a script has replaced a divided
        parameter.

        Args:
            what: Name of the function that the script has called instead of running the forward again.

        Raises:
            StateError: On every rank, each at its present call.
            UnsupportedError: A divided parameter was replaced.
        """
        self._parts.require_own()
        if self.schedule is not None and self.schedule.give_up():
            raise StateError(
                f"{what} after a forward that raised an error on this rank only; the other ranks wait in their forward. Let the "
                "error end the run, or catch it and run the forward again with the same batch"
            )

    def reshard_for_update(self) -> None:
        """Reshard before an update, because unsharded values become stale; local."""
        release_held(self.backward)
        if self.schedule is not None:
            self.schedule.begin_update()

    def stop_training(self) -> None:
        """Drop all gradients; keep the hooks that unshard, if there are any."""
        self.backward.stop_training()
        if self.schedule is None:
            self.detach()

    def read_gradient(self, unit: Unit, index: int, found: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``param.grad`` of a parameter for which torch has ``found``; see ``ReadGradients.read``."""
        return found if self.backward.reducer is None else self.backward.reducer.shown.reads.read(unit, index, found)

    def write_gradient(self, unit: Unit, index: int, value: torch.Tensor | None) -> bool:
        """Take ``param.grad = value``, and return whether it was taken; see ``ReadGradients.write``."""
        return self.backward.reducer is not None and self.backward.reducer.shown.reads.write(unit, index, value)

    def unshard_for_use(self, param: nn.Parameter) -> bool:
        """Unshard a parameter that code of the model or of its loss computes with; see ``OutsideReads.unshard_for_use``."""
        return self._outside_reads.unshard_for_use(param)

    def mark_read(self, unit: Unit) -> None:
        """Serve reads of ``param.grad`` in a unit that a script has just unsharded; local."""
        if self.backward.reducer is not None:
            self.backward.reducer.shown.reads.mark(unit)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return self


# In the order in which the engines were built, which all ranks share: engines that are asked one after the other communicate.
_attached: WeakKeyDictionary[Runtime, None] = WeakKeyDictionary()


def _clear(params: Sequence[nn.Parameter]) -> set[int]:
    """Tell the engines that train ``params``, all or some of them, that a script clears their gradients.

    Returns:
        The ids of the parameters whose ``grad`` stays.
    """
    given, kept = set(map(id, params)), set[int]()
    for runtime in list(_attached):
        clear = runtime.on_zero_grad() if runtime.on_zero_grad is not None else None
        if clear is not None and any(id(param) in given for param in runtime.module.parameters()):
            kept |= clear(params)
    return kept


def _below_compiled(module: nn.Module) -> set[int]:
    """Return the ids of the modules whose forwards a graph of an enclosing module contains."""
    compiled = [outer for outer in module.modules() if compiled_call(outer) is not None]
    # torch calls the hooks of a module that it has wrapped outside of the graph.
    wrapped: list[nn.Module] = [outer._orig_mod for outer in module.modules() if is_compiled_wrapper(outer)]  # type: ignore[misc]
    return {id(inner) for outer in (*compiled, *wrapped) for inner in outer.modules() if inner is not outer}
