"""What becomes of a signal that asks the ranks to end: who saves then, scripts, the engine itself or Trainer, and how the run ends.

[Note: preemption] The ranks agree by the vote that each optimizer step takes, so a signal to one of them stops all of them at the same
step. Under Trainer that step's checkpoint is Trainer's own, made where ``on_step_end`` has been called: trainer and engine have
counted the same steps, and a resumed run takes the next batch. Before any rank ends, all of them have written what they have to write: a
launcher ends all ranks as soon as one has ended. transformers' own ``enable_jit_checkpoint`` has each rank decide by a timer of
its own; for our engines it means this.
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
from hf_zero.integrations import callers
from hf_zero.observe import log_rank0, warn_once
from hf_zero.system import last_words, signals

_engines: list[weakref.ref[ConfiguredEngine]] = []  # those that train, in the order in which they were made, which is the same on all ranks


def _live() -> list[ConfiguredEngine]:
    found = [engine for made in _engines if (engine := made()) is not None and engine.stepper is not None]
    return [engine for engine in found if engine.runtime.attached and exists(engine.collectives.topology.group)]


# -- scripts ----------------------------------------------------------------------------------------------------------


def preempted() -> bool:
    """Tell whether a signal has asked any rank to end (`hf_zero.preemption_signal`, SIGTERM); all ranks get the same answer after a step.

    The first call begins to listen: until then a signal does what it does without hf_zero. A script that asks saves what it
    needs, and calls ``end_preempted``.
    """
    answers = [engine.preempted for engine in _live()]  # every engine is asked: asking begins to listen
    return any(answers)


def end_preempted() -> NoReturn:
    """Ends the run once everything is saved: waits for checkpoints in the background and for all ranks; every rank must call it.

    Raises:
        Preempted: Always, at the end; a ``SystemExit`` with status 75.
        StateError: No signal has asked for it, as ``preempted`` would have told.
        CheckpointError: A checkpoint in the background could not be written; on every rank.
    """
    engines = [engine for engine in _live() if engine.preemption.signal]  # others may be garbage that another rank has collected
    if not engines:
        raise StateError(
            "end_preempted() though no signal asks the ranks to end: call it where hf_zero.utils.preempted() is true, on every rank"
        )
    for engine in engines:
        engine.checkpoints.wait()
        engine.stepper.signal_of_any()  # type: ignore[union-attr]  # until then another rank may be writing files of the script's
    signals.end()
    told = f"preempted by {engines[0].preemption.signal}: {signals.newest()}. All ranks end with status {PREEMPTED_STATUS}"
    log_rank0("%s", told)
    last_words.leave(told)
    raise Preempted


# -- engines ----------------------------------------------------------------------------------------------------------


def listen_where_wanted(engine: Engine) -> None:
    """Has a new engine note signals where somebody acts upon them.

    Raises:
        ConfigError: It is to save by itself, and so is another engine: their steps end at different moments.
    """
    if engine.stepper is None or engine.collectives.pretended or not isinstance(engine, ConfiguredEngine):
        return
    settings = engine.preemption.settings
    _engines[:] = [made for made in _engines if made() is not None]
    if settings.folder and _saving():
        gc.collect()
        if _saving():
            raise ConfigError(
                f"hf_zero.preemption_save_dir is {settings.folder!r}, and another engine of this script that trains has such a folder: one "
                "would be saved between its steps. Leave the key out, ask hf_zero.utils.preempted() where both have stepped, and save both"
            )
    _engines.append(weakref.ref(engine))
    trainers = callers.running(callers.TRAIN) if not callers.lost(callers.STEP_END) else []
    if settings.chosen or settings.folder or any(_saves(call.caller) for call in trainers):
        engine.preemption.listen()


def _saving() -> bool:
    return any(engine.preemption.settings.folder for engine in _live())


def save_by_itself(engine: Engine) -> None:
    """Saves and ends where the configuration names a folder for it; after a step at which the ranks have agreed to end.

    Raises:
        Preempted: It has.
    """
    preemption = engine.preemption
    if callers.running(callers.TRAIN, *callers.LIGHTNING_FITS):
        return
    if preemption.settings.folder:
        engine.save_checkpoint(preemption.settings.folder)
        end_preempted()
    if not preemption.asked:
        warn_once(
            f"{preemption.signal} has asked a rank to end, and the run goes on: nothing in it asks hf_zero.utils.preempted() after its "
            "steps, and hf_zero.preemption_save_dir names no folder. A second signal ends a rank at once"
        )


# -- Trainer ----------------------------------------------------------------------------------------------------------

_at_work: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines of trainers that are asked to save just now
_looked_at: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # the step after which Trainer was last asked to save


def _saves(trainer: Any) -> bool:
    args = trainer.args
    return str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" or bool(getattr(args, "enable_jit_checkpoint", False))


def _engine_of(trainer: Any) -> ConfiguredEngine | None:
    engine = getattr(trainer, "model_wrapped", None)
    return engine if isinstance(engine, ConfiguredEngine) and engine.stepper is not None else None


def train(function: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.train``: signals are noted until it ends."""
    own = getattr(type(trainer), "_maybe_log_save_evaluate", None)
    if own is not None and not hasattr(own, "hf_zero_method"):  # a trainer that has replaced it, and may not call what it replaces
        trainer._maybe_log_save_evaluate = functools.partial(log_save_evaluate, own, trainer)
    try:
        result = function(trainer, *args, **kwargs)
    except BaseException:
        _stop(trainer, deliver=False)  # it ends already, by what was raised
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
    """``Trainer._maybe_log_save_evaluate``, which follows ``on_step_end``: where the ranks have agreed to end, it saves, and the run ends.

    An evaluation that is due comes first, as it would have: it takes random numbers, and says which checkpoint is the best. For the same
    reason the last step of an epoch is saved after ``on_epoch_end``, which calls this once more. A signal that comes while Trainer saves
    anyway is answered by that checkpoint. A training that is complete is saved too, and goes on to its end: Trainer takes one step too
    many when it resumes from its last one.
    """
    engine = _engine_of(trainer)
    if engine is None or not engine.preemption.listens or engine in _at_work:
        return function(trainer, *args, **kwargs)
    _at_work.add(engine)
    try:
        return _save_where_agreed(function, trainer, engine, args, kwargs)
    finally:
        _at_work.discard(engine)


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
    log_rank0("the training is complete, so it ends as it would have: %s", signals.newest())
    return None


def _save(function: Callable[..., Any], trainer: Any, engine: ConfiguredEngine, args: Any, kwargs: Any) -> None:
    """Has ``function`` log, evaluate and save a whole checkpoint of this step, unless there is one of the same moment."""
    control, progress = trainer.control, engine.progress
    only_model, trainer.args.save_only_model = trainer.args.save_only_model, False  # nothing could be resumed from it
    control.should_training_stop = True
    control.should_save = progress.saved_at != progress.global_steps or control.should_evaluate
    try:
        function(trainer, *args, **kwargs)
        if progress.saved_at != progress.global_steps:  # save_strategy "best", and it is not
            trainer.control.should_save, trainer.control.should_evaluate = True, False
            function(trainer, *args, **kwargs)
    finally:
        trainer.args.save_only_model = only_model


def set_trainer(function: Callable[..., Any], callback: Any, trainer: Any) -> None:
    """``JITCheckpointCallback.set_trainer``: with an engine of ours each rank's own timer gives way to the vote of all ranks."""
    if not trainer.is_deepspeed_enabled:
        function(callback, trainer)
        return
    callback.trainer = trainer
    log_rank0("enable_jit_checkpoint: the ranks agree on the step that is saved, so no rank waits for a timer of its own")
