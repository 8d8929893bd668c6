"""Serve loops with Lightning's Fabric as its other strategies do: several models, clipping, accumulation, schedules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_zero.core.step.clipping import clip_waiting
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.deepspeed.optimizer import DeepSpeedOptimizer
from hf_zero.errors import StateError


def step(function: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``_FabricOptimizer.step``: step the engine that ``optimizer`` belongs to.

    With DeepSpeed Lightning steps the engine of the last backward, or of the last ``setup``. With several models that is another one if a
    loop runs all backwards before it steps: this model's gradients were left to its next update, and the other one stepped twice.
    """
    held, strategy = optimizer.optimizer, optimizer._strategy
    if isinstance(held, DeepSpeedOptimizer) and isinstance(held.engine, ConfiguredEngine) and hasattr(strategy, "_deepspeed_engine"):
        strategy._deepspeed_engine = held.engine
    return function(optimizer, *args, **kwargs)


def clip(engine: Any, limit: float, norm_type: float | None, finite: bool = False) -> torch.Tensor:
    """Clip all gradients of ``engine`` that wait for ``step``; collective.

    Args:
        engine: The engine.
        limit: Largest norm, or largest absolute value.
        norm_type: Order of the norm; None clips by value.
        finite: Whether a norm that is not finite is an error.

    Returns:
        The norm before, 0-dim; 0 if no gradients wait, as in plain PyTorch.

    Raises:
        RuntimeError: The norm is not finite, as in ``torch.nn.utils.clip_grad_norm_(error_if_nonfinite=True)``.
    """
    norm = clip_waiting(lambda: engine, None, float(limit), norm_type)
    if norm is None:
        return torch.zeros(())
    if finite and not torch.isfinite(norm):
        raise RuntimeError(
            f"clip_gradients(error_if_nonfinite=True): the norm of the gradients is {float(norm)}; call zero_grad() to drop them"
        )
    return norm


class BackwardSyncControl:
    """Control of Lightning's strategies for ``fabric.no_backward_sync(model)``; the engine's ``no_sync``."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        """Return a context whose backwards do not complete an optimizer step; one without effect if not ``enabled``."""
        if not enabled or not isinstance(module, ConfiguredEngine) or module.stepper is None:
            return nullcontext()
        return module.no_sync()


@dataclass
class _Steps:
    """How a scheduler of ``fabric.setup`` has been stepped: number of the engine's steps, and whether the script steps it."""

    by_engine: int = 0
    by_script: bool = False


_steps: WeakKeyDictionary[Any, _Steps] = WeakKeyDictionary()  # not in the scheduler, whose ``state_dict`` contains all its attributes


def share_schedule(scheduler: Any, engine_steps: Callable[[], bool]) -> None:
    """Let either the engine or the script step ``scheduler``, which both know.

    [Note: a scheduler of fabric.setup] With DeepSpeed the engine steps it at each update, and loops written for DeepSpeed do not step it.
    With all other strategies the script steps it. Where both did, the schedule ran at twice its speed. So the engine steps it until the
    script does; the script's first call after the first update is the engine's step of that update.

    Args:
        scheduler: The scheduler.
        engine_steps: Returns whether a ``step`` of the engine is running.

    Raises:
        StateError: (from ``step``) A script steps it for the first time after several updates: per epoch, for example.
    """
    if scheduler in _steps:
        return
    kind: Any = type(scheduler)
    steps = _steps[scheduler] = _Steps()

    def step_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if engine_steps():
            if not steps.by_script:
                steps.by_engine += 1
                kind.step(self, *args, **kwargs)
            return
        first, steps.by_script = not steps.by_script, True
        if first and steps.by_engine > 1:
            raise StateError(
                f"scheduler.step() was called after {steps.by_engine} updates, but the scheduler was given to fabric.setup(scheduler=...), "
                "and with DeepSpeed the engine has stepped it at each of them. To step it yourself, once per epoch for example, call "
                "fabric.setup(model, optimizer) without the scheduler; otherwise remove the call"
            )
        if not first or not steps.by_engine:
            kind.step(self, *args, **kwargs)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step_once, "__module__": kind.__module__})
