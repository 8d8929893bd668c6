"""Decide which backward of a loop over accelerate completes an optimizer step, and when that step is taken.

[Note: when accelerate steps] With DeepSpeed, accelerate's ``backward`` takes the optimizer step itself, and the script's
``optimizer.step()`` does nothing. This is right as long as accelerate knows which backward is the last of an optimizer step: inside
``accumulate()``, under Trainer, which announces it, or if an optimizer step has one micro-step. A loop may also accumulate without
announcing it: several backwards, then ``optimizer.step()``, as in accelerate's guide for samples of variable size. For such a loop the
update waits for ``optimizer.step()``, and ``zero_grad()`` drops the gradients, as without DeepSpeed.

[Note: the first update waits] A script calls ``clip_grad_norm_`` between ``backward`` and ``optimizer.step()``, so its clipping norm would
be known only after accelerate has updated in ``backward``. The first update of each engine therefore waits for ``optimizer.step()``. If a
loop never calls it, the update is made at the next forward, ``zero_grad()`` or backward. From then on the norm is known, and ``backward``
updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hf_zero.core.engine import Engine as CoreEngine
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.deepspeed.engine import Engine
from hf_zero.errors import StateError
from hf_zero.integrations import script_values

_SAID = "_hf_zero_said"  # attribute of accelerate's GradientState: whether a caller has announced a boundary since the last step
_MOST = 4  # backwards per micro-step of an optimizer step; after more without optimizer.step() an error is raised


@dataclass(eq=False)
class _Loop:
    """State of a training loop with one optimizer since its last ``optimizer.step()``.

    Attributes:
        waiting: Number of backwards whose update waits for ``optimizer.step()``.
        updates: Number of updates that backwards have made.
        steps: Whether the loop has ever called ``optimizer.step()``.
        begun: Whether a backward has completed an optimizer step, see [Note: the first update waits].
        first: Function that makes the first update and removes the forward hook, while that update waits; otherwise None.
    """

    waiting: int = 0
    updates: int = 0
    steps: bool = False
    begun: bool = False
    first: Callable[[], None] | None = None

    def make_first(self) -> None:
        """Make the first update if it still waits, which is collective."""
        if self.first is not None:
            make, self.first = self.first, None
            make()
            self.updates, self.waiting = self.updates + 1, 0


_loops: WeakKeyDictionary[ShardedOptimizer, _Loop] = WeakKeyDictionary()


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
    """Replace ``DeepSpeedEngineWrapper.backward``: update now, or leave the update to a later call ([Note: when accelerate steps]).

    Raises:
        StateError: Many updates wait, and the loop never calls ``optimizer.step()``.
        ConfigError: The loader's batch size differs from the configuration's.
    """
    engine = wrapper.engine
    if not isinstance(engine, Engine) or not isinstance(engine.optimizer, ShardedOptimizer):
        return method(wrapper, loss, *args, **kwargs)
    if engine.optimizer not in _loops:
        script_values.require_own_batch(engine)
    loop = _loops.setdefault(engine.optimizer, _Loop())
    loop.make_first()
    counts = not args and "sync_gradients" not in kwargs  # accelerate before 1.7 lets the engine count micro-steps
    completes = _gradient_state().sync_gradients if counts else args[0] if args else kwargs["sync_gradients"]
    said = getattr(_gradient_state(), _SAID, False) or not completes
    if said or (engine.accumulation.steps == 1 and not engine.accumulation.in_no_sync):
        before = engine.progress.global_steps
        if not loop.begun and completes and engine.accumulation.managed and not engine.accumulation.in_no_sync:
            _begin(loop, engine, loss, kwargs)
            if counts:  # transformers of that time reads the norm before optimizer.step()
                engine.progress.last_norm = engine.stepper.measure()  # type: ignore[union-attr]  # it has an optimizer
            return None
        if counts and engine.accumulation.managed:
            engine.set_gradient_accumulation_boundary(completes)
        method(wrapper, loss, *args, **kwargs)
        if engine.progress.global_steps > before:  # the update used the waiting gradients too
            loop.updates, loop.waiting = loop.updates + 1, 0
        return None
    loop.waiting += 1
    if not loop.steps and loop.waiting > _MOST * engine.accumulation.steps and not engine.accumulation.in_no_sync:
        raise StateError(
            f"accelerator.backward() was called {loop.waiting} times and optimizer.step() never, outside of accelerator.accumulate(), and "
            f"gradient_accumulation_steps is {engine.accumulation.steps}: no update was made. Call optimizer.step() where the weights are "
            "to be updated, or put each micro-step inside `with accelerator.accumulate(model):`"
        )
    kwargs.pop("sync_gradients", None)
    engine.set_gradient_accumulation_boundary(True)  # inside a no_sync the engine ignores it
    engine.backward(loss, **kwargs)
    return None


def _begin(loop: _Loop, engine: Engine, loss: Any, kwargs: dict[str, Any]) -> None:
    """Run the backward of the first update and postpone the update ([Note: the first update waits])."""
    loop.begun = True
    kwargs.pop("sync_gradients", None)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss, **kwargs)
    forward = engine.register_forward_pre_hook(lambda *_: loop.make_first())

    def make() -> None:
        forward.remove()
        engine.step()

    loop.first = make


def step(method: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedOptimizerWrapper.step``: make the update that waits for this call, if there is one.

    Raises:
        StateError: Several backwards since the last call have made an update each, although the loop steps once.
    """
    method(wrapper, *args, **kwargs)
    state = _gradient_state()
    completes = state.sync_gradients
    setattr(state, _SAID, False)
    loop = _loop_of(wrapper)
    if loop is None:
        return
    loop.make_first()
    updates, loop.updates, loop.steps = loop.updates, 0, True
    if updates > 1:
        raise StateError(
            f"accelerator.backward() was called several times before optimizer.step() and has made {updates} updates: with DeepSpeed "
            "accelerate updates in every backward() that it considers the last of an optimizer step. For gradient accumulation use "
            "Accelerator(gradient_accumulation_steps=N), do not divide the loss yourself, and put each micro-step inside `with "
            "accelerator.accumulate(model):`. If a micro-step has several losses, add them and call backward() once"
        )
    if loop.waiting and completes:
        loop.waiting = 0
        wrapper.optimizer.step()


def zero_grad(method: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedOptimizerWrapper.zero_grad``: drop the gradients whose update waits for ``optimizer.step()``."""
    method(wrapper, *args, **kwargs)
    loop = _loop_of(wrapper)
    if loop is not None:
        loop.make_first()
    if loop is not None and loop.waiting:
        loop.waiting = 0
        wrapper.optimizer.zero_grad()


def get_global_grad_norm(method: Callable[..., Any], wrapper: Any) -> Any:
    """Replace ``DeepSpeedEngineWrapper.get_global_grad_norm``: return the norm of waiting gradients if there are any (collective)."""
    norm = _norm_of_waiting(wrapper.engine)
    return method(wrapper) if norm is None else norm


def clip_grad_norm_(method: Callable[..., Any], accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
    """Replace ``Accelerator.clip_grad_norm_``: let the engine clip to ``max_norm`` ([Note: the script's value and the configuration's]).

    Raises:
        ConfigError: The configuration has another norm, or ``max_norm`` is not a positive number.
        UnsupportedError: The engine cannot clip by this norm or these parameters.
        StateError: Ranks pass different arguments, or the update was already made with another norm.
    """
    engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    if not isinstance(engine, Engine) or not isinstance(engine.optimizer, ShardedOptimizer):
        return method(accelerator, parameters, max_norm, norm_type)
    loop = _loops.get(engine.optimizer)
    updated = loop is not None and loop.first is None and not loop.waiting
    script_values.clip(engine, accelerator.deepspeed_plugin, parameters, max_norm, norm_type, updated)
    norm = method(accelerator, parameters, max_norm, norm_type)
    if norm is None:  # before accelerate 1.8, which asks the engine
        norm = _norm_of_waiting(engine)
    return engine.get_global_grad_norm() if norm is None else norm


def _norm_of_waiting(engine: Any) -> float | None:
    """Return the norm of the gradients whose update waits, which is collective; None if no update waits."""
    loop = _loops.get(engine.optimizer) if isinstance(engine, Engine) and engine.optimizer is not None else None
    if loop is None or not (loop.waiting or loop.first is not None):
        return None
    norm = float(engine.stepper.measure())
    return math.inf if engine.stepper.settings.skips_overflow and not math.isfinite(norm) else norm


def _loop_of(wrapper: Any) -> _Loop | None:
    return _loops.get(wrapper.optimizer) if isinstance(wrapper.optimizer, ShardedOptimizer) else None


def _gradient_state() -> Any:
    from accelerate.state import GradientState

    return GradientState()
