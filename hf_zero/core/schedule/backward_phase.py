"""Backwards of one engine's module: makes each block whole before its backward, and sends gradients off as they arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakMethod, WeakSet, ref

import torch
from torch.utils.hooks import RemovableHandle

from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.schedule import UnshardSchedule
from hf_zero.core.schedule.torch_internals import call_after_backward, outside_compile, outside_transforms, reaches
from hf_zero.observe import note, span


class BackwardPhase:
    """What hooks of outputs and gradients do, from the first gradient to the end of a backward.

    Attributes:
        schedule: Unshards and reshards; None when nothing is ever resharded.
        reducer: Gradients on their way; None without optimizer.
        begun: Whether a backward has begun and not ended.
        mixed: In the one that runs, forwards of some micro-batches follow backwards of others (schedules of pipelines).
        micro_steps: Backwards so far that hand gradients to parameters.
        on_user_backward: Called when one of them begins that the engine did not start.
        on_broken_off: Called when one of them has broken off with an error, and its gradients are gone.

    Args:
        root: Block of what belongs to no other block.
        blocks: The other blocks, in the model's order.
        schedule: As the attribute.
        reducer: As the attribute.
        stack: Blocks whose forward runs now; none does once a backward has begun.
    """

    def __init__(
        self, root: Block, blocks: Sequence[Block], schedule: UnshardSchedule | None, reducer: Reducer | None, stack: list[Block]
    ) -> None:
        self.schedule = schedule
        self.reducer = reducer
        self.begun = False
        self.mixed = False
        self.micro_steps = 0
        self.on_user_backward: WeakMethod[Callable[[], None]] | None = None
        self.on_broken_off: WeakMethod[Callable[[], None]] | None = None
        self._root = root
        self._blocks = (root, *blocks)
        self._stack = stack
        self._count = 0  # backwards so far
        self._collects = False  # whether the backward that runs hands gradients to parameters
        self._awaited: WeakSet[Callable[..., Any]] = WeakSet()  # hooks of outputs; they live as long as the graph
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Puts hooks on the parameters that are trained; ``detach`` takes them out."""
        for entry in self.reducer.gradients if self.reducer is not None else ():
            for index, param in enumerate(entry.unit.params):
                if param is not None:
                    self._handles.append(param.register_post_accumulate_grad_hook(self._collector(entry, index)))

    def _collector(self, entry: UnitGradients, index: int) -> Callable[[torch.Tensor], None]:
        """The hook of a parameter.

        [Note: hooks of autograd hold nothing] torch keeps hooks of tensors where Python's garbage collector does not look. A hook that held
        its engine, and so the parameter that it is on, would keep a model for good that nobody has any more.
        """
        added, weak_self, weak_entry = entry.in_place.indices, ref(self), ref(entry)

        def collect(param: torch.Tensor) -> None:
            phase, entry = weak_self(), weak_entry()
            if index in added or phase is None or entry is None:
                return
            if not phase._collects:
                if phase.reducer is not None:
                    phase.reducer.shown.require_hidden(param, entry.unit.layout.slots[index].name)
                phase._begin_collecting()
            if not phase.begun:
                phase._notice()
            if phase.reducer is not None:
                phase.reducer.collect(entry, index)

        return collect

    def detach(self) -> None:
        """Takes the hooks of parameters out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def stop_training(self) -> None:
        """Lets go of all gradients."""
        self.detach()
        if self.reducer is not None:
            self.reducer.clear()
        self.reducer = None
        for block in self._blocks:
            block.gradients = []

    @property
    def awaited(self) -> bool:
        """Whether a backward may still come of the forwards so far."""
        return bool(self._awaited)

    # -- from forward to backward -------------------------------------------------------------------------------------

    def watch(self, block: Block, output: Any) -> None:
        """Arranges for ``block`` to be whole when its backward begins: when the first gradient of an output is known."""
        # A backward that the user starts must be noticed before checkpointing recomputes a block in it.
        wanted = self.schedule is not None or (block is self._root and self.reducer is not None)
        if not (wanted and torch.is_grad_enabled()):
            return
        fired = 0  # the last backward it was made whole for: with retain_graph there are several
        weak_self, weak_block = ref(self), ref(block)  # [Note: hooks of autograd hold nothing]

        def pre_backward(grad: torch.Tensor) -> None:
            nonlocal fired
            phase, block = weak_self(), weak_block()
            if phase is None or block is None:
                return
            if not phase.begun:
                phase._notice()
            if fired != phase._count:
                fired = phase._count
                phase._pre_backward(block)

        hook = outside_compile(pre_backward)
        watched = [tensor for tensor in _tensors_in(output) if tensor.grad_fn is not None]
        for tensor in watched:
            tensor.register_hook(hook)
        if watched:
            block.watched()
            self._awaited.add(hook)

    def begin(self, mixed: bool = False) -> None:
        """Begins a micro-step that the engine has started.

        Args:
            mixed: It is of several micro-batches, whose forwards and backwards take turns; nothing is resharded in it.
        """
        self._collect()
        if not self.begun:
            self._begin()
        self.mixed = mixed
        if mixed and self.reducer is not None:
            self.reducer.pieces = True

    def _notice(self) -> None:
        """[Note: backwards for inputs] ``torch.autograd.grad`` and the transforms of torch.func give no parameter a gradient.

        They unshard as any backward does; they are no micro-step, need no loss scale, and nothing is reduced. Which kind it is must be
        known before the first block is passed, and all ranks must run the same kind. Where only a recomputation reaches
        parameters (reentrant checkpointing) the first gradient tells.
        """
        trained = self.reducer.gradients if self.reducer is not None and not self._collects else ()
        if reaches(param for entry in trained for param in entry.unit.params if param is not None):
            self._begin_collecting()
        self._begin()
        call_after_backward(self.end)

    def _begin_collecting(self) -> None:
        begin = self.on_user_backward() if self.on_user_backward is not None else None
        if begin is not None and self.reducer is not None:
            begin()
        self._collect()

    def _collect(self) -> None:
        self.micro_steps += not self._collects
        self._collects = True

    def _begin(self) -> None:
        self.begun = True
        self._count += 1
        self._stack.clear()
        SharedBackward.begin(self)
        note("backward")
        if self.reducer is not None:
            self.reducer.shown.end()
            if not self._collects:
                self.reducer.begin(reduces=False)
        if self.schedule is not None:
            self.schedule.begin_backward(self.reducer)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _pre_backward(self, block: Block) -> None:
        if block is self._root:
            SharedBackward.reach(self)
        if self.schedule is None:
            return
        with span("pre_backward", block.name):
            block.backward_began()
            if not block.read_in_backward:
                block.show_placeholders()
            elif block is not self._root:
                self.advance(block)

    def recompute(self, block: Block) -> None:
        """A forward inside backward: activation checkpointing.

        [Note: recomputation] Reentrant checkpointing ran the block without gradient first; its backward follows the recomputation at
        once. Otherwise the block's outputs were watched in forward. In both cases the block is unsharded here and resharded when
        backward moves on, never by the recomputation's own end.
        """
        if self.schedule is not None:
            with span("recompute", block.name):
                self.advance(block)
        block.recomputed()

    def advance(self, block: Block) -> None:
        """Backward comes to ``block``: makes it whole, and sends gradients of those it has passed off; collective."""
        if self.schedule is None:
            return
        passed = self.schedule.backward(block)
        if self.reducer is not None and self._collects:
            self.reducer.close([entry for done in passed for entry in done.gradients])

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends a backward: joins what other ranks unsharded and reduced; collective. Does nothing outside a backward."""
        if not self.begun:
            return
        with span("end_backward"), outside_transforms():
            SharedBackward.close_all()
            if self.schedule is not None:
                self.schedule.end_backward()
            if self.reducer is not None:
                self.reducer.flush()
        self._finish()

    def close(self) -> None:
        """Issues what is left of this backward's unshards and reductions; collective. See [Note: engines in one backward]."""
        if self.begun:
            if self.schedule is not None:
                self.schedule.finish_pass()
            if self.reducer is not None:
                self.reducer.send_all()

    def abort(self) -> None:
        """Forgets a forward or backward that broke off with an error; local."""
        if self.schedule is not None:
            self.schedule.reshard_all()
        if self.reducer is not None and self._collects:
            self.reducer.clear()
            tell = self.on_broken_off() if self.on_broken_off is not None else None
            if tell is not None:
                tell()
        self._finish()

    def _finish(self) -> None:
        self.begun = self.mixed = self._collects = False
        SharedBackward.leave(self)
        self._stack.clear()
        self._awaited.clear()
        for block in self._blocks:
            block.reset()


def begin_inside(phase: BackwardPhase, parts: int) -> None:
    """Inside the backward that runs others begin, ``parts`` of them, which its graph does not show: they give parameters gradients."""
    if not phase._collects:
        phase._begin_collecting()
    if not phase.begun:
        phase._begin()
        call_after_backward(phase.end)
    if parts > 1 and phase.reducer is not None:
        phase.reducer.pieces = True


class SharedBackward:
    """Several engines in one backward, as the two halves of a GAN: one after the other, in the order in which backward reaches them.

    [Note: engines in one backward] A rank that skips blocks of one engine would join their unshards when backward ends, behind those of
    the engine that comes next; the other ranks issue them before. So an engine is closed when backward reaches another, which is when the
    gradient of the other's output is known: the same moment on every rank. At the end all are closed before any of them asks for a vote.
    """

    _begun: ClassVar[list[BackwardPhase]] = []
    _reached: ClassVar[list[BackwardPhase]] = []

    @classmethod
    def begin(cls, engine: BackwardPhase) -> None:
        """``engine`` takes part in the backward that runs."""
        if engine not in cls._begun:
            cls._begun.append(engine)

    @classmethod
    def reach(cls, engine: BackwardPhase) -> None:
        """Backward comes to ``engine``'s module; collective, if it has been in another's before."""
        if cls._reached and cls._reached[-1] is engine:
            return
        for other in cls._reached:
            if other is not engine:
                other.close()
        if engine in cls._reached:
            cls._reached.remove(engine)
        cls._reached.append(engine)

    @classmethod
    def close_all(cls) -> None:
        """Backward is over: closes those it has reached, in that order, then the others; collective."""
        for engine in (*cls._reached, *(other for other in cls._begun if other not in cls._reached)):
            engine.close()

    @classmethod
    def leave(cls, engine: BackwardPhase) -> None:
        """``engine`` has ended its part; local."""
        for known in (cls._begun, cls._reached):
            if engine in known:
                known.remove(engine)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists, mappings and dataclasses (``ModelOutput`` is one of them)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, item.name, None))
