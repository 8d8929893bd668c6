"""Handle a signal that asks the ranks to end: a script, the engine or Trainer saves a checkpoint, and all ranks end together.

[Note: preemption] The ranks agree by a vote that is part of each optimizer step, so a signal to one rank stops all ranks at the same
step. Under Trainer the checkpoint of that step is Trainer's own. It is made after ``on_step_end``, when trainer and engine have counted the
same steps, so that a resumed run takes the next batch. No rank ends before all ranks have written their files, because a launcher ends all
ranks as soon as one has ended. transformers' own ``enable_jit_checkpoint`` lets each rank decide by its own timer; with our engines it
uses this vote instead.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from hf_zero.comm.process_groups import exists
from hf_zero.core.engine import Engine
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.errors import PREEMPTED_STATUS, ConfigError, Preempted, StateError
from hf_zero.integrations import callers, lightning_table, methods, trainer_snapshots
from hf_zero.observe import announce, log_rank0, warn_once
from hf_zero.system import last_words, signals

_engines: list[weakref.ref[ConfiguredEngine]] = []  # engines that train, in the order of their creation, the same on all ranks


def _live() -> list[ConfiguredEngine]:
    found = [engine for made in _engines if (engine := made()) is not None and engine.stepper is not None]
    return [engine for engine in found if engine.runtime.attached and exists(engine.collectives.topology.group)]


# -- scripts ----------------------------------------------------------------------------------------------------------


def preempted() -> bool:
    """Return whether any rank received the signal to end (`hf_zero.preemption_signal`, SIGTERM); the same on all ranks after each step.

    The first call begins to listen for the signal; until then the signal has its usual effect. If the answer is True, the script must save
    its state and call ``end_preempted``.
    """
    answers = [engine.preempted for engine in _live()]  # ask every engine, because asking makes it listen
    return any(answers)


def end_preempted() -> NoReturn:
    """End the run after a preemption: wait for background checkpoints and for all ranks, then exit; every rank must call it.

    Raises:
        Preempted: Always, at the end; a ``SystemExit`` with status 75.
        StateError: No signal was received: ``preempted()`` is False.
        CheckpointError: A checkpoint in the background could not be written; on every rank.
    """
    engines = [engine for engine in _live() if engine.preemption.signal]  # others may be garbage, already collected on some ranks
    if not engines:
        raise StateError(
            "end_preempted() was called, but no signal has asked the ranks to end. Call it only if hf_zero.utils.preempted() is true, on "
            "every rank"
        )
    for engine in engines:
        engine.checkpoints.wait()
        engine.stepper.signal_of_any()  # type: ignore[union-attr]  # waits for all ranks, which may still write files
    signals.end()
    told = f"preempted by {engines[0].preemption.signal}: {signals.newest()}. All ranks end with status {PREEMPTED_STATUS}"
    announce(told)
    last_words.leave(told)
    raise Preempted


# -- engines ----------------------------------------------------------------------------------------------------------


def listen_if_configured(engine: Engine) -> None:
    """Let a new engine record signals if the configuration or a running Trainer reacts to them.

    Raises:
        ConfigError: ``preemption_save_dir`` is set for two training engines, whose steps end at different times.
    """
    if engine.stepper is None or engine.collectives.pretended or not isinstance(engine, ConfiguredEngine):
        return
    settings = engine.preemption.settings
    _engines[:] = [made for made in _engines if made() is not None]
    if settings.folder and _saving():
        gc.collect()
        if _saving():
            raise ConfigError(
                f"hf_zero.preemption_save_dir is {settings.folder!r}, and another training engine of this script also has such a folder: "
                "one of them would be saved between its steps. Remove the key, check hf_zero.utils.preempted() after both have stepped, "
                "and save both"
            )
    _engines.append(weakref.ref(engine))
    trainers = callers.running(methods.TRAIN) if not callers.lost(methods.STEP_END) else []
    if settings.chosen or settings.folder or any(_saves(call.caller) for call in trainers):
        engine.preemption.listen()


def _saving() -> bool:
    return any(engine.preemption.settings.folder for engine in _live())


def save_by_itself(engine: Engine) -> None:
    """Save into ``hf_zero.preemption_save_dir`` and end the run; called after the step at which the ranks have agreed to end.

    Without such a folder it warns once that the run continues. Under Trainer and Lightning it does nothing: they save.

    Raises:
        Preempted: The checkpoint was saved.
    """
    preemption = engine.preemption
    if callers.running(methods.TRAIN, *lightning_table.LIGHTNING_FITS):
        return
    if preemption.settings.folder:
        engine.save_checkpoint(preemption.settings.folder)
        end_preempted()
    if not preemption.asked:
        warn_once(
            f"a rank received {preemption.signal}, but the run continues: the script does not call hf_zero.utils.preempted() after its "
            "steps, and hf_zero.preemption_save_dir is not set. A second signal ends a rank at once"
        )


# -- Trainer ----------------------------------------------------------------------------------------------------------

_at_work: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines whose Trainer is logging, evaluating or saving at the moment
_looked_at: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # step after which Trainer was last asked to save


def _saves(trainer: Any) -> bool:
    args = trainer.args
    return str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" or bool(getattr(args, "enable_jit_checkpoint", False))


def _engine_of(trainer: Any) -> ConfiguredEngine | None:
    engine = getattr(trainer, "model_wrapped", None)
    return engine if isinstance(engine, ConfiguredEngine) and engine.stepper is not None else None


def train(function: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer.train``: stop recording signals when training ends, and resume from a snapshot newer than the checkpoint."""
    args, kwargs = trainer_snapshots.resume(trainer, args, kwargs)
    own = getattr(type(trainer), "_maybe_log_save_evaluate", None)
    if own is not None and not hasattr(own, "hf_zero_method"):  # a subclass has overridden it, perhaps without calling super()
        trainer._maybe_log_save_evaluate = functools.partial(log_save_evaluate, own, trainer)
    try:
        result = function(trainer, *args, **kwargs)
    except BaseException:
        _stop(trainer, deliver=False)  # the exception ends the run, so the signal is not delivered again
        raise
    finally:
        vars(trainer).pop("_maybe_log_save_evaluate", None)
    _stop(trainer, deliver=True)
    return result


def _stop(trainer: Any, deliver: bool) -> None:
    engine = _engine_of(trainer)
    if engine is not None and not engine.preemption.asked:
        engine.preemption.stop(deliver)


def log_save_evaluate(function: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer._maybe_log_save_evaluate``, called after ``on_step_end``: save and end the run if the ranks have agreed to end.

    An evaluation that is due runs first, as it does without a signal, because it draws random numbers and decides which checkpoint is the
    best. For the same reason the last step of an epoch is saved after ``on_epoch_end``, where Trainer calls this method once more. If the
    signal arrives while Trainer saves anyway, that checkpoint serves. A complete training is saved and then ends normally, because Trainer
    takes one step too many when it resumes from the last step. A snapshot that is due is taken last.
    """
    engine = _engine_of(trainer)
    if engine is None or engine in _at_work:
        return function(trainer, *args, **kwargs)
    _at_work.add(engine)
    try:
        if engine.preemption.listens:
            result = _save_where_agreed(function, trainer, engine, args, kwargs)
        else:
            result = function(trainer, *args, **kwargs)
    finally:
        _at_work.discard(engine)
    trainer_snapshots.take(trainer, engine)
    return result


def _save_where_agreed(function: Callable[..., Any], trainer: Any, engine: ConfiguredEngine, args: Any, kwargs: Any) -> Any:
    control, progress, preemption = trainer.control, engine.progress, engine.preemption
    again = _looked_at.get(engine) == progress.global_steps
    _looked_at[engine] = progress.global_steps
    complete = bool(control.should_training_stop)
    if not again and (complete or float(trainer.state.epoch).is_integer()):
        return function(trainer, *args, **kwargs)
    if not preemption.signal:
        result = function(trainer, *args, **kwargs)
        if progress.saved_at != progress.global_steps and not complete:
            return result
        number = engine.stepper.signal_of_any()  # type: ignore[union-attr]
        if not number:
            return result
        preemption.agree(number)
    _save(function, trainer, engine, args, kwargs)
    if not complete:
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        end_preempted()
    log_rank0("the training is complete, so it ends normally: %s", signals.newest())
    return None


def _save(function: Callable[..., Any], trainer: Any, engine: ConfiguredEngine, args: Any, kwargs: Any) -> None:
    """Log, evaluate and save a complete checkpoint of this step with ``function``, unless this step is already saved."""
    control, progress = trainer.control, engine.progress
    only_model, trainer.args.save_only_model = trainer.args.save_only_model, False  # a model alone could not be resumed
    control.should_training_stop = True
    control.should_save = progress.saved_at != progress.global_steps or control.should_evaluate
    try:
        function(trainer, *args, **kwargs)
        if progress.saved_at != progress.global_steps:  # save_strategy is "best", and this step is not the best
            trainer.control.should_save, trainer.control.should_evaluate = True, False
            function(trainer, *args, **kwargs)
    finally:
        trainer.args.save_only_model = only_model


def set_trainer(function: Callable[..., Any], callback: Any, trainer: Any) -> None:
    """Replace ``JITCheckpointCallback.set_trainer``: with DeepSpeed start no timer and no signal handler; the ranks vote instead."""
    if not trainer.is_deepspeed_enabled:
        function(callback, trainer)
        return
    callback.trainer = trainer
    log_rank0("enable_jit_checkpoint: all ranks agree on the step to save by a vote, so the timer of this setting is not used")
