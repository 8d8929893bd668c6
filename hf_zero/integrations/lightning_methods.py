"""Replace methods of Lightning's Trainer: signals to its ranks, a module's own backward, and gradients that it clips or logs.

Lightning's handler of SIGTERM issues a broadcast, and its handler of Slurm's signal saves a checkpoint. Both interrupt the rank at an
arbitrary point, so the collectives of different ranks would not match. Here the signal is only recorded, and the ranks vote at the next
optimizer step. After the batch at whose step they agree to end, Lightning's checkpoint for clusters is written: ``hpc_ckpt_<n>.ckpt`` in
``default_root_dir``. ``fit(ckpt_path="hpc")`` resumes from it; on Slurm Lightning resumes from it by itself.
"""

from __future__ import annotations

import importlib
import signal
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.sharded_parameter import gradients_of
from hf_zero.core.units.unit import find_unit
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.deepspeed.engine import Engine
from hf_zero.deepspeed.optimizer import DeepSpeedOptimizer
from hf_zero.deepspeed.requests import set_gradient_clipping
from hf_zero.deepspeed.safe_values import safe_get_full_grad
from hf_zero.integrations import fabric_methods
from hf_zero.integrations.preemption import end_preempted
from hf_zero.observe import warn_once
from hf_zero.system import signals

_requeues: weakref.WeakKeyDictionary[Any, tuple[str, Callable[[bool], None]]] = weakref.WeakKeyDictionary()
"""By Lightning's signal connector: name of the signal that makes Lightning requeue the Slurm job, and the function that stops listening."""

_without_masters: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class _Clipping:
    """Numbers for the clipping of one engine; 0 does not clip.

    Attributes:
        own: Number of the configuration, which counts in each step.
        shown: Number that ``engine.gradient_clipping()`` returns between steps: ``own``, or the Trainer's.
        given: Number that the engine was given last; if it has another one, a script has set it since.
        step: Number of the coming step, if ``clip_gradients`` was called with one.
    """

    own: float
    shown: float
    given: float
    step: float | None = None

    def give(self, engine: Engine, number: float) -> None:
        """Let ``engine`` clip at ``number`` from now on."""
        if number != self.given:
            set_gradient_clipping(engine, number)
            self.given = number


_clippings: weakref.WeakKeyDictionary[Any, _Clipping] = weakref.WeakKeyDictionary()


def _engine_of(trainer: Any) -> ConfiguredEngine | None:
    model = getattr(trainer.strategy, "model", None)
    return model if isinstance(model, ConfiguredEngine) and model.stepper is not None else None


def register_signal_handlers(function: Callable[..., Any], connector: Any) -> None:
    """Replace ``_SignalConnector.register_signal_handlers``: record preemption signals instead, while an engine of ours trains."""
    function(connector)
    engine = _engine_of(connector.trainer)
    if engine is None or not engine.preemption.settings.number:
        return
    environment = connector.trainer._accelerator_connector.cluster_environment
    again = getattr(environment, "requeue_signal", None) if getattr(environment, "auto_requeue", False) else None
    for number in {signal.SIGTERM, engine.preemption.settings.number, *([again] if again else [])}:
        former = connector._original_handlers.get(number)
        if former is not None and signal.getsignal(number) is not former:
            signal.signal(number, former)
    engine.preemption.listen()
    if again:
        stop = signals.listen(int(again))
        if stop is not None:
            _requeues[connector] = signal.Signals(again).name, stop


def run(function: Callable[..., Any], loop: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``_FitLoop.run``: warn of masters that are gone, and stop recording signals when the loop ends."""
    if loop.trainer.lightning_module in _without_masters:
        forget_masters(loop.trainer.lightning_module)
        warn_once(
            "fit() begins with the module's 16-bit weights: the fp32 masters of its earlier fit were dropped with their optimizer, "
            "and with them changes below the resolution of 16 bits. To continue an earlier fit exactly, call "
            "trainer.save_checkpoint(path) after it, and fit(module, ckpt_path=path)"
        )
    try:
        result = function(loop, *args, **kwargs)
    except BaseException:
        _stop(loop.trainer, deliver=False)
        raise
    _stop(loop.trainer, deliver=True)
    return result


def note_masters(module: nn.Module) -> None:
    """Note before a new engine takes the weights of ``module`` that the fp32 masters of an earlier one go; local.

    Each ``fit``, ``validate``, ``test`` and ``predict`` makes an engine from the module's weights, in 16-bit precision from 16-bit values.
    """
    units = (owner[0] for param in module.parameters() if (owner := find_unit(param)) is not None)
    if any(unit.master is not None and unit.master.dtype != unit.layout.dtype for unit in units):
        _without_masters.add(module)


def forget_masters(module: nn.Module) -> None:
    """Forget what ``note_masters`` noted, because weights and masters of ``module`` come from a checkpoint; local."""
    _without_masters.discard(module)


def _stop(trainer: Any, deliver: bool) -> None:
    engine = _engine_of(trainer)
    if engine is not None and not engine.preemption.asked:
        engine.preemption.stop(deliver)
    _, stop = _requeues.pop(trainer._signal_connector, ("", None))
    if stop is not None:
        stop(deliver)


def on_advance_end(function: Callable[..., Any], loop: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``_TrainingEpochLoop.on_advance_end`` (end of a batch): save and end the run if the ranks have agreed to end.

    A validation that is due runs first, as it does without a signal.
    """
    function(loop, *args, **kwargs)
    trainer = loop.trainer
    engine = _engine_of(trainer)
    if engine is None or not engine.preemption.signal:
        return
    connector, files = trainer._signal_connector, trainer._checkpoint_connector
    # Broadcast one name: each rank would otherwise list the folder itself, perhaps after rank 0 has begun to write.
    path = trainer.strategy.broadcast(files.hpc_save_path(trainer.default_root_dir))
    if engine.preemption.signal == _requeues.get(connector, ("",))[0]:
        files.hpc_save_path = lambda _folder: path
        try:
            connector._slurm_sigusr_handler_fn(signal.Signals[engine.preemption.signal], None)
        finally:
            del files.hpc_save_path
    else:
        trainer.save_checkpoint(path)
    end_preempted()


def clip_gradients(method: Callable[..., Any], precision: Any, optimizer: Any, clip_val: float = 0.0, algorithm: Any = "norm") -> None:
    """Replace ``DeepSpeedPrecision.clip_gradients``, which does nothing: clip by norm, in the coming step, or by value, now; collective.

    Lightning calls it from ``LightningModule.clip_gradients``: in manual optimization, and in ``configure_gradient_clipping``, whose
    default calls it with the numbers of the Trainer. A module that overrides this hook may clip only some steps. So the engine clips at
    ``clip_val`` in the step that follows, or at its configuration's number if that is smaller. In the middle of an accumulation there is
    nothing to clip yet.
    """
    engine = _engine_with(optimizer)
    if engine is None:
        method(precision, optimizer, clip_val, algorithm)
        return
    if not clip_val or clip_val <= 0 or not engine.accumulation.awaits_update:
        return
    if str(getattr(algorithm, "value", algorithm)) == "value":
        fabric_methods.clip(engine, clip_val, None)
        return
    clipping = _clipping_of(engine)
    clipping.step = min(clipping.step or clipping.own or clip_val, clip_val)
    clipping.give(engine, clipping.step)


def optimizer_step(method: Callable[..., Any], precision: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DeepSpeedPrecision.optimizer_step``: the Trainer's number counts only if the step's hooks call ``clip_gradients``."""
    engine = _engine_with(optimizer)
    if engine is None:
        return method(precision, optimizer, *args, **kwargs)
    clipping = _clipping_of(engine)
    if clipping.step is None:
        clipping.give(engine, clipping.own)
    try:
        return method(precision, optimizer, *args, **kwargs)
    finally:
        clipping.step = None
        clipping.give(engine, clipping.shown)


def note_clipping(engine: Any, own: float) -> None:
    """Note the clipping number that the configuration of ``engine`` had before Lightning wrote the Trainer's into it."""
    if isinstance(engine, Engine):
        shown = engine.gradient_clipping()
        _clippings[engine] = _Clipping(own, shown, shown)


def _clipping_of(engine: Engine) -> _Clipping:
    """Return the numbers of ``engine``; one that a script has set (``optimizer.clip_grad``) takes the place of all."""
    present, known = engine.gradient_clipping(), _clippings.get(engine)
    if known is None or present != known.given:
        known = _clippings[engine] = _Clipping(present, present, present)
    return known


def _engine_with(optimizer: Any) -> Any:
    """Return the engine of Lightning's ``optimizer``, or of its wrapper; None if it is none of hf_zero's."""
    held: Any = optimizer if isinstance(optimizer, DeepSpeedOptimizer) else getattr(optimizer, "optimizer", None)
    return held._engine() if isinstance(held, DeepSpeedOptimizer) else None


def backward(method: Callable[..., None], precision: Any, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedPrecision.backward``, which leaves out the ``backward`` that a module overrides: call it.

    It gets the loss times the loss scale, as in other 16-bit precisions. Its ``loss.backward()`` is a micro-step, which the engine divides
    by ``gradient_accumulation_steps``; where Lightning has divided already (``scale_wrt_gas=False``), the loss is multiplied by it.
    """
    engine: Any = _engine_of(model.trainer)
    helpers = importlib.import_module(f"{type(precision).__module__.partition('.plugins.')[0]}.utilities.model_helpers")
    if engine is None or not helpers.is_overridden("backward", model):
        method(precision, tensor, model, optimizer, *args, **kwargs)
        return
    divides = kwargs.pop("scale_wrt_gas", True)
    model.backward(engine.scale(tensor if divides else tensor * engine.gradient_accumulation_steps()), *args, **kwargs)


def grad_norm(function: Callable[..., dict[str, Any]], module: Any, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
    """Replace ``lightning.pytorch.utilities.grad_norm``, which finds no sharded gradient: use the engine's gradients; collective then.

    Returns:
        The norm of each gradient, averaged over ranks and without loss scale, and the norm of all, as Lightning's function does.
    """
    params, order = dict(module.named_parameters()), float(norm_type)
    if order <= 0 or all(find_unit(param) is None for param in params.values()):
        return function(module, norm_type, group_separator)
    own = gradients_of(params.values())  # of parameters that begin to train, this rank's
    whole = [safe_get_full_grad(param) if param.requires_grad else None for param in params.values()]
    grads = [mean if mean is not None else grad for mean, grad in zip(whole, own, strict=True)]
    found = {name: grad.norm(order) for name, grad in zip(params, grads, strict=True) if grad is not None}
    norms: dict[str, Any] = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in found.items()}
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.tensor(list(norms.values())).norm(order)
    return norms
