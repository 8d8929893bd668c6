"""Decide which backward of a loop over accelerate completes an optimizer step, and when that step is taken.

[Note: when accelerate steps] With DeepSpeed, accelerate's ``backward`` takes the optimizer step itself, and the script's
``optimizer.step()`` does nothing. All that a script does between the two would then have no effect on this update: a clipping norm, a
learning rate, gradients that it edits, weights that it reads before the update, a ``zero_grad()`` that drops a bad step. So the update
waits for ``optimizer.step()``, and ``zero_grad()`` drops the gradients, as without DeepSpeed. A loop may accumulate without announcing it
(several backwards, then ``optimizer.step()``, as in accelerate's guide for samples of variable size).

[Note: loops that never step] Scripts that know DeepSpeed may leave ``optimizer.step()`` out. The first update of each engine waits for it
too; if the loop goes on to its next forward, or saves, without that call, the update is made there, and from then on ``backward`` updates.

[Note: backwards that accelerate does not make] ``loss.backward()`` and ``engine.backward(loss)`` train too, at the next
``optimizer.step()``. As under DDP, where accelerate divides the losses that it is given and no others, the first divides nothing by
``gradient_accumulation_steps``; the second is DeepSpeed's method and divides.

[Note: several models of one Accelerator] accelerate passes every loss to the engine that was prepared first. If there are several, the loss
runs its own backward, in which each engine that it reaches collects its gradients; each optimizer's ``step()`` updates its engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from hf_zero.core.engine import Engine as CoreEngine
from hf_zero.core.optimizer.segments import is_fresh
from hf_zero.core.optimizer.sharded import REPLACES, ShardedOptimizer
from hf_zero.deepspeed.engine import Engine
from hf_zero.deepspeed.requests import set_gradient_clipping, set_train_batch_size
from hf_zero.deepspeed.served.ops import DeepSpeedCPUAdam, require_adam
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.integrations import script_values
from hf_zero.observe import warn_once

_SAID = "_hf_zero_said"  # attribute of accelerate's GradientState: whether a caller has announced a boundary since the last step
_MOST = 4  # backwards per micro-step of an optimizer step; after more without optimizer.step() an error is raised


@dataclass(eq=False)
class Loop:
    """State of a training loop with one optimizer since its last ``optimizer.step()``.

    Attributes:
        waiting: Number of backwards whose update waits for ``optimizer.step()``.
        updates: Number of updates that backwards have made.
        steps: Whether the loop has ever called ``optimizer.step()``.
        clips: Whether the loop has ever called ``clip_grad_norm_``.
        clipped: Norm to which the script has clipped the gradients whose update waits; None if it has not.
        clipped_at: Number of micro-steps that the engine had begun at that time.
        accumulates: ``accelerator.gradient_accumulation_steps`` at the last backward; None before the second one.
        dropped: Number of ``zero_grad()`` that have dropped waiting gradients before the first ``optimizer.step()``.
        begun: Whether a backward has completed an optimizer step.
        at_forward: Handle of the hook that makes the first update at the next forward, while that update waits; otherwise None.
    """

    waiting: int = 0
    updates: int = 0
    steps: bool = False
    clips: bool = False
    clipped: float | None = None
    clipped_at: int = 0
    dropped: int = 0
    accumulates: int | None = None
    begun: bool = False
    at_forward: RemovableHandle | None = None

    def know(self) -> None:
        """Remove the hook of the first update, because the loop is known to step or not to."""
        if self.at_forward is not None:
            self.at_forward.remove()
            self.at_forward = None

    def clipped_to(self, engine: Engine) -> float:
        """Return the norm to which the script has clipped the gradients whose update waits; infinity if it has not."""
        return self.clipped if self.clipped is not None and self.clipped_at == engine.runtime.micro_steps else math.inf

    def clip(self, engine: Engine, max_norm: float) -> None:
        """Let the engine clip the waiting update at ``max_norm``, or at the smaller number of an earlier call; infinity does not clip."""
        self.clipped, self.clipped_at = min(max_norm, self.clipped_to(engine)), engine.runtime.micro_steps
        set_gradient_clipping(engine, 0.0 if math.isinf(self.clipped) else self.clipped)

    def end_clipping(self, engine: Engine) -> None:
        """Clip no more, once the update that the script has clipped is made or dropped: its next ``clip_grad_norm_`` clips the next one."""
        if self.clipped is not None:
            self.clipped = None
            set_gradient_clipping(engine, 0.0)


LOOPS: WeakKeyDictionary[ShardedOptimizer, Loop] = WeakKeyDictionary()


def no_sync(method: Callable[..., AbstractContextManager[None]], accelerator: Any, model: Any) -> AbstractContextManager[None]:
    """Replace ``Accelerator.no_sync``: backwards inside do not complete an optimizer step, at every stage.

    accelerate does nothing for engines that shard gradients, because ``no_sync`` saves no traffic there. But the backwards inside must not
    update there either.
    """
    return CoreEngine.no_sync(model) if isinstance(model, Engine) else method(accelerator, model)


def set_sync_gradients(method: Callable[..., None], state: Any, sync_gradients: bool) -> None:
    """Replace ``GradientState._set_sync_gradients``: record that ``accumulate()`` or a library's loop announces the last backward."""
    setattr(state, _SAID, True)
    method(state, sync_gradients)


def backward(method: Callable[..., None], wrapper: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedEngineWrapper.backward``: leave the update to ``optimizer.step()`` ([Note: when accelerate steps]).

    Raises:
        StateError: Many updates wait, and the loop never calls ``optimizer.step()``; or the model was prepared without an optimizer.
        ConfigError: The loader's batch size differs from the configuration's.
    """
    engine = wrapper.engine
    if isinstance(engine, Engine) and engine.stepper is None and not engine.destroyed:
        raise StateError(
            "accelerator.backward(): the model was prepared without an optimizer, so nothing would train it. An engine gets model and "
            "optimizer together, and accelerator.prepare(optimizer) in a call of its own does not reach it: write model, optimizer = "
            "accelerator.prepare(model, optimizer), with the loaders and the scheduler in the same call"
        )
    if not isinstance(engine, Engine) or not isinstance(engine.optimizer, ShardedOptimizer):
        return method(wrapper, loss, *args, **kwargs)
    loop = begun(engine)
    counts = not args and "sync_gradients" not in kwargs  # accelerate before 1.7 lets the engine count micro-steps
    completes = _gradient_state().sync_gradients if counts else args[0] if args else kwargs["sync_gradients"]
    if not completes:  # the default is True, so the script has set `accelerator.sync_gradients`; it says True for the last backward
        setattr(_gradient_state(), _SAID, True)
    said = getattr(_gradient_state(), _SAID, False)
    count = engine.accumulation
    announced = said or (count.steps == 1 and not count.in_no_sync)
    waits = loop.steps or not loop.begun or loop.at_forward is not None
    if announced and not (waits and completes and count.managed and not count.in_no_sync):
        before = engine.progress.global_steps
        if counts and count.managed:
            engine.set_gradient_accumulation_boundary(completes)
        method(wrapper, loss, *args, **kwargs)
        if engine.progress.global_steps > before:  # the update used the waiting gradients too
            loop.updates, loop.waiting = loop.updates + 1, 0
        return None
    _wait(loop, engine)
    kwargs.pop("sync_gradients", None)
    engine.set_gradient_accumulation_boundary(True)  # inside a no_sync the engine ignores it
    engine.backward(loss, **kwargs)
    if announced:
        _announce(loop, engine, counts)
    return None


def begun(engine: Engine) -> Loop:
    """Return the state of the loop of ``engine``, which has a loader of the configured batch size.

    Raises:
        ConfigError: The loader's batch size differs from the configuration's.
    """
    assert isinstance(engine.optimizer, ShardedOptimizer)
    if engine.optimizer not in LOOPS:
        script_values.require_own_batch(engine)
        if engine.stepper is not None:
            engine.stepper.keeps = True  # zero_grad() follows each step, and scripts read gradients before it
    return LOOPS.setdefault(engine.optimizer, Loop())


def _wait(loop: Loop, engine: Engine, steps: bool = False) -> None:
    """Count a backward whose update waits for ``optimizer.step()``; ``steps``: the script is known to call this method.

    Raises:
        StateError: Many updates wait, and the loop never calls ``optimizer.step()``.
    """
    loop.waiting += 1
    if not (steps or loop.steps) and loop.waiting > _MOST * engine.accumulation.steps and not engine.accumulation.in_no_sync:
        raise StateError(
            f"accelerator.backward() was called {loop.waiting} times and optimizer.step() never, outside of accelerator.accumulate(), and "
            f"gradient_accumulation_steps is {engine.accumulation.steps}: no update was made. Call optimizer.step() where the weights are "
            "to be updated, or put each micro-step inside `with accelerator.accumulate(model):`"
        )


def _announce(loop: Loop, engine: Engine, counts: bool) -> None:
    """Show the norm after a backward that completes an optimizer step; the first time, take the step at the next forward at the latest."""
    if counts or not loop.clips:  # scripts of DeepSpeed, and Trainer of that time, read the norm from the engine before optimizer.step()
        engine.progress.last_norm = engine.stepper.measure()  # type: ignore[union-attr]  # it has an optimizer
    if loop.begun:
        return
    loop.begun = True

    def at_forward(*_: Any) -> None:
        make_first(engine)

    loop.at_forward = engine.register_forward_pre_hook(at_forward)


def make_first(engine: Any) -> bool:
    """Make the first update of a loop that has gone on without ``optimizer.step()``; return whether there was one. Collective then."""
    loop = LOOPS.get(engine.optimizer) if isinstance(engine, Engine) and isinstance(engine.optimizer, ShardedOptimizer) else None
    if loop is not None and loop.at_forward is not None and loop.waiting:  # otherwise zero_grad() has dropped it
        loop.know()
        loop.waiting, loop.updates = 0, loop.updates + 1
        engine.step()
        return True
    return False


def backward_of_several(method: Callable[..., None], accelerator: Any, loss: Any, **kwargs: Any) -> None:
    """Replace ``Accelerator.backward``: with several engines, let each that the loss reaches collect its gradients.

    See [Note: several models of one Accelerator].

    Raises:
        StateError: Many updates wait, and the loop never calls ``optimizer.step()``; or no model was prepared.
        ConfigError: The loader's batch size differs from the configuration's.
    """
    engines = trained_by(accelerator)
    first = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if first is None and getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        raise StateError(
            "accelerator.backward(): no model has been prepared. Write model, optimizer = accelerator.prepare(model, optimizer) before it"
        )
    if len(engines) == 1 and first is not None and isinstance(first.engine, Engine) and not first.engine.runtime.attached:
        first.engine = engines[0]  # the model was prepared again, with another optimizer
    for engine in engines:
        _follow_accumulation(engine, accelerator.gradient_accumulation_steps)
    if len(engines) < 2:
        return method(accelerator, loss, **kwargs)
    loops, completes = [begun(engine) for engine in engines], accelerator.sync_gradients
    for engine, loop in zip(engines, loops, strict=True):
        loop.begun = True
        engine.set_gradient_accumulation_boundary(completes)
    for name in ("learning_rate", "scale_wrt_gas"):
        kwargs.pop(name, None)
    if any(engine.optimizer.needs_scaler() for engine in engines):
        engines[0].backward(loss, **kwargs)  # multiplies the loss by its scale, which the others exchange for theirs
    else:
        _backward_divided(engines, loss, **kwargs)
    for engine, loop in zip(engines, loops, strict=True):
        if engine.accumulation.awaits_update:  # a critic may step several times before its generator steps for the first time
            _wait(loop, engine, any(other.steps for other in loops))
    return None


def _backward_divided(engines: Sequence[Engine], loss: Any, **kwargs: Any) -> None:
    """Run the backward of ``loss``, which each engine divides by its ``gradient_accumulation_steps``."""
    for engine in engines:
        engine.accumulation.plain = False
    try:
        loss.backward(**kwargs)
    finally:
        for engine in engines:
            engine.accumulation.plain = True


def _follow_accumulation(engine: Engine, steps: int) -> None:
    """Use the number of micro-steps that a script has set in ``accelerator.gradient_accumulation_steps`` since the last backward."""
    loop = LOOPS.get(engine.optimizer)  # type: ignore[arg-type]  # it has an optimizer
    if loop is None:
        return
    before, loop.accumulates = loop.accumulates, steps
    if before not in (None, steps) and engine.accumulation.managed:
        set_train_batch_size(engine, engine.train_batch_size() // engine.gradient_accumulation_steps() * steps)


def prepare(method: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Accelerator._prepare_deepspeed``, which keeps the last of several optimizers and returns it in the place of all, and
    returns a scheduler that is given without a model as it is: ``save_state`` would leave it out, and it would not step as many times as a
    prepared one. It leaves ``GradScalerKwargs`` out too.

    Raises:
        UnsupportedError: Several optimizers were given.
    """
    from accelerate.utils import DummyOptim

    given = {id(value): type(value).__name__ for value in args if isinstance(value, (torch.optim.Optimizer, DummyOptim))}
    if len(given) > 1:
        raise UnsupportedError(
            f"accelerator.prepare() was given {len(given)} optimizers ({', '.join(given.values())}), but a model has one engine with one "
            "optimizer: the others would train nothing. Use one optimizer with a param group for each part of the model, or prepare each "
            "model with its own optimizer in a call of its own"
        )
    script_values.use_scaler(accelerator)
    found = method(accelerator, *args, **kwargs)
    for engine in found:
        if isinstance(engine, Engine):
            engine.accumulation.plain = True
    return tuple(_prepared_alone(accelerator, one) if isinstance(one, torch.optim.lr_scheduler.LRScheduler) else one for one in found)


def prepare_model(method: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Accelerator.prepare_model``, which makes no engine, and no DDP where a DeepSpeed plugin is there.

    Raises:
        UnsupportedError: The model is to be trained: each rank would train by itself.
    """
    evaluates = kwargs.get("evaluation_mode", args[1] if len(args) > 1 else False)
    by_itself = getattr(accelerator.state, "deepspeed_plugin", None) is not None and not evaluates and not isinstance(model, Engine)
    if by_itself and any(param.requires_grad for param in model.parameters()):
        raise UnsupportedError(
            "accelerator.prepare_model(model): with a DeepSpeed plugin it makes no engine, so each rank would train by itself. Write "
            "model, optimizer = accelerator.prepare(model, optimizer), or prepare_model(model, evaluation_mode=True) for a model that "
            "is not trained"
        )
    return method(accelerator, model, *args, **kwargs)


def _prepared_alone(accelerator: Any, scheduler: Any) -> Any:
    """Return the prepared ``scheduler`` of a call without a model."""
    if accelerator.step_scheduler_with_optimizer and not accelerator.split_batches and accelerator.num_processes > 1:
        warn_once(
            f"accelerator.prepare(scheduler) in a call of its own: each step() of it counts as {accelerator.num_processes}, one per "
            "process, as for every prepared scheduler. With DeepSpeed it counted as one, and save_state() left it out. For one step per "
            "update write Accelerator(step_scheduler_with_optimizer=False) and step it once per update, or do not prepare it"
        )
    return accelerator.prepare_scheduler(scheduler)


def trained_by(accelerator: Any) -> list[Engine]:
    """Return the engines that ``accelerator`` has prepared with an optimizer and that still train."""
    models = getattr(accelerator, "_models", ())
    found = [model for model in models if isinstance(model, Engine) and isinstance(model.optimizer, ShardedOptimizer)]
    return [engine for engine in found if engine.runtime.attached]


def step(method: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedOptimizerWrapper.step``: make the update that waits for this call, if there is one.

    Raises:
        StateError: Several backwards since the last call have made an update each, although the loop steps once.
        ConfigError: The loader's batch size differs from the configuration's.
    """
    method(wrapper, *args, **kwargs)
    state = _gradient_state()
    completes = state.sync_gradients
    setattr(state, _SAID, False)
    engine = _engine_of_optimizer(wrapper)
    if engine is None or not (engine.optimizer in LOOPS or engine.accumulation.awaits_step):
        return
    loop = begun(engine)
    loop.know()
    engine.accumulation.several = True
    updates, loop.updates, loop.steps = loop.updates, 0, True
    if updates > 1 or (updates and completes and engine.accumulation.awaits_step):
        raise StateError(
            f"backward was called several times before optimizer.step(), and accelerator.backward() has made {updates} update(s): with "
            "DeepSpeed accelerate updates in every backward() that it considers the last of an optimizer step. To accumulate gradients use "
            "Accelerator(gradient_accumulation_steps=N), do not divide the loss yourself, and put each micro-step inside `with "
            "accelerator.accumulate(model):`. If a micro-step has several losses, add them and call backward() once"
        )
    if completes and (loop.waiting or _complete(engine)):
        loop.waiting = 0
        engine.step()  # and not the optimizer's, which leaves the schedule to the script
        loop.end_clipping(engine)


def zero_grad(method: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedOptimizerWrapper.zero_grad``: drop the gradients whose update waits for ``optimizer.step()``.

    Those of ``engine.backward`` wait if ``accumulate()`` announces the last micro-step, or once their number is reached: collective then.

    Raises:
        StateError: Gradients were dropped several times, and the loop never calls ``optimizer.step()``.
    """
    method(wrapper, *args, **kwargs)
    engine, state = _engine_of_optimizer(wrapper), _gradient_state()
    if engine is None or not state.sync_gradients:
        return
    loop = LOOPS.get(engine.optimizer)
    if loop is None or not loop.waiting:
        count = engine.accumulation
        ends = getattr(state, _SAID, False) or count.of_step >= count.steps  # else the script may clear after each of its backwards
        if count.awaits_update or (ends and _complete(engine)):
            engine.zero_grad()
            if loop is not None:
                loop.end_clipping(engine)
        else:
            engine.runtime.begin_clearing()
        return
    loop.waiting, loop.dropped = 0, loop.dropped + (not loop.steps)
    if loop.dropped > _MOST:
        raise StateError(
            f"optimizer.zero_grad() has dropped the gradients of {loop.dropped} updates, and optimizer.step() was never called: nothing is "
            "trained. Call optimizer.step() before optimizer.zero_grad()"
        )
    wrapper.optimizer.zero_grad()
    loop.end_clipping(engine)


def _engine_of_optimizer(wrapper: Any) -> Engine | None:
    """Return the engine that accelerate's ``wrapper`` of an optimizer steps; None if there is none, or none any more."""
    engine = getattr(wrapper.optimizer, "engine", None)
    return engine if isinstance(engine, Engine) and isinstance(engine.optimizer, ShardedOptimizer) else None


def update_waits(engine: Engine) -> bool:
    """Return whether an update of ``engine`` waits for ``optimizer.step()``; collective if the script's own backwards come before it.

    ``engine.backward`` does not know the last one of an update. Until a loop is known to call ``optimizer.step()``, they are counted.
    """
    loop, count = LOOPS.get(engine.optimizer) if engine.optimizer is not None else None, engine.accumulation
    if loop is not None and loop.waiting:
        return True
    complete = (loop is not None and loop.steps) or count.of_step >= count.steps
    return bool(_gradient_state().sync_gradients and (count.awaits_update or (complete and _complete(engine))))


def _complete(engine: Engine) -> bool:
    """Let the backwards so far complete an optimizer step, which those of ``engine.backward`` do by their number only; collective then.

    Returns:
        Whether there is a step to take.
    """
    count = engine.accumulation
    if count.awaits_step and not count.awaits_update and not count.in_no_sync and count.completed():
        assert engine.stepper is not None
        engine.stepper.prepare(boundary=True)
        engine.stepper.reducer.complete(engine.stage_policy.allows_deferral)
    return count.awaits_update


def _gradient_state() -> Any:
    from accelerate.state import GradientState

    return GradientState()


def map_optimizer(method: Callable[..., Any], optimizer: Any) -> Any:
    """Replace ``accelerate.accelerator.map_pytorch_optim_to_deepspeed``: remember whose place the new optimizer takes; local.

    A state that the script has loaded is the new optimizer's, which accelerate would begin without. A scheduler of the script keeps the old
    optimizer. torch's schedulers warn that they were stepped before it unless it is marked as stepped too.

    Raises:
        UnsupportedError: accelerate would put Adam in the place of an optimizer that needs whole tensors, whose update is another one.
    """
    found = method(optimizer)
    if isinstance(found, DeepSpeedCPUAdam):
        require_adam(optimizer)
    if found is not optimizer:
        setattr(found, REPLACES, optimizer)
        if not is_fresh(optimizer):
            found.state.update(optimizer.state)
    return found
