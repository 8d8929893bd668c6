"""Which backward of a loop over accelerate completes an optimizer step, and when that step is taken.

[Note: when accelerate steps] Under DeepSpeed accelerate's ``backward`` takes the optimizer step itself, and the script's
``optimizer.step()`` does nothing. That is what the script means as long as accelerate knows which backward is the last: inside
``accumulate()``, where Trainer says it, or where an optimizer step has one micro-step. A loop that accumulates without saying so
(several backwards, then ``optimizer.step()``, as in accelerate's guide for samples of variable size) means the step where it says it:
there the step waits for ``optimizer.step()``, and ``zero_grad()`` forgets gradients, as without DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hf_zero.core.engine import Engine as CoreEngine
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.deepspeed.engine import Engine
from hf_zero.errors import StateError

_SAID = "_hf_zero_said"  # of accelerate's GradientState: somebody has said whether the gradients are complete, since the last step
_MOST = 4  # backwards for each micro-step of an optimizer step, before a loop that never steps its optimizer is an error


@dataclass(eq=False)
class _Loop:
    """What a loop has done with one optimizer since its last ``optimizer.step()``.

    Attributes:
        waiting: Backwards whose update waits for ``optimizer.step()``.
        updates: Updates that backwards have made.
        steps: Whether the loop has ever called ``optimizer.step()``.
    """

    waiting: int = 0
    updates: int = 0
    steps: bool = False


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
    """
    engine = wrapper.engine
    if not isinstance(engine, Engine) or not isinstance(engine.optimizer, ShardedOptimizer):
        return method(wrapper, loss, *args, **kwargs)
    loop = _loops.setdefault(engine.optimizer, _Loop())
    completes = args[0] if args else kwargs.get("sync_gradients", True)
    said = getattr(_gradient_state(), _SAID, False) or not completes
    if said or (engine.accumulation.steps == 1 and not engine.accumulation.in_no_sync):
        before = engine.progress.global_steps
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
    if loop is not None and loop.waiting:
        loop.waiting = 0
        wrapper.optimizer.zero_grad()


def get_global_grad_norm(method: Callable[..., Any], wrapper: Any) -> Any:
    """``DeepSpeedEngineWrapper.get_global_grad_norm``: of the gradients whose update waits, if one does; collective then."""
    loop = _loops.get(wrapper.engine.optimizer) if isinstance(wrapper.engine, Engine) and wrapper.engine.optimizer is not None else None
    if loop is None or not loop.waiting:
        return method(wrapper)
    return wrapper.engine.stepper.measure().item()


def _loop_of(wrapper: Any) -> _Loop | None:
    return _loops.get(wrapper.optimizer) if isinstance(wrapper.optimizer, ShardedOptimizer) else None


def _gradient_state() -> Any:
    from accelerate.state import GradientState

    return GradientState()
