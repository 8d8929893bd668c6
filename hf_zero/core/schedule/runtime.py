"""Hooks: turns module forwards and autograd events into gathers, releases and reductions."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch import nn

from hf_zero.core.schedule import shared_backward
from hf_zero.core.schedule.differentiation import outside_transforms, reaches
from hf_zero.core.schedule.outputs import tensors_in
from hf_zero.core.schedule.outside_reads import Strays, add_external, outside_compile
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.schedule import Block, UnshardSchedule
from hf_zero.core.units.unprepared import refuse_sharded, unguard_unprepared
from hf_zero.observe import note, span


class IterationState(Enum):
    """Where the iteration is. Changed only by ``begin_backward`` and ``end_backward`` of ``Runtime``."""

    FORWARD = "forward"  # a forward runs, or nothing does
    BACKWARD = "backward"


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Runtime:
    """The hooks of one engine on one module.

    Attributes:
        module: The user's module.
        root: Block of what belongs to no other block.
        blocks: The other blocks, in the model's order.
        schedule: Gathers and releases; None when nothing is ever released.
        reducer: Gradients on their way; None without optimizer.
        state: Where the iteration is.
        forwards: Forwards begun so far.
    """

    def __init__(
        self, module: nn.Module, root: Block, blocks: list[Block], schedule: UnshardSchedule | None, reducer: Reducer | None
    ) -> None:
        self.module = module
        self.root = root
        self.blocks = blocks
        self.schedule = schedule
        self.reducer = reducer
        self.state = IterationState.FORWARD
        self.on_user_backward: WeakMethod[Callable[[], None]] | None = None  # called when a backward begins that the engine did not start
        self._backwards = 0
        self._micro_steps = 0  # backwards that hand gradients to parameters
        self._failed_forwards = 0  # of the whole module, for training
        self._collects = False  # whether the backward that runs hands gradients to parameters
        self._awaited: WeakSet[Callable[..., Any]] = WeakSet()  # hooks of outputs; they live as long as the graph
        self.forwards = 0  # forwards of the whole module, or of a block by itself, outside backward
        self._training_forward = False
        self._stack: list[Block] = []  # blocks whose forward runs now, outermost first
        self._handles: list[Any] = []
        self._strays = Strays(module, root, blocks)
        self._gradients = {id(entry.unit): entry for entry in (reducer.gradients if reducer else ())}
        if reducer is not None and schedule is not None:
            reducer.arrange(schedule.place_in_backward())

    # -- hooks --------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Puts the hooks on the module; ``detach`` takes them out."""
        for former in self.module.__dict__.pop("_hf_zero_runtimes", ()):
            if former.module is self.module:  # else this module is a deep copy of its
                former.detach()
        unguard_unprepared(self.module)
        self.module.__dict__["_hf_zero_runtimes"] = [self]
        self._hook(self.root.module, self.root)
        for block in self.blocks:
            self._hook(block.module, block)
        if self.schedule is not None:
            self._strays.attach(self)
        if self.reducer is not None:
            self.reducer.attach(self._notice_gradient)

    def detach(self) -> None:
        """Takes all hooks out. Parameters of released units stay released until another engine takes the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.reducer is not None:
            self.reducer.detach()
        self._strays.detach()
        runtimes = self.module.__dict__.get("_hf_zero_runtimes", [])
        if self in runtimes:
            runtimes.remove(self)

    def keep(self, handle: Any) -> None:
        """Takes ``handle`` away (``remove()``) together with the hooks."""
        self._handles.append(handle)

    def stop_training(self) -> None:
        """Lets go of all gradients; keeps the hooks that gather, where there are any."""
        if self.reducer is not None:
            self.reducer.clear()
            self.reducer.detach()
        self.reducer = None
        self._gradients = {}
        if self.schedule is None:
            self.detach()

    @property
    def running(self) -> bool:
        """Whether a forward or a backward runs now."""
        return bool(self._stack) or (self.state is IterationState.BACKWARD and _in_backward())

    @property
    def backward_begun(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self.state is IterationState.BACKWARD

    @property
    def idle(self) -> bool:
        """Whether no forward or backward runs, and no backward can come of the forwards so far."""
        return not (self.running or self.backward_begun or self._awaited)

    @property
    def micro_steps(self) -> int:
        """Micro-steps begun so far, those included whose forward raised."""
        return self._micro_steps + self._failed_forwards

    @property
    def attached(self) -> bool:
        """Whether the module still obeys this runtime; another engine on the same module takes it over."""
        return bool(self._handles)

    def _hook(self, module: nn.Module, block: Block) -> None:
        def pre(called: nn.Module, *_: Any) -> None:
            if called is module:
                self.enter(block)
            else:  # a deep copy
                refuse_sharded(called)

        def post(called: nn.Module, _args: Any, output: Any) -> None:
            if called is module:
                self.leave(block, output)

        self._handles.append(module.register_forward_pre_hook(outside_compile(pre, module), prepend=True))
        self._handles.append(module.register_forward_hook(outside_compile(post, module), always_call=True))

    # -- forward ------------------------------------------------------------------------------------------------------

    def enter(self, block: Block) -> None:
        """A forward of ``block``'s module begins."""
        if self.state is IterationState.BACKWARD:
            if _in_backward():
                self._recompute(block)
                return
            self.abort()  # a backward that broke off
        with span("pre_forward", block.name):
            if not self.root.open:
                self.forwards += 1
            if block is self.root and not block.open:
                self._training_forward = torch.is_grad_enabled()
                self._stack.clear()
                if self.schedule is not None:
                    self.schedule.begin_forward(self._training_forward)
            elif self.schedule is not None:
                self._unshard_for_forward(block)
            block.open += 1
            self._stack.append(block)
            if not torch.is_grad_enabled() and self._training_forward and block is not self.root:
                block.checkpointed += 1
                if block.checkpointed > 1:
                    self._defer(block)

    def _unshard_for_forward(self, block: Block) -> None:
        if self.schedule is None:
            return
        if self.root.open:
            self.schedule.forward(block)
            for external in block.externals:
                self.schedule.forward(external)
        else:  # a part of the model called by itself: no round, the caller decides what runs
            block.unshard()
            for external in block.externals:
                external.unshard()

    def _defer(self, block: Block) -> None:
        if self.reducer is not None:
            for unit in block.units:
                if id(unit) in self._gradients:
                    self.reducer.defer(self._gradients[id(unit)])

    def leave(self, block: Block, output: Any) -> None:
        """A forward of ``block``'s module ends, with ``output`` None if it failed."""
        if self.state is IterationState.BACKWARD:
            return
        if self._stack and self._stack[-1] is block:
            self._stack.pop()
        block.open = max(0, block.open - 1)
        if output is None:
            self._failed_forwards += block is self.root and self._training_forward
            return
        if self.schedule is None:
            # A backward that the user starts must be noticed before checkpointing recomputes a block in it.
            if block is self.root and self.reducer is not None and torch.is_grad_enabled():
                self._watch(block, output)
            return
        with span("post_forward", block.name):
            if torch.is_grad_enabled():
                self._watch(block, output)
            if block is not self.root:
                self.schedule.after_forward(block)
            elif not block.open:
                self._end_forward()

    def _end_forward(self) -> None:
        if self.schedule is None:
            return
        self.schedule.end_forward()
        if not self.schedule.learned:
            collectives = next((unit.collectives for block in (self.root, *self.blocks) for unit in block.units), None)
            names = list(self.schedule.observed)
            self.schedule.learn(collectives.broadcast_object(names, 0, "order of blocks") if collectives else names)
            if self.reducer is not None:
                self.reducer.arrange(self.schedule.place_in_backward())

    def join_forward(self) -> None:
        """Takes part in a forward that other ranks run and this one does not: its gathers, no computation; collective."""
        if self.schedule is not None:
            self.schedule.begin_forward(training=False)
            self._end_forward()

    def _watch(self, block: Block, output: Any) -> None:
        """Arranges for ``block`` to be whole when its backward begins: when the first gradient of an output is known."""
        fired = 0  # the last backward it was made whole for: with retain_graph there are several

        def pre_backward(grad: torch.Tensor) -> None:
            nonlocal fired
            self._notice_backward()
            if fired != self._backwards:
                fired = self._backwards
                if block is self.root:
                    shared_backward.reach(self)
                self._pre_backward(block)

        hook = outside_compile(pre_backward)
        watched = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in watched:
            tensor.register_hook(hook)
        if watched:
            block.pending += 1
            self._awaited.add(hook)

    def read(self, block: Block) -> None:
        """A released parameter of ``block`` is read while other modules run: gathers it and remembers who reads it."""
        if self.schedule is None:
            return
        note("external", block.name)
        add_external(self._stack[-1] if self._stack else self.root, block, self.root)
        with outside_transforms():
            if self.state is IterationState.BACKWARD:
                self._advance_backward(block)
            else:
                self._unshard_for_forward(block)

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Enters BACKWARD for a micro-step that the engine has begun."""
        self._collect()
        self._enter_backward()

    def _collect(self) -> None:
        self._micro_steps += not self._collects
        self._collects = True

    def _enter_backward(self) -> None:
        if self.state is IterationState.BACKWARD:
            return
        self.state = IterationState.BACKWARD
        self._backwards += 1
        self._stack.clear()
        shared_backward.begin(self)
        note("backward")
        if self.reducer is not None and not self._collects:
            self.reducer.enabled = False
        if self.schedule is not None:
            self.schedule.begin_backward(self.reducer)

    def _notice_backward(self) -> None:
        """[Note: backwards for inputs] ``torch.autograd.grad`` and the transforms of torch.func give no parameter a gradient.

        They gather as any backward does; they are no micro-step, need no loss scale, and nothing is reduced. Which kind it is must be
        known before the first block is passed, and all ranks must run the same kind. Where only a recomputation reaches
        parameters (reentrant checkpointing) the first gradient tells.
        """
        if self.state is not IterationState.BACKWARD:
            if self.reducer is not None and reaches(
                param for entry in self.reducer.gradients for param in entry.unit.params if param is not None
            ):
                self._begin_collecting()
            self._enter_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _notice_gradient(self) -> None:
        if not self._collects:
            self._begin_collecting()
        self._notice_backward()

    def _begin_collecting(self) -> None:
        begin = self.on_user_backward() if self.on_user_backward is not None else None
        if begin is not None and self.reducer is not None:
            begin()
        self._collect()

    def _pre_backward(self, block: Block) -> None:
        if self.schedule is not None:
            with span("pre_backward", block.name):
                block.pending = max(0, block.pending - 1)
                if not block.read_in_backward:
                    block.show_placeholders()
                elif block is not self.root:
                    self._advance_backward(block)

    def _advance_backward(self, block: Block) -> None:
        if self.schedule is None:
            return
        passed = self.schedule.backward(block)
        if self.reducer is not None and self._collects:
            self.reducer.close([self._gradients[id(unit)] for done in passed for unit in done.units if id(unit) in self._gradients])

    def _recompute(self, block: Block) -> None:
        """A forward inside backward: activation checkpointing.

        [Note: recomputation] Reentrant checkpointing ran the block without gradient first; its backward follows the recomputation at
        once. Otherwise the block's outputs were watched in forward. In both cases the block is gathered here and released when
        backward moves on, never by the recomputation's own end.
        """
        if self.schedule is None:
            block.checkpointed = max(0, block.checkpointed - 1)
            return
        with span("recompute", block.name):
            self._advance_backward(block)
            block.checkpointed = max(0, block.checkpointed - 1)

    def end_backward(self) -> None:
        """Leaves BACKWARD: joins what other ranks gathered and reduced; collective. Does nothing outside a backward."""
        if self.state is not IterationState.BACKWARD:
            return
        with span("end_backward"), outside_transforms():
            shared_backward.close_all()
            if self.schedule is not None:
                self.schedule.end_backward()
            if self.reducer is not None:
                self.reducer.flush()
        self._finish()

    def close(self) -> None:
        """Issues what is left of this backward's gathers and reductions; collective. See [Note: engines in one backward]."""
        if self.state is IterationState.BACKWARD:
            if self.schedule is not None:
                self.schedule.finish_round()
            if self.reducer is not None:
                self.reducer.send_all()

    def abort(self) -> None:
        """Forgets a forward or backward that broke off with an error; local."""
        if self.schedule is not None:
            self.schedule.reshard_all()
        if self.reducer is not None and self._collects:
            self.reducer.clear()
        self._finish()

    def _finish(self) -> None:
        self.state = IterationState.FORWARD
        shared_backward.leave(self)
        self._collects = False
        self._stack.clear()
        self._awaited.clear()
        for block in (self.root, *self.blocks):
            block.open = block.pending = block.checkpointed = 0

    def reshard_for_update(self) -> None:
        """Before an update: what is gathered becomes stale, so it is released; local."""
        if self.schedule is not None:
            self.schedule.begin_update()

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return self
