"""Clip the gradients of loops over accelerate where the script calls ``accelerator.clip_grad_norm_`` or ``clip_grad_value_``.

[Note: clipping of one update] The engine clips in the pass in which it updates, so a call sets the engine's number. The number is the
script's unless the configuration has one ([Note: the script's value and the configuration's]); then it counts for the update that waits,
as in plain PyTorch: a later update without a call is not clipped. In loops that never call ``optimizer.step()`` the update has been made
before the call, so there the number stays. Before the first call the engine clips at its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.step.agreement import differing, fact, ranks_by_facts
from hf_zero.core.step.grad_norm import EPSILON
from hf_zero.deepspeed.engine import Engine
from hf_zero.deepspeed.requests import set_gradient_clipping
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.integrations.accumulate import LOOPS, Loop, begun, trained_by, update_waits
from hf_zero.integrations.script_values import CLIPPING, contradiction, written_clipping
from hf_zero.observe import log_rank0, warn_once

_numbers: WeakKeyDictionary[ShardedOptimizer, float] = WeakKeyDictionary()  # the max_norm of the last clip_grad_norm_


def get_global_grad_norm(method: Callable[..., Any], wrapper: Any) -> Any:
    """Replace ``DeepSpeedEngineWrapper.get_global_grad_norm``: return the norm of waiting gradients if there are any (collective)."""
    _norm_of_waiting(wrapper.engine)  # which the engine's method returns then
    return method(wrapper)


def clip_grad_norm_(method: Callable[..., Any], accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
    """Replace ``Accelerator.clip_grad_norm_``: let the engine clip to ``max_norm`` ([Note: clipping of one update]).

    Returns:
        The norm, as a 0-dim tensor like torch's; None if accelerate returns None (no step has been taken).

    Raises:
        ConfigError: The configuration has another norm, or ``max_norm`` is not a positive number.
        UnsupportedError: An engine cannot clip by this norm or these parameters.
        StateError: Ranks pass different arguments, or the update was already made with another norm.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    engines = _engines_with(accelerator, params)
    if len(engines) > 1:
        return _clip_jointly(accelerator, engines, params, float(max_norm), norm_type)
    engine = _engine_of(accelerator, params)
    if not isinstance(engine, Engine) or not isinstance(engine.optimizer, ShardedOptimizer):
        return method(accelerator, params, max_norm, norm_type)
    loop = begun(engine) if update_waits(engine) else LOOPS.get(engine.optimizer)
    earlier = math.inf if loop is None else loop.clipped_to(engine)
    if _check(engine, accelerator.deepspeed_plugin, params, float(max_norm), norm_type) is None:
        _set(engine, loop, float(max_norm))
    if loop is not None:
        loop.clips = True
    norm = _norm_of_waiting(engine)
    if norm is None:
        return engine.get_global_grad_norm()
    if engine.stepper.trained.untrained.among({id(param) for param in params}):  # type: ignore[union-attr]  # their gradients count
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    engine.stepper.note_clipping(engine.progress.last_norm)  # type: ignore[union-attr, arg-type]  # an update waits, and has been measured
    return engine.progress.last_norm.new_tensor(min(norm, earlier))  # type: ignore[union-attr]  # it has been measured


def clip_grad_value_(method: Callable[..., None], accelerator: Any, parameters: Any, clip_value: float) -> None:
    """Replace ``Accelerator.clip_grad_value_``, which refuses DeepSpeed: clip as ``torch.nn.utils.clip_grad_value_`` does; collective."""
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if isinstance(_engine_of(accelerator, params), Engine):
        torch.nn.utils.clip_grad_value_(params, clip_value)
    else:
        method(accelerator, params, clip_value)


def _engine_of(accelerator: Any, params: Sequence[torch.Tensor]) -> Any:
    """Return the engine that trains most of ``params``: the one that was prepared first, unless another one trains the first of them."""
    first = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    engines = trained_by(accelerator)
    if len(engines) < 2 or not params:
        return first
    return next((engine for engine in engines if any(param is params[0] for param in engine.module.parameters())), first)


def _engines_with(accelerator: Any, params: Sequence[torch.Tensor]) -> list[Engine]:
    """Return the engines that train some of ``params``."""
    engines = trained_by(accelerator)
    given = {id(param) for param in params} if len(engines) > 1 else set()
    return [engine for engine in engines if not given.isdisjoint(_trained_ids(engine))]


def _trained_ids(engine: Engine) -> set[int]:
    units = engine.optimizer.units  # type: ignore[union-attr]  # it trains
    return {id(param) for unit in units for param in unit.params if param is not None and param.requires_grad}


def _norm_of_waiting(engine: Any) -> float | None:
    """Return the norm of the gradients whose update waits, which is collective; None if no update waits."""
    if not isinstance(engine, Engine) or engine.stepper is None or not update_waits(engine):
        return None
    measured = engine.stepper.measure()
    norm = float(measured)
    if engine.stepper.settings.skips_overflow and not math.isfinite(norm):
        measured, norm = torch.full_like(measured, math.inf), math.inf
    engine.progress.last_norm = measured
    return norm


def _check(engine: Engine, plugin: Any, params: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> float | None:
    """Check the arguments of a script's ``clip_grad_norm_``. Collective at the first call.

    Args:
        engine: The engine, which clips in its step.
        plugin: accelerate's plugin with the engine's configuration.
        params: Parameters that the script passes.
        max_norm: Largest norm of the gradients; infinity only computes the norm.
        norm_type: Order of the norm.

    Returns:
        The norm that the configuration sets; None if it leaves the norm to the script.

    Raises:
        ConfigError: The configuration has another norm, or ``max_norm`` is not positive.
        UnsupportedError: ``norm_type`` is not 2, or ``params`` are not all trained parameters.
        StateError: Ranks pass different arguments.
    """
    optimizer = engine.optimizer
    assert optimizer is not None
    known, written = _numbers.get(optimizer), written_clipping(engine, plugin)
    if known == max_norm and norm_type == 2:
        return written
    given = {id(param) for param in params}
    trained = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    left_out = [name for name, param in trained if id(param) not in given]
    if known is None and engine.collectives.topology.data.world > 1:
        facts = [fact("max_norm", max_norm), fact("norm_type", norm_type), fact("number of parameters left out", len(left_out))]
        kinds = ranks_by_facts(facts, engine.collectives.data, "arguments of clip_grad_norm_")
        if len(kinds) > 1:
            raise StateError(f"clip_grad_norm_ was called with different arguments on different ranks: {'; '.join(differing(kinds))}")
    _require_norm(max_norm, norm_type)
    some = (
        f"clip_grad_norm_ was given {len(trained) - len(left_out)} of the {len(trained)} trained parameters (without "
        f"{', '.join(left_out[:3])}), but the engine clips by the norm of all of them"
    )
    if written is not None and max_norm not in (written, math.inf):
        raise ConfigError(contradiction(CLIPPING, written, "clip_grad_norm_(max_norm)", max_norm))
    if left_out and written is None:
        raise UnsupportedError(f"{some}. Pass model.parameters() of the prepared model")
    if left_out:
        warn_once(some)
    before = engine.gradient_clipping() if known is None else known
    if written is None and max_norm != before:
        log_rank0("clipping at %g, the argument of the script's clip_grad_norm_ (%g before)", max_norm, before or math.inf)
    _numbers[optimizer] = max_norm
    return written


def _require_norm(max_norm: float, norm_type: float) -> None:
    """Raise if the engine cannot clip by the norm of order ``norm_type``, or at ``max_norm``.

    Raises:
        ConfigError: ``max_norm`` is not positive.
        UnsupportedError: ``norm_type`` is not 2.
    """
    if norm_type != 2:
        raise UnsupportedError(f"clip_grad_norm_(norm_type={norm_type}) is not supported: the engine clips by the 2-norm. Remove norm_type")
    if not max_norm > 0:
        raise ConfigError(
            f"clip_grad_norm_ was given max_norm {max_norm:g}; a number above 0 is allowed. Remove the call if you want no clipping"
        )


def _set(engine: Engine, loop: Loop | None, max_norm: float) -> None:
    """Let the engine clip the waiting update at ``max_norm``, or all updates if the loop does not step.

    Raises:
        StateError: An update was already made with another norm, and ``max_norm`` would have changed it.
    """
    if loop is not None and update_waits(engine):
        loop.clip(engine, max_norm)
        return
    if loop is not None:
        if loop.steps:  # in the middle of an accumulation
            return
        before, norm = engine.gradient_clipping() or math.inf, engine.progress.last_norm
        if before != max_norm and norm is not None and min(before, max_norm) < float(norm) < math.inf:
            raise StateError(
                f"clip_grad_norm_ was called with {max_norm:g} after an update whose gradients, of norm {float(norm):g}, were clipped at "
                f'{before:g}: with DeepSpeed accelerate updates in backward(). Pass the same number in every step, or write "{CLIPPING}": '
                f"{max_norm:g} in the configuration"
            )
    set_gradient_clipping(engine, 0.0 if math.isinf(max_norm) else max_norm)


def _clip_jointly(accelerator: Any, engines: Sequence[Engine], params: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> Any:
    """Clip the waiting gradients of several engines by the norm of all of them, and return this norm before (0-dim); collective.

    Each engine clips at the part of ``max_norm`` that its own norm has in the joint one, so that all are multiplied by one factor.

    Raises:
        ConfigError: The configuration has a norm, which each engine clips by alone; or ``max_norm`` is not positive.
        UnsupportedError: Some engine cannot clip by this norm; or ``params`` are not all trained parameters of the engines, and no others.
    """
    _require_norm(max_norm, norm_type)
    wanted = set[int]().union(*map(_trained_ids, engines))
    given = {id(param) for param in params if param.requires_grad}
    if wanted != given or any(engine.stepper is None or engine.stepper.groups is not None for engine in engines):
        raise UnsupportedError(
            f"clip_grad_norm_ got {len(given)} parameters of {len(engines)} models with engines and perhaps of others, but these engines "
            f"clip together only exactly the {len(wanted)} parameters that they train. Clip each model in its own call"
        )
    written = [norm for engine in engines if (norm := written_clipping(engine, accelerator.deepspeed_plugin)) is not None]
    if written and max_norm != math.inf:
        raise ConfigError(
            f"{CLIPPING} is {written[0]:g} in the configuration, by which each engine clips its own gradients, but clip_grad_norm_ was "
            f'given parameters of {len(engines)} models to clip at {max_norm:g} together. Write "auto" for the key (or remove it), or '
            "clip each model in its own call"
        )
    norms: list[tuple[Engine, Loop, float]] = []
    for engine in engines:
        if (norm := _norm_of_waiting(engine)) is not None:
            loop = begun(engine)
            norms.append((engine, loop, min(norm, loop.clipped_to(engine))))
    total = math.hypot(*(norm for _, _, norm in norms))
    factor = max_norm / (total + EPSILON)
    for engine, loop, norm in norms:
        loop.clips = True
        if not written:
            loop.clip(engine, factor * (norm + EPSILON) if 0 < factor < 1 else math.inf)
        engine.stepper.note_clipping(engine.progress.last_norm)  # type: ignore[union-attr, arg-type]  # it has been measured
    return engines[0].progress.last_norm.new_tensor(total)  # type: ignore[union-attr]  # it has been measured
