"""Train with the optimizer and the scheduler that a script gives to a Trainer, beside a configuration that may have its own.

[Note: a Trainer's own optimizer] With DeepSpeed, transformers drops the two of ``Trainer(optimizers=...)``, and does not ask the script for
an optimizer if the configuration has one. Here they train as in plain Trainer. A configuration with a section of its own beside them is an
error, because one of the two would be ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.observe import warn_once
from hf_zero.optim.keywords import parse_number

_OWN_OPTIMIZER = "_hf_zero_own_optimizer"  # attribute of a Trainer that was given an optimizer
_CREATE, _CREATE_SCHEDULER = "create_optimizer", "create_scheduler"
_ADAMW = ("adamw_torch", "adamw_torch_fused")  # the defaults of transformers
_PREPARES_NOTHING = "5.1.0"  # of transformers: its Trainer prepares a model only for an optimizer or a scheduler of the configuration


def with_own_optimizer(method: Callable[..., Any], trainer: Any, num_training_steps: int, inference: bool = False) -> Any:
    """Replace ``deepspeed_init`` of transformers: keep the optimizer and the scheduler of the script, which it would drop.

    Raises:
        ConfigError: The configuration has an optimizer or a scheduler too, or the Trainer trains a second time with the same optimizer.
        UnsupportedError: transformers 5.1.0 would train without an engine.
    """
    _correct_transformers_4(trainer)
    if inference:
        return method(trainer, num_training_steps, inference)
    given, scheduler = trainer.optimizer, _own_scheduler(trainer)
    accelerated = hasattr(given, "step_was_skipped")  # accelerate's wrapper from an earlier training
    if accelerated and getattr(trainer, _OWN_OPTIMIZER, False):
        raise ConfigError(
            "this Trainer was given optimizers=(optimizer, ...) and trains a second time: its optimizer belongs to the first training. Set "
            "trainer.optimizer to a new one over the model's parameters before train() (and trainer.lr_scheduler to one over it or None), "
            "or make a new Trainer"
        )
    given = None if accelerated else given
    _require_one(trainer, given, scheduler)
    _require_prepared_model(trainer)
    try:
        if given is not None:
            setattr(trainer, _OWN_OPTIMIZER, True)
            trainer.create_optimizer = lambda *_args, **_kwargs: _keep_optimizer(trainer, given)
        optimizer, made = method(trainer, num_training_steps, inference)
        return optimizer, made if scheduler is None else scheduler
    finally:
        if given is not None:
            vars(trainer).pop(_CREATE, None)


def _correct_transformers_4(trainer: Any) -> None:
    """Let two arguments of a Trainer count that transformers 4 does not pass on if the configuration lacks their section or key.

    It would cast floating inputs to fp16 without an ``fp16`` section. With ``max_grad_norm=0`` it does not ask the engine for a norm, and
    the key's default of 1 would clip; transformers 5 asks for a norm without clipping.
    """
    config: Any = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "hf_ds_config", None)
    if getattr(config, "_dtype", None) is torch.float16 and not config.is_true("fp16.enabled"):
        config._dtype = torch.float32
    if config is not None and not trainer.args.max_grad_norm and not hasattr(trainer, "_get_grad_norm"):
        config.config.setdefault("gradient_clipping", 0.0)


def _require_prepared_model(trainer: Any) -> None:
    """Raise under the version of transformers that runs the bare model if the configuration has neither optimizer nor scheduler.

    Raises:
        UnsupportedError: This version is installed, and the configuration has none of the two sections.
    """
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    if metadata.version("transformers") == _PREPARES_NOTHING and not (config.get("optimizer") or config.get("scheduler")):
        raise UnsupportedError(
            f"transformers {_PREPARES_NOTHING} prepares no model for a DeepSpeed configuration without an optimizer section, so nothing "
            'would train it. Install transformers 5.2 or later, or add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": '
            '"auto", "eps": "auto", "weight_decay": "auto"}} to the configuration'
        )


def _own_scheduler(trainer: Any) -> Any:
    """Return the scheduler that the script has given to ``trainer``; None if there is none, or one of an earlier training."""
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DummyScheduler

    scheduler = trainer.lr_scheduler
    return None if isinstance(scheduler, (AcceleratedScheduler, DummyScheduler)) else scheduler


def _require_one(trainer: Any, optimizer: Any, scheduler: Any) -> None:
    """Raise if configuration and script both define the optimizer or the scheduler; warn of training arguments without effect.

    Raises:
        ConfigError: Both define one of them.
    """
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    kinds = {name: config[name].get("type") for name in ("optimizer", "scheduler") if config.get(name)}
    if "optimizer" in kinds:
        if given := _given_optimizer(trainer, optimizer):
            raise ConfigError(_both(given, "optimizer", kinds["optimizer"]))
        if scheduler is not None:
            raise ConfigError(
                f"Trainer was given optimizers=(None, {type(scheduler).__name__}) and the configuration has an optimizer section "
                f"({kinds['optimizer']}), whose learning rate this scheduler does not change: pass its optimizer too and remove "
                "the section, or remove the scheduler"
            )
        _warn_without_effect(trainer.args, "optim", "optimizer", kinds["optimizer"], _ADAMW)
        _warn_of_decay(trainer, config["optimizer"].get("params") or {})
    if "scheduler" in kinds:
        given = f"optimizers=(..., {type(scheduler).__name__})" if scheduler is not None else _override(trainer, _CREATE_SCHEDULER)
        if given:
            raise ConfigError(_both(given, "scheduler", kinds["scheduler"]))
        _warn_without_effect(trainer.args, "lr_scheduler_type", "scheduler", kinds["scheduler"])


def _warn_without_effect(args: Any, name: str, section: str, kind: Any, alike: tuple[str, ...] = ()) -> None:
    """Warn if the training argument ``name`` is neither its default nor one of ``alike``, because a section takes its place."""
    value, default = (str(getattr(one, "value", one)) for one in (getattr(args, name), type(args).__dataclass_fields__[name].default))
    if value not in (default, *alike):
        article = "an" if section == "optimizer" else "a"
        warn_once(
            f"TrainingArguments({name}={value!r}) has no effect: the configuration has {article} {section} section ({kind}), "
            "which is used. Remove one of them"
        )


def _warn_of_decay(trainer: Any, params: Mapping[str, Any]) -> None:
    """Warn if the weight decay of the optimizer section holds for biases and norms, which Trainer's own optimizer leaves out."""
    if not hasattr(trainer, "get_decay_parameter_names"):
        return
    if not (decay := parse_number(params.get("weight_decay", trainer.args.weight_decay))):
        return
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    spared = [name for name, param in trainer.model.named_parameters() if param.requires_grad and name not in decayed]
    if spared:
        warn_once(
            f"weight_decay {decay:g} of the optimizer section holds for all trainable parameters, as with DeepSpeed; Trainer's own "
            f"optimizer leaves {len(spared)} of them without decay (biases and norms, such as {spared[0]}). To train as plain Trainer "
            "does, remove the section `optimizer`"
        )


def _given_optimizer(trainer: Any, optimizer: Any) -> str:
    """Return how the script gives an optimizer to ``trainer``; "" if it does not."""
    if optimizer is not None:
        return f"optimizers=({type(optimizer).__name__}, ...)"
    if (pair := getattr(trainer, "optimizer_cls_and_kwargs", None)) is not None:
        return f"optimizer_cls_and_kwargs=({getattr(pair[0], '__name__', pair[0])}, ...)"
    return _override(trainer, _CREATE)


def _override(trainer: Any, name: str) -> str:
    """Return which class of ``trainer`` makes an optimizer or a scheduler in a method ``name`` of its own; "" if none does."""
    overriding = next((kind for kind in type(trainer).__mro__ if _builds(vars(kind).get(name), name)), None)
    return "" if overriding is None else f"a {name}() of its own ({overriding.__name__})"


def _builds(override: Any, name: str) -> bool:
    """Return whether ``override`` of the method ``name`` replaces it; one that calls the replaced method may add to its result."""
    code = getattr(inspect.unwrap(override), "__code__", None) if callable(override) else None
    module = str(getattr(override, "__module__", ""))
    return code is not None and not module.startswith("transformers.") and name not in code.co_names


def _both(given: str, section: str, kind: Any) -> str:
    return f"Trainer was given {given} and the configuration has a section `{section}` too ({kind}): leave one of them out"


def _keep_optimizer(trainer: Any, optimizer: Any) -> Any:
    trainer.optimizer = optimizer
    return optimizer
