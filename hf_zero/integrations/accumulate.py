"""Which backward of a loop over accelerate completes an optimizer step, and when that step is taken.

[Note: when accelerate steps] Under DeepSpeed accelerate's ``backward`` takes the optimizer step itself, and the script's
``optimizer.step()`` does nothing. That is what the script means as long as accelerate knows which backward is the last: inside
``accumulate()``, where Trainer says it, or where an optimizer step has one micro-step. A loop that accumulates without saying so
(several backwards, then ``optimizer.step()``, as in accelerate's guide for samples of variable size) means the step where it says it:
there the step waits for ``optimizer.step()``, and ``zero_grad()`` forgets gradients, as without DeepSpeed.

[Note: the first update waits] ``clip_grad_norm_`` stands between ``backward`` and ``optimizer.step()``, so the norm that a script clips to
is known when accelerate has updated. The first update of each engine therefore waits for ``optimizer.step()``; a loop that calls none gets
it at its next forward, ``zero_grad()`` or backward. From then on the norm is known, and updates are made in ``backward``.
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

_SAID = "_hf_zero_said"  # of accelerate's GradientState: somebody has said whether the gradients are complete, since the last step
_MOST = 4  # backwards for each micro-step of an optimizer step, before a loop that never steps its optimizer is an error


@dataclass(eq=False)
class _Loop:
    """What a loop has done with one optimizer since its last ``optimizer.step()``.

    Attributes:
        waiting: Backwards whose update waits for ``optimizer.step()``.
        updates: Updates that backwards have made.
        steps: Whether the loop has ever called ``optimizer.step()``.
        begun: There was a backward that completes an optimizer step, see [Note: the first update waits].
        first: Makes the first update while that waits, and ends what waits for a forward.
    """

    waiting: int = 0
    updates: int = 0
    steps: bool = False
    begun: bool = False
    first: Callable[[], None] | None = None

    def make_first(self) -> None:
        """Makes the first update if it waits; collective then."""
        if self.first is not None:
            make, self.first = self.first, None
            make()
            self.updates, self.waiting = self.updates + 1, 0


_loops: WeakKeyDictionary[ShardedOptimizer, _Loop] = WeakKeyDictionary()


def no_sync(method: Callable[..., AbstractContextManager[None]], accelerator: Any, model: Any) -> AbstractContextManager[None]:
    """``Accelerator.no_sync``: backwards inside are not the last of an optimizer step, at every stage.

    accelerate leaves it out of engines that shard gradients, where it saves no traffic; what it says of the step counts there too.
    """
    return CoreEngine.no_sync(model) if isinstance(model, Engine) else method(accelerator, model)


def set_sync_gradients(method: Callable[..., None], state: Any, sync_gradients: bool) -> None:
    """``GradientState._set_sync_gradients``: takes note that ``accumulate()`` or a library's loop says which backward is the last."""
    setattr(state, _SAID, True)
    method(state, sync_gradients)


def backward(method: Callable[..., None], wrapper: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    """``DeepSpeedEngineWrapper.backward``, see [Note: when accelerate steps].

    Raises:
        StateError: Many updates wait for an ``optimizer.step()`` that never comes.
        ConfigError: Batches of the loader have another size than the configuration says.
    """
    engine = wrapper.engine
    if not isinstance(engine, Engine) or not isinstance(engine.optimizer, ShardedOptimizer):
        return method(wrapper, loss, *args, **kwargs)
    if engine.optimizer not in _loops:
        script_values.require_own_batch(engine)
    loop = _loops.setdefault(engine.optimizer, _Loop())
    loop.make_first()
    completes = args[0] if args else kwargs.get("sync_gradients", True)
    said = getattr(_gradient_state(), _SAID, False) or not completes
    if said or (engine.accumulation.steps == 1 and not engine.accumulation.in_no_sync):
        before = engine.progress.global_steps
        if not loop.begun and completes and engine.accumulation.managed and not engine.accumulation.in_no_sync:
            _begin(loop, engine, loss, kwargs)
            return None
        method(wrapper, loss, *args, **kwargs)
        if engine.progress.global_steps > before:  # with the gradients that waited, if any
            loop.updates, loop.waiting = loop.updates + 1, 0
        return None
    loop.waiting += 1
    if not loop.steps and loop.waiting > _MOST * engine.accumulation.steps and not engine.accumulation.in_no_sync:
        raise StateError(
            f"accelerator.backward() was called {loop.waiting} times and optimizer.step() never, outside of accelerator.accumulate(), and "
            f"gradient_accumulation_steps is {engine.accumulation.steps}: no update was made. Call optimizer.step() where an update is "
            "meant, or put each micro-step inside `with accelerator.accumulate(model):`"
        )
    kwargs.pop("sync_gradients", None)
    engine.set_gradient_accumulation_boundary(True)  # of those inside a no_sync none is
    engine.backward(loss, **kwargs)
    return None


def _begin(loop: _Loop, engine: Engine, loss: Any, kwargs: dict[str, Any]) -> None:
    """The backward of the first update, which waits; see [Note: the first update waits]."""
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
    """``DeepSpeedOptimizerWrapper.step``: takes the step that waits for it, if one does.

    Raises:
        StateError: Several backwards have made an update each, where the loop means one.
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
            "accelerate updates in every backward() that it takes for the last of an optimizer step. For gradient accumulation write "
            "Accelerator(gradient_accumulation_steps=N), leave your own division of the loss out, and put each micro-step inside `with "
            "accelerator.accumulate(model):`; add up several losses of one micro-step and call backward() once"
        )
    if loop.waiting and completes:
        loop.waiting = 0
        wrapper.optimizer.step()


def zero_grad(method: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """``DeepSpeedOptimizerWrapper.zero_grad``: forgets gradients whose update waits for ``optimizer.step()``."""
    method(wrapper, *args, **kwargs)
    loop = _loop_of(wrapper)
    if loop is not None:
        loop.make_first()
    if loop is not None and loop.waiting:
        loop.waiting = 0
        wrapper.optimizer.zero_grad()


def get_global_grad_norm(method: Callable[..., Any], wrapper: Any) -> Any:
    """``DeepSpeedEngineWrapper.get_global_grad_norm``: of the gradients whose update waits, if one does; collective then."""
    norm = _norm_of_waiting(wrapper.engine)
    return method(wrapper) if norm is None else norm


def clip_grad_norm_(method: Callable[..., Any], accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
    """``Accelerator.clip_grad_norm_``: the engine clips to ``max_norm``; see [Note: the script's value and the configuration's].

    Raises:
        ConfigError: The configuration has another number, or ``max_norm`` is none.
        UnsupportedError: The engine cannot clip so.
        StateError: Ranks give different numbers, or the number comes too late.
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
    """Return the norm of the gradients whose update waits, None where none does; collective in the first case."""
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
