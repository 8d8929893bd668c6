"""Make Lightning's DeepSpeed strategies train as its other strategies do: accumulation, clipping, schedules, files of other strategies.

Each function replaces a method or property of ``lightning.pytorch.strategies.DeepSpeedStrategy`` or ``lightning.fabric.strategies.
DeepSpeedStrategy``, which ``ZeroStrategy`` and ``FabricZeroStrategy`` inherit; its first argument is the original. If `import deepspeed`
imports DeepSpeed itself, the original runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hf_zero.checkpoint.state.plain_state import load_plain_state
from hf_zero.deepspeed.alias import finder
from hf_zero.deepspeed.alias.table import DEEPSPEED_VERSION
from hf_zero.deepspeed.configured import ConfiguredEngine
from hf_zero.deepspeed.engine import Engine
from hf_zero.deepspeed.optimizer import DeepSpeedOptimizer
from hf_zero.deepspeed.pipe.building import kept_random_states
from hf_zero.deepspeed.requests import load_module_state_dict
from hf_zero.integrations import fabric_methods, lightning_files, lightning_methods
from hf_zero.integrations.lightning_files import AVERAGES
from hf_zero.observe import warn_once

# -- Trainer ----------------------------------------------------------------------------------------------------------


def handles_gradient_accumulation(function: Callable[[Any], bool], strategy: Any) -> bool:
    """Return False: Lightning steps at the end of each accumulation, whose last one in an epoch may be shorter.

    With DeepSpeed the engine counts micro-steps: an accumulation goes on in the next epoch, and the last gradients train nothing.
    """
    return not finder.alias_is_active() and function(strategy)


def block_backward_sync(function: Callable[[Any], AbstractContextManager[None]], strategy: Any) -> AbstractContextManager[None]:
    """Return a context whose micro-step is not the last of its optimizer step."""
    return _before_boundary(strategy) if finder.alias_is_active() else function(strategy)


@contextmanager
def _before_boundary(strategy: Any) -> Iterator[None]:
    _say(strategy, False)
    try:
        yield
    finally:
        _say(strategy, True)


def _say(strategy: Any, is_boundary: bool) -> None:
    engine = strategy.model
    if not strategy.lightning_module.automatic_optimization:  # each step() of the module updates, in ``toggle_model(sync_grad=False)`` too
        return
    if isinstance(engine, ConfiguredEngine) and engine.stepper is not None and engine.accumulation.managed:
        engine.accumulation.say(is_boundary)


def backward(function: Callable[..., Any], strategy: Any, *args: Any, **kwargs: Any) -> Any:
    """Run Lightning's backward without dividing the loss by ``accumulate_grad_batches``: Lightning has divided it already."""
    if finder.alias_is_active():
        kwargs.setdefault("scale_wrt_gas", False)
    return function(strategy, *args, **kwargs)


def init_deepspeed(function: Callable[[Any], None], strategy: Any) -> None:
    """Create the engine as Lightning does, but without its error about clipping by value, which ``clip_gradients`` does."""
    if not finder.alias_is_active():
        function(strategy)
        return
    trainer = strategy.lightning_module.trainer
    if trainer.training and getattr(strategy, "_hf_zero_sizes_wait", False):  # the first use of the strategy was no fit
        strategy.config["train_micro_batch_size_per_gpu"] = strategy._auto_select_batch_size()
    lightning_methods.note_masters(strategy.lightning_module)
    algorithm = trainer.gradient_clip_algorithm
    trainer.gradient_clip_algorithm = None
    try:
        function(strategy)
    finally:
        trainer.gradient_clip_algorithm = algorithm
    lightning_methods.note_clipping(strategy.model, getattr(strategy, "_hf_zero_clipping", 0.0))
    _say(strategy, True)


def format_batch_sizes(function: Callable[[Any], None], strategy: Any) -> None:
    """Write Lightning's settings into the configuration; its number for clipping by value is no norm."""
    trainer = getattr(strategy.lightning_module, "trainer", None)
    by_value = str(getattr(getattr(trainer, "gradient_clip_algorithm", None), "value", "")) == "value"
    own = strategy.config.get("gradient_clipping", 0.0)
    strategy._hf_zero_clipping = float(own) if isinstance(own, (int, float)) else 0.0
    if by_value and finder.alias_is_active():
        strategy.config.setdefault("gradient_clipping", 0.0)
    function(strategy)


def batch_size(function: Callable[[Any], int], strategy: Any) -> int:
    """Return the training loader's batch size; 1 without a fit, and for a loader that has none (an iterable of batches).

    Lightning's method asks a module or data module for one more training loader, in ``validate``, ``test`` and ``predict`` too, for which
    their ``setup`` has made no training rows. A loader may be drawn (``random_split``), so the random states are kept.
    """
    if not finder.alias_is_active():
        return function(strategy)
    trainer = strategy.lightning_module.trainer
    strategy._hf_zero_sizes_wait = not trainer.training
    source = trainer.fit_loop._data_source
    if not trainer.training or not source.is_defined():
        return 1
    with kept_random_states():
        loader = source.dataloader()
    return getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 1


def restores_optimizer(function: Callable[[Any], bool], strategy: Any) -> bool:
    """Return True for a checkpoint of one file with the state of an optimizer, as other strategies write it: ``load_optimizer`` loads it.

    Lightning's property is False, and warns of a file: the optimizer would start fresh.
    """
    if not isinstance(strategy.model, ConfiguredEngine):
        return function(strategy)
    loaded = strategy.lightning_module.trainer._checkpoint_connector._loaded_checkpoint
    return getattr(strategy, "_hf_zero_file", False) and (bool(loaded.get("optimizer_states")) or function(strategy))


def load_optimizer(function: Callable[..., None], strategy: Any, checkpoint: Any) -> None:
    """Load the state of an optimizer that another strategy has written, by parameter; local. If it does not fit, warn and load none."""
    engine, states = strategy.model, checkpoint.get("optimizer_states")
    if not states or not isinstance(engine, ConfiguredEngine):
        function(strategy, checkpoint)
        return
    reason = load_plain_state(engine.optimizer, states[0])
    if reason:
        warn_once(
            f"the checkpoint's optimizer state was not loaded: {reason}. Weights and loops are those of the checkpoint; the optimizer "
            "starts without state. To resume its state too, use the optimizer and param groups of the run that was saved"
        )


def save_checkpoint(function: Callable[..., None], strategy: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Save as Lightning does, and keep the averages of its ``WeightAveraging`` callback; collective.

    The callback puts them under "state_dict" and the weights under "current_model_state". Lightning leaves out the former, because the
    engine writes the weights; for the same reason the latter is left out here.
    """
    if isinstance(strategy.model, ConfiguredEngine) and "averaging_state" in checkpoint:
        checkpoint = {key: value for key, value in checkpoint.items() if key != "current_model_state"}
        checkpoint[AVERAGES] = checkpoint["state_dict"]
    function(strategy, checkpoint, *args, **kwargs)


def load_checkpoint(
    function: Callable[..., dict[str, Any]], strategy: Any, checkpoint_path: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Load as Lightning does, and with ``load_full_weights`` one file at every stage; collective.

    Averages in a folder go to the callback in a fit, and else into the model, as those of one file do.
    """
    module, engine = strategy.lightning_module, strategy.model
    if not isinstance(engine, ConfiguredEngine):
        return function(strategy, checkpoint_path, *args, **kwargs)
    if module.trainer.training:
        lightning_methods.forget_masters(module)
    path, strategy._hf_zero_file = lightning_files.opens_file(strategy, checkpoint_path)
    if strategy._hf_zero_file:
        return lightning_files.of_one_file(strategy)(strategy, path, *args, **kwargs)  # type: ignore[no-any-return]
    with lightning_files.as_folder(strategy):
        loaded = function(strategy, path, *args, **kwargs)
    averages, trainer = loaded.pop(AVERAGES, None), module.trainer
    if not trainer.training:
        if averages is not None:
            load_module_state_dict(engine, averages, strict=module.strict_loading)
    elif any(base.__name__ == "WeightAveraging" for callback in trainer.callbacks for base in type(callback).__mro__):
        present = module.state_dict()  # the engine has loaded the weights already
        if averages is None:  # without the callback's keys it starts its averages with "state_dict", and says so
            loaded.pop("averaging_state", None)
        loaded |= {"state_dict": averages or present, "current_model_state": present}
    return loaded


# -- Fabric -----------------------------------------------------------------------------------------------------------


def make_strategy(function: Callable[..., None], strategy: Any, *args: Any, **kwargs: Any) -> None:
    """Make Fabric's strategy: ``no_backward_sync`` reaches the engine, and nothing is clipped without ``gradient_clipping``."""
    function(strategy, *args, **kwargs)
    if finder.alias_is_active():
        strategy._backward_sync_control = fabric_methods.BackwardSyncControl()
        if strategy.config is not None:
            strategy.config.setdefault("gradient_clipping", 0.0)  # Fabric has no argument for it, and the default of the key is 1


def set_up(function: Callable[..., Any], strategy: Any, module: Any, optimizers: list[Any], scheduler: Any = None) -> Any:
    """Make an engine of the model and its optimizer; the engine steps ``scheduler`` unless the script does."""
    found = function(strategy, module, optimizers, scheduler)
    if scheduler is not None and finder.alias_is_active():
        fabric_methods.share_schedule(found[2], lambda: getattr(strategy, "_hf_zero_steps", False))
    return found


def optimizer_step(function: Callable[..., Any], strategy: Any, optimizer: Any, **kwargs: Any) -> Any:
    """Step the engine, and note that it runs: its own ``step`` steps the scheduler of ``fabric.setup``, the optimizer's does not."""
    strategy._hf_zero_steps = True
    try:
        engine = optimizer.engine if isinstance(optimizer, DeepSpeedOptimizer) else None
        if not isinstance(engine, ConfiguredEngine):
            return function(strategy, optimizer, **kwargs)
        closure = kwargs.get("closure")
        loss = closure() if closure is not None else None
        engine.step()
        return loss
    finally:
        strategy._hf_zero_steps = False


def clip_norm(
    function: Callable[..., Any],
    strategy: Any,
    module: Any,
    optimizer: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
) -> torch.Tensor:
    """Clip the gradients that wait for ``optimizer.step()`` to ``max_norm``, and return their norm before; collective."""
    if not isinstance(module, ConfiguredEngine):
        return function(strategy, module, optimizer, max_norm, norm_type, error_if_nonfinite)
    return fabric_methods.clip(module, max_norm, float(norm_type), error_if_nonfinite)


def clip_value(function: Callable[..., Any], strategy: Any, module: Any, optimizer: Any, clip_val: float) -> None:
    """Clip each gradient that waits for ``optimizer.step()`` to ``[-clip_val, clip_val]``; collective."""
    if isinstance(module, ConfiguredEngine):
        fabric_methods.clip(module, clip_val, None)
    else:
        function(strategy, module, optimizer, clip_val)


def load_module(function: Callable[..., None], strategy: Any, module: Any, state_dict: Any, strict: bool = True) -> None:
    """Load whole weights under the names of the script's model (``fabric.load_raw``) into an engine's model and masters; collective."""
    if isinstance(module, Engine):
        module.load_module_state_dict(state_dict, strict=strict)
    else:
        function(strategy, module, state_dict, strict)


def load_state(function: Callable[..., dict[str, Any]], strategy: Any, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load as Fabric does, and with ``load_full_weights`` one file at every stage; collective.

    What a folder's load returns also has the version of DeepSpeed's API, as with DeepSpeed's checkpoints.
    """
    # By type: a mock of an engine passes isinstance, and its load returns what a test has chosen.
    if not (isinstance(state, dict) and any(issubclass(type(value), ConfiguredEngine) for value in state.values())):
        return function(strategy, path, state, *args, **kwargs)
    path, is_file = lightning_files.opens_file(strategy, path)
    if is_file:
        return lightning_files.of_one_file(strategy)(strategy, path, state, *args, **kwargs)
    with lightning_files.as_folder(strategy):
        return {**function(strategy, path, state, *args, **kwargs), "ds_version": DEEPSPEED_VERSION}
