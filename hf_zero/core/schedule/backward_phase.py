"""Run the backwards of one engine's module: unshard each block before its backward, and send gradients as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast
from weakref import WeakMethod, ref

import torch
from torch.utils.hooks import RemovableHandle

from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.schedule import UnshardSchedule
from hf_zero.core.schedule.torch_internals import call_after_backward, keeps_graph, outside_compile, outside_transforms, reaches
from hf_zero.core.schedule.watched_outputs import WatchedForward, WatchedOutputs, tensors_in
from hf_zero.core.units.divided import PartsInLoss
from hf_zero.core.units.sharded_parameter import gradients_of, set_gradient
from hf_zero.core.units.unit import Unit
from hf_zero.errors import CollectiveError, StateError
from hf_zero.observe import logger, note, span


class BackwardPhase:
    """Actions of the hooks on outputs and gradients, from the first gradient to the end of a backward.

    Attributes:
        schedule: Unshards and reshards; None when nothing is ever resharded.
        reducer: Collects and reduces gradients; None without an optimizer.
        begun: Whether a backward has begun and not ended.
        mixed: Whether, in the running backward, forwards of some micro-batches follow backwards of others (schedules of pipelines).
        micro_steps: Number of backwards so far that give gradients to parameters.
        on_user_backward: Called when a micro-step begins that the engine did not start.
        on_broken_off: Called when a micro-step has failed with an error, and its gradients are lost.
        outputs: Outputs of forwards, whose gradients show that a backward has begun.

    Args:
        root: Block of the modules that belong to no other block.
        blocks: The other blocks, in the model's order.
        schedule: See the attribute.
        reducer: See the attribute.
        stack: Blocks whose forward is running; emptied when a backward begins.
        parts: Parameters that a model axis divides.
    """

    def __init__(
        self,
        root: Block,
        blocks: Sequence[Block],
        schedule: UnshardSchedule | None,
        reducer: Reducer | None,
        stack: list[Block],
        parts: PartsInLoss,
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
        self._parts = parts
        self._count = 0  # backwards so far
        self._collects = False  # whether the running backward gives parameters gradients
        self._differentiable = False  # whether the running backward builds a graph of itself (``create_graph``)
        self._held: list[tuple[Unit, bool]] = []  # units that are whole until the backward of such a graph, and whether they were before
        self._left: list[tuple[UnitGradients, int]] = []  # gradients that hooks of the script are to see first
        self._looked = False  # whether the running backward has looked ahead
        self.outputs = WatchedOutputs(root)
        self._part_hook = _hook_of_parts(ref(self))
        self._handles: dict[tuple[int, int], RemovableHandle] = {}  # by unit's id and position in it
        self._nodes: dict[tuple[int, int], Any] = {}  # likewise, [Note: nodes of parameters]

    def attach(self) -> None:
        """Register hooks on the trained parameters; ``detach`` removes them."""
        for entry in self.reducer.gradients if self.reducer is not None else ():
            self.attach_to(entry)

    def attach_to(self, entry: UnitGradients) -> None:
        """Register hooks on the parameters of one unit.

        [Note: nodes of parameters] A parameter's node in the graph, ``AccumulateGrad``, takes gradients of the shape that the parameter had
        when the node was made. autograd makes one when a function uses the parameter and no node is alive: also for hooks of a script, or a
        ``torch.autograd.Function`` that is only given the parameter, while it is empty. So a node is made here, with the complete shape,
        and kept. It holds its parameter where the garbage collector does not see it: the parameter must not hold the engine.
        """
        if entry.unit.reshards:
            entry.unit.show_placeholders()
        for index, param in enumerate(entry.unit.params):
            if param is not None:
                requires = param.requires_grad
                param.requires_grad_(True)  # required for the hook; a parameter frozen after its gradient arrived may train again
                number: list[int] = []
                handle = param.register_post_accumulate_grad_hook(self._collector(entry, index, number))
                self._handles[id(entry.unit), index] = handle
                number.append(handle.id)
                if entry.unit.reshards:
                    self._nodes[id(entry.unit), index] = torch.autograd.graph.get_gradient_edge(param).node
                param.requires_grad_(requires)
        if entry.unit.reshards:
            entry.unit.free_kept()

    def release_param(self, unit: Unit, index: int) -> None:
        """Remove the hook of one parameter, because another engine trains it."""
        handle = self._handles.pop((id(unit), index), None)
        self._nodes.pop((id(unit), index), None)
        if handle is not None:
            handle.remove()

    def _collector(self, entry: UnitGradients, index: int, number: list[int]) -> Callable[[torch.Tensor], None]:
        """Return the hook of a parameter, which is registered under ``number[0]``.

        [Note: hooks of a script] A script may register hooks on the same parameter, which read and change ``param.grad``. Those that it
        has registered later run after this one. When this hook finds such hooks for the first time, it moves itself behind them, and
        leaves this gradient until the end of the backward, when they have run.

        [Note: hooks of autograd hold nothing] torch keeps hooks of tensors where Python's garbage collector cannot see them. If a hook had
        a reference to its engine, and so to the parameter that it is registered on, a model would never be freed.
        """
        added, weak_self, weak_entry = entry.collected.in_place, ref(self), ref(entry)

        def collect(param: torch.Tensor) -> None:
            phase, entry, hooks = weak_self(), weak_entry(), cast(Any, param._post_accumulate_grad_hooks)
            if index in added or phase is None or entry is None or hooks is None:  # no hooks: a hook has returned ``param``, torch raises
                return
            if not phase._collects:
                if phase.reducer is not None:
                    phase.reducer.shown.require_hidden(param, entry.unit.layout.slots[index].name)
                (grad,) = gradients_of([param])
                set_gradient(param, None)  # autograd's own: ``note_added`` must not treat it as written by the script
                try:
                    phase._begin_collecting()
                finally:
                    set_gradient(param, grad)
            if not phase.begun:
                phase._notice()
            if next(reversed(hooks)) != number[0] and number[0] in hooks:
                hooks[number[0]] = hooks.pop(number[0])  # autograd ignores ``move_to_end``
                phase._left.append((entry, index))
            elif phase.reducer is not None:
                phase.reducer.collect(entry, index)

        return collect

    def detach(self) -> None:
        """Remove the hooks of parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._nodes = {}, {}

    def stop_training(self) -> None:
        """Drop all gradients and hooks."""
        self.detach()
        if self.reducer is not None:
            self.reducer.clear()
        self.reducer = None
        for block in self._blocks:
            block.gradients = []

    @property
    def awaited(self) -> bool:
        """Return whether a backward of the forwards so far may still follow."""
        return bool(self.outputs)

    # -- from forward to backward -------------------------------------------------------------------------------------

    def watch(self, block: Block, output: Any) -> None:
        """Unshard ``block`` when its backward begins, that is, when the first gradient of one of the tensors in ``output`` is known."""
        # A backward that the user starts must be noticed before checkpointing recomputes a block in it.
        wanted = self.schedule is not None or (block is self._root and self.reducer is not None)
        if wanted and torch.is_grad_enabled():
            self.outputs.left(block, output, self._fired)

    def watch_part(self, output: Any) -> None:
        """Notice a backward that reaches ``output`` of a module inside a block before it reaches any output of a block.

        The loss of such a backward is computed from tensors that a hook or an attribute has kept. The blocks that it reaches are then found
        like other blocks without a watched output, [Note: announced backwards].
        """
        if self.schedule is None or self.begun or not torch.is_grad_enabled():
            return
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._part_hook)

    def _reached_part(self) -> None:
        if not self.begun:
            self._notice()
            self._request_unannounced()

    def _fired(self, forward: WatchedForward) -> None:
        """Handle the first gradient of an output of ``forward``."""
        if not self.begun:
            self._notice()
        self._request_unannounced()
        if forward.backward != self._count:
            forward.backward = self._count
            if forward.block is not None:
                self._pre_backward(forward.block)

    def expect(self, loss: torch.Tensor) -> None:
        """Prepare for the backward of ``loss``, which is about to run."""
        if self.schedule is not None and loss.requires_grad:
            loss.register_hook(outside_compile(lambda _: self._request_unannounced()))

    def _request_unannounced(self) -> None:
        """Find the blocks that the backward which has just begun will not announce in time, and request them; collective."""
        if self.schedule is not None and self.begun and not (self._looked or self.mixed):
            self._looked = True
            self.schedule.record_unannounced(self.outputs.find_unannounced(self._blocks))

    def begin(self, mixed: bool = False) -> None:
        """Begin a micro-step that the engine has started.

        Args:
            mixed: The micro-step has several micro-batches, whose forwards and backwards alternate; nothing is resharded in it.
        """
        self._parts.hide()
        self._collect()
        if not self.begun:
            self._begin()
        self.mixed = mixed
        if mixed and self.reducer is not None:
            self.reducer.piecemeal = True

    def _notice(self) -> None:
        """Begin a backward that the engine did not start, and determine its kind from the graph.

        [Note: backwards for inputs] ``torch.autograd.grad`` and the transforms of torch.func give no parameter a gradient. They unshard as
        any backward does; they are no micro-step, need no loss scale, and nothing is reduced. The kind of a backward must be known before
        it reaches the first block, and all ranks must run the same kind. Where only a recomputation reaches parameters (reentrant
        checkpointing), the first gradient of a parameter decides.
        """
        self._parts.hide()
        trained = self.reducer.gradients if self.reducer is not None and not self._collects else ()
        if reaches(param for entry in trained for param in entry.unit.params if param is not None):
            self._begin_collecting()
        self._begin()
        self._differentiable = keeps_graph()
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
        """Handle a forward inside backward: activation checkpointing.

        [Note: recomputation] Reentrant checkpointing ran the block without gradient first; the outputs of its recomputation are watched.
        Otherwise the outputs were watched in forward; their gradients may be known before the recomputation. Other blocks may run between a
        recomputation and its backward. So the block is resharded when backward reaches a later block and none of these is still to come.
        """
        if self.schedule is not None:
            with span("recompute", block.name):
                self.advance(block)
        block.recomputed()

    def advance(self, block: Block) -> None:
        """Unshard ``block``, which backward has reached, and send the gradients of the blocks that backward has completed; collective."""
        if self.schedule is None:
            return
        passed = self.schedule.backward(block)
        if self.reducer is not None and self._collects:
            self.reducer.close([entry for done in passed for entry in done.gradients])

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End a backward, and take part in the unshards and reductions that other ranks still need; collective. Does nothing outside a
        backward.

        Raises:
            StateError: The backward failed on another rank; its gradients are discarded on this rank too.
        """
        if not self.begun:
            return
        try:
            texts = self._join("")
        except BaseException as error:
            self.break_off(error)
            raise
        if texts:
            self.abort()
            raise StateError(
                f"a backward broke off with an error on another rank ({texts}): the gradients since the last optimizer step are gone on "
                "all ranks. Let the error end the run, or run these micro-steps again on all ranks, after zero_grad()"
            )
        holds = self._differentiable and not self._collects
        self._finish()
        if not holds:
            release_held(self)
        elif not self._held:
            _hold(self)

    def _join(self, error: str) -> str:
        """Issue the unshards and reductions of this backward that remain on any rank; collective. Return the errors of other ranks."""
        with span("end_backward"), outside_transforms():
            reducer, left, self._left = self.reducer, self._left, []
            if reducer is not None:
                for entry, index in left:  # [Note: hooks of a script]
                    reducer.collect(entry, index)
            SharedBackward.close_all()
            if self.schedule is not None:
                self.schedule.end_backward()
            return self.reducer.flush(error) if self.reducer is not None else ""

    def break_off(self, error: BaseException | None = None) -> None:
        """Discard the running backward, which failed with ``error`` (None if unknown). Collective.

        [Note: a backward that breaks off on one rank] The other ranks continue their backward, and wait for this rank in each of its
        collectives. So this rank takes part in the remaining collectives, with zeros, and the vote on late gradients informs all ranks of
        the error. After an interrupt or a broken network, or when it has voted, this rank takes part in nothing further.
        """
        goes_on = error is None or (isinstance(error, Exception) and not isinstance(error, CollectiveError))
        if self.begun and not self.mixed and goes_on and not (self.reducer is not None and self.reducer.voted):
            try:
                self._join(repr(error) if error is not None else "an error that the script has caught")
            except Exception as further:  # the error of the first rank is reported; the device may have no memory left, or be broken
                logger.warning("a backward failed, and this rank could not finish its collectives with the other ranks: %r", further)
        self.abort()

    def close(self) -> None:
        """Issue the unshards and reductions of this backward that remain; collective. See [Note: engines in one backward]."""
        if self.begun:
            if self.schedule is not None:
                self.schedule.finish_pass()
            if self.reducer is not None:
                self.reducer.send_all()

    def abort(self) -> None:
        """Discard a forward or backward that failed with an error; local."""
        try:
            if self.schedule is not None:
                self.schedule.reshard_all()
            release_held(self)
        finally:
            self._give_up()

    def _give_up(self) -> None:
        collected = self.reducer is not None and self._collects
        try:
            if collected:
                self.discard()
        finally:
            self._finish()  # an engine that stayed in ``SharedBackward`` would break the backwards of others
            if collected and (notify := self.on_broken_off() if self.on_broken_off is not None else None) is not None:
                notify()

    def discard(self) -> None:
        """Discard all gradients, also those in ``param.grad``, where a backward that is interrupted leaves one; local."""
        if self.reducer is not None:
            self.reducer.clear()
            for entry in self.reducer.gradients:
                for index, param in enumerate(entry.unit.params):
                    if param is not None and (id(entry.unit), index) in self._handles:  # otherwise another engine trains it
                        set_gradient(param, None)

    def _finish(self) -> None:
        if self.begun and self._collects:
            self._parts.rest()
        elif self.begun:
            self._parts.show()  # a loss may follow
        self.begun = self.mixed = self._collects = self._looked = self._differentiable = False
        SharedBackward.leave(self)
        self._stack.clear()
        self._left = []
        self.outputs.clear()
        for block in self._blocks:
            block.reset()


def _hold(phase: BackwardPhase) -> None:
    """Unshard all blocks and keep them unsharded; collective.

    [Note: derivatives of derivatives] A backward with ``create_graph`` (a gradient penalty, a product with the Hessian) builds a graph
    that no hook watches, and whose backward reads parameters of any block. So all blocks stay unsharded from the end of this backward
    to the end of the next one without ``create_graph``, or to the next update. The memory of the buffers that the graph has saved is
    filled again with the same values. Transforms of torch.func build such graphs wherever gradients are on around them.
    """
    units = [unit for block in phase._blocks for unit in block.units if unit.reshards] if phase.schedule is not None else []
    with outside_transforms():
        phase._held = [(unit, unit.pin()) for unit in units]


def release_held(phase: BackwardPhase) -> None:
    """Let units that are held for the derivative of a derivative be resharded; local."""
    while phase._held:
        unit, was_whole = phase._held.pop()
        unit.unpin(reshard=not was_whole)


def _hook_of_parts(weak: ref[BackwardPhase]) -> Callable[[torch.Tensor], None]:
    """Return the hook for all outputs of modules inside blocks; [Note: hooks of autograd hold nothing]."""

    def fired(_grad: torch.Tensor) -> None:
        phase = weak()
        if phase is not None:
            phase._reached_part()

    run = outside_compile(fired)

    def hook(grad: torch.Tensor) -> None:
        phase = weak()
        if phase is not None and not phase.begun:
            run(grad)

    return hook


def begin_inside(phase: BackwardPhase, parts: int) -> None:
    """Prepare for ``parts`` nested backwards that accumulate gradients of parameters and are no part of the current graph."""
    if not phase._collects:
        phase._begin_collecting()
    if not phase.begun:
        phase._begin()
        call_after_backward(phase.end)
    if parts > 1 and phase.reducer is not None:
        phase.reducer.piecemeal = True


class SharedBackward:
    """Register of the engines that take part in one backward (the two halves of a GAN), in the order in which backward reaches them.

    [Note: engines in one backward] A rank that skips blocks of one engine would issue their unshards at the end of backward, after the
    unshards of the engine that comes next; the other ranks issue them before. So an engine is closed when backward reaches another engine,
    at the moment when the gradient of that engine's output is known: the same moment on every rank. At the end all engines are closed
    before any of them starts a vote.
    """

    _begun: ClassVar[list[BackwardPhase]] = []
    _reached: ClassVar[list[BackwardPhase]] = []

    @classmethod
    def begin(cls, engine: BackwardPhase) -> None:
        """Register ``engine`` in the running backward."""
        if engine not in cls._begun:
            cls._begun.append(engine)

    @classmethod
    def reach(cls, engine: BackwardPhase) -> None:
        """Note that backward has reached ``engine``'s module, and close the engines that it reached before; collective if there are any."""
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
        """Close all engines at the end of a backward: first the engines that it has reached, in that order, then all others; collective."""
        for engine in (*cls._reached, *(other for other in cls._begun if other not in cls._reached)):
            engine.close()

    @classmethod
    def leave(cls, engine: BackwardPhase) -> None:
        """Note that ``engine`` has ended its part; local."""
        for known in (cls._begun, cls._reached):
            if engine in known:
                known.remove(engine)
