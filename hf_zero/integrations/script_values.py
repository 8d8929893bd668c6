"""Compare values that a script passes to accelerate with the same values in the configuration: choose one, or raise if they differ.

[Note: the script's value and the configuration's] accelerate silently prefers the configuration's value, and fills "auto" for
`gradient_clipping` with 1.0, whatever norm the script passes to ``clip_grad_norm_``. Here the script's value is used if the configuration
has "auto" or no value; if both are set and differ, an error names both. An argument with its default value counts as not set. The clipping
norm and the loader's batch size become known late: at ``clip_grad_norm_`` (`integrations/clipping.py`) and at the first backward. Both
precede the update, because `integrations/accumulate.py` lets updates wait for ``optimizer.step()``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from hf_zero.config.batch import ACCUMULATION, MICRO
from hf_zero.deepspeed.alias.finder import SWITCH, is_switched_on
from hf_zero.deepspeed.engine import Engine
from hf_zero.deepspeed.requests import set_train_micro_batch_size
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.integrations import callers, methods
from hf_zero.integrations.early_checks import OPEN_CLIPPING, check_plugin
from hf_zero.integrations.typed_values import get, put, same
from hf_zero.observe import warn_once

CLIPPING = "gradient_clipping"
_OPTIMIZER, _SCHEDULER = "optimizer.params.", "scheduler.params."
# Arguments of DeepSpeedPlugin and their keys. Not listed: an argument whose key has no effect (gathering).
_PLUGIN = {
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIPPING,
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
}
_FOLDERS = {
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}
# Variables by which `accelerate launch` passes its flags to the ranks, and the types of their values.
_FLAGS: dict[str, tuple[str, type]] = {
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", float),
    "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", int),
    "offload_optimizer_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", str),
    "offload_param_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", str),
    "offload_optimizer_nvme_path": ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", str),
    "offload_param_nvme_path": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", str),
}
# Keys that accelerate fills from values of a script: the place in the script, and the values that mean "not given".
_GIVEN: dict[str, tuple[str, tuple[Any, ...]]] = {
    ACCUMULATION: ("Accelerator(gradient_accumulation_steps)", (1,)),
    "bf16.enabled": ('Accelerator(mixed_precision="bf16")', (False,)),
    "fp16.enabled": ('Accelerator(mixed_precision="fp16")', (False,)),
    f"{_OPTIMIZER}lr": ("DummyOptim(lr)", (0.001,)),
    f"{_OPTIMIZER}weight_decay": ("DummyOptim(weight_decay)", (0,)),
    f"{_SCHEDULER}warmup_max_lr": ("the lr of DummyScheduler's optimizer", (0.001,)),
    f"{_SCHEDULER}warmup_num_steps": ("DummyScheduler(warmup_num_steps)", (0, 1)),
    f"{_SCHEDULER}total_num_steps": ("DummyScheduler(total_num_steps), for one process", ()),
}
_TYPES_OF = {  # key -> scheduler types that have it
    f"{_OPTIMIZER}betas": ("Adam", "AdamW"),
    f"{_OPTIMIZER}eps": ("Adam", "AdamW"),
    f"{_SCHEDULER}warmup_max_lr": ("WarmupLR", "WarmupDecayLR"),
    f"{_SCHEDULER}warmup_num_steps": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    f"{_SCHEDULER}total_num_steps": ("WarmupDecayLR", "WarmupCosineLR"),
}
# Keys that a section may lack, and the training arguments that give their values.
_ARGUMENTS = {
    f"{_OPTIMIZER}lr": ("learning_rate",),
    f"{_OPTIMIZER}weight_decay": ("weight_decay",),
    f"{_OPTIMIZER}betas": ("adam_beta1", "adam_beta2"),
    f"{_OPTIMIZER}eps": ("adam_epsilon",),
    f"{_SCHEDULER}warmup_max_lr": ("learning_rate",),
}
_IN_CODE = "_hf_zero_in_code"  # attribute of a plugin under construction: keys of its arguments
_FILLED = "_hf_zero_filled"  # attribute of a plugin: keys that were "auto" until accelerate filled them

_FOUND = "_hf_zero_found"  # attribute of a plugin: contradictions found so far, while they are collected
_ABSENT = "_hf_zero_absent"  # attribute of a plugin: the 1 of gradient_accumulation_steps is neither the JSON's nor the script's
_LAUNCHED = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_REMEDY = (
    "Set one of the two: write \"auto\" for the key (or remove it) to use the script's value, or use the configuration's value in the "
    "script"
)


def make_plugin(method: Callable[..., None], plugin: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedPlugin.__post_init__``: check the configuration, and let arguments count for keys that it lacks.

    accelerate writes 1 for a missing ``gradient_accumulation_steps``, and scripts read it from the plugin; the Accelerator's number
    replaces it in ``fill_match``.

    Raises:
        ConfigError: The configuration has mistakes, or an argument contradicts it.
    """
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    absent, launched = False, plugin.hf_ds_config is None or not getattr(plugin, "_config_in_code", True)
    source = plugin.hf_ds_config if plugin.hf_ds_config is not None else os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if isinstance(source, (dict, HfDeepSpeedConfig)) or (isinstance(source, str) and source != "none"):
        plugin.hf_ds_config = source if isinstance(source, HfDeepSpeedConfig) else HfDeepSpeedConfig(source)
        if not hasattr(plugin.hf_ds_config, "mismatches"):  # TrainingArguments checks its own configuration
            check_plugin(plugin.hf_ds_config.config)
        config = plugin.hf_ds_config.config
        if absent := ACCUMULATION not in config:
            config[ACCUMULATION] = "auto"  # a number of the plugin's own argument fills it
        _open_keys(plugin, config, launched)
    setattr(plugin, _IN_CODE, frozenset(key for name, key in _PLUGIN.items() if getattr(plugin, name) not in (None, "auto")))
    try:
        with _all_contradictions(plugin):
            method(plugin, *args, **kwargs)
    finally:
        delattr(plugin, _IN_CODE)
    if plugin.gradient_clipping == 0 and CLIPPING not in plugin.deepspeed_config:
        put(plugin.deepspeed_config, CLIPPING, 0.0)  # accelerate leaves a 0 out, and the key's default is 1
    if absent and plugin.get_value(ACCUMULATION) == "auto":
        put(plugin.deepspeed_config, ACCUMULATION, 1)
        setattr(plugin, _ABSENT, True)


def _open_keys(plugin: Any, config: dict[str, Any], launched: bool) -> None:
    """Write "auto" for keys that the configuration lacks and an argument gives: accelerate fills "auto" alone, and drops other arguments.

    Args:
        plugin: The plugin under construction.
        config: Its configuration, which is changed.
        launched: Whether `accelerate launch` gave the configuration file. Its flags then count as arguments. The file's value is used if a
            flag contradicts it, as in accelerate; a warning names both.
    """
    if not isinstance(config.get("zero_optimization"), dict):
        return  # accelerate reports that the section is missing
    for name, key in (_PLUGIN | _FOLDERS).items():
        variable, kind = _FLAGS.get(name, ("", str))
        value, flag = getattr(plugin, name), os.environ.get(variable, "none") if launched else "none"
        value = value if value is not None or flag in ("none", "auto") else kind(flag)
        found = get(config, key)
        on_disk = name not in _FOLDERS or get(config, key.replace("nvme_path", "device")) in ("nvme", "auto")
        if value in (None, "auto", "none") or not on_disk:
            continue
        if found is None:
            put(config, key, "auto")
        elif getattr(plugin, name) is None and found != "auto" and not same(found, value):
            warn_once(
                f"{key} is {found!r} in the configuration file, but --{name} of `accelerate launch` is {value!r}: the file's value is "
                'used, as in accelerate. Remove the flag, or write "auto" for the key in the file'
            )


def start_accelerator(method: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``Accelerator.__init__``: let the script's number of micro-steps count, which accelerate drops for the launcher's.

    `accelerate config` asks for the number and writes 1 if the question is left unanswered: that 1 gives way. A 1 of the script is its
    default.

    Raises:
        ConfigError: The launcher has another number than 1 and than the script's; the message names both.
    """
    given = inspect.signature(method).bind_partial(accelerator, *args, **kwargs).arguments
    steps, launched, plugin = given.get(ACCUMULATION, 1), os.environ.get(_LAUNCHED, "auto"), given.get("deepspeed_plugin")
    in_use = plugin is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true")
    if in_use and steps != 1 and launched not in ("auto", str(steps)):
        if launched != "1" or plugin is not None:  # a plugin has read the variable already
            raise ConfigError(
                f"{ACCUMULATION} is {launched} in {_LAUNCHED}, which `accelerate launch` sets from its configuration file or flag, but "
                f"Accelerator({ACCUMULATION}) is {steps}. Remove the key from `deepspeed_config` in that file to use the script's number "
                "(or give the same number in both)"
            )
        os.environ[_LAUNCHED] = str(steps)
        warn_once(f"{ACCUMULATION} is {steps}, as in Accelerator(); the 1 of the launcher, accelerate config's default, is not used")
    method(accelerator, *args, **kwargs)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and is_switched_on() and accelerator.distributed_type.startswith(("MULTI_", "NO")):
        warn_once(
            f"ZeRO is off, although {SWITCH} is {os.environ[SWITCH]}: no DeepSpeed configuration has reached this Accelerator, whose "
            f"distributed type is {accelerator.distributed_type.value} on {ranks} processes. Start with `accelerate launch --use_deepspeed "
            "--zero_stage 3` (or --deepspeed_config_file ds.json, or the file that `accelerate config` writes), or give "
            "TrainingArguments(deepspeed=...) or Accelerator(deepspeed_plugin=hf_zero.ZeroPlugin(stage=3))"
        )


def fill_match(
    method: Callable[..., None], plugin: Any, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
) -> None:
    """Replace ``DeepSpeedPlugin.fill_match``: report a value of the script that contradicts the configuration's.

    A key on "auto" that accelerate has no value for (``pipeline.micro_batches``) is left to hf_zero's resolver, except the rate or the
    decay of an optimizer of which the other is given.

    Raises:
        ValueError: One of these two is missing.
        ConfigError: The two values differ, and nothing collects contradictions (``_all_contradictions``); the message names both.
    """
    if ds_key_long == ACCUMULATION and plugin.__dict__.pop(_ABSENT, False):
        put(plugin.deepspeed_config, ACCUMULATION, "auto")
    written = plugin.get_value(ds_key_long)
    half_given = ds_key_long.startswith(_OPTIMIZER) and any(key.startswith(_OPTIMIZER) for key in kwargs)
    if ds_key_long not in kwargs and written == "auto" and not half_given:
        return
    trainers = callers.running(methods.TRAIN) if written == "auto" and ds_key_long == ACCUMULATION else []
    if trainers and ds_key_long in kwargs:  # Trainer accumulates by itself, and its Accelerator has 1
        kwargs[ds_key_long] = trainers[0].caller.args.gradient_accumulation_steps
    known = len(mismatches or ())
    method(plugin, ds_key_long, mismatches, must_match, **kwargs)
    if ds_key_long == ACCUMULATION and not hasattr(plugin, _IN_CODE):
        _accumulate_as_configured(plugin.get_value(ACCUMULATION))
    value = kwargs.get(ds_key_long)
    if value is None or written is None or same(written, value):
        return
    in_code = getattr(plugin, _IN_CODE, None)  # None once the plugin is made
    if written == "auto":
        if in_code is None:
            plugin.__dict__.setdefault(_FILLED, set()).add(ds_key_long)
        return
    if in_code is not None:
        given = f"DeepSpeedPlugin({next(name for name, key in _PLUGIN.items() if key == ds_key_long)})" if ds_key_long in in_code else ""
    else:
        given, absent = _GIVEN.get(ds_key_long, ("", ()))
        given = "" if value in absent else given
    if not given:
        return
    if mismatches is not None:
        del mismatches[known:]  # accelerate's sentence about the same two values
    if (found := plugin.__dict__.get(_FOUND)) is None:
        raise ConfigError(contradiction(ds_key_long, written, given, value))
    found.append(_both(ds_key_long, written, given, value))


@contextmanager
def _all_contradictions(plugin: Any) -> Iterator[None]:
    """Collect the contradictions that ``fill_match`` finds in the body, and raise one error that lists them.

    Raises:
        ConfigError: Some were found; accelerate's own findings are listed with them.
    """
    found: list[str] = []
    plugin.__dict__[_FOUND] = found
    try:
        yield
    except ValueError as error:
        if not found:
            raise
        found.append(str(error))
    finally:
        del plugin.__dict__[_FOUND]
    if found:
        raise ConfigError(f"{found[0]}. {_REMEDY}" if len(found) == 1 else "\n".join([*found, _REMEDY]))


def _accumulate_as_configured(steps: Any) -> None:
    """Set the configuration's number of micro-steps for ``Accelerator.accumulate``; accelerate does it itself from 1.8 on."""
    from accelerate.state import GradientState
    from accelerate.utils import compare_versions

    if isinstance(steps, int) and compare_versions("accelerate", "<", "1.8"):
        GradientState().plugin_kwargs["num_steps"] = steps


def process_config(method: Callable[..., None], plugin: Any, prefix: str = "", *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedPlugin.deepspeed_config_process``: values of the script also fill keys that a section lacks, not only "auto"."""
    for key, value in _values_of_script(kwargs).items() if not prefix else ():
        section = key.partition(".params.")[0]
        kind = plugin.get_value(f"{section}.type")
        if section in plugin.deepspeed_config and plugin.get_value(key) is None and kind in _TYPES_OF.get(key, (kind,)):
            put(plugin.deepspeed_config, key, value)
            if key in _ARGUMENTS and callers.running(methods.TRAIN):
                warn_once(
                    f"the configuration has the section {section!r} without {key}: Trainer's {' and '.join(_ARGUMENTS[key])} "
                    f"({value}) is used. DeepSpeed would use its own default; to do so here, write it into the configuration"
                )
    with nullcontext() if prefix else _all_contradictions(plugin):
        method(plugin, prefix, *args, **kwargs)


def _values_of_script(given: dict[str, Any]) -> dict[str, Any]:
    """Return the script's values for optimizer and schedule, by keys of the configuration.

    Args:
        given: Values that accelerate reads from ``DummyOptim`` and ``DummyScheduler``. Trainer makes both without values, so that its
            training arguments count instead, unless they are at their defaults: a configuration that says nothing, with arguments that say
            nothing, trains as in DeepSpeed.
    """
    values = {
        key: given[key]
        for key, (_, absent) in _GIVEN.items()
        if key.startswith((_OPTIMIZER, _SCHEDULER)) and given.get(key) is not None and given[key] not in absent
    }
    for call in callers.running(methods.TRAIN):
        defaults = {field.name: field.default for field in dataclasses.fields(call.caller.args)}
        for key, names in _ARGUMENTS.items():
            found = [getattr(call.caller.args, name) for name in names]
            if found != [defaults[name] for name in names]:
                values[key] = found if len(found) > 1 else found[0]
    return values


def use_scaler(accelerator: Any) -> None:
    """Fill keys of ``fp16`` that the configuration lacks with the script's ``GradScalerKwargs``, which accelerate leaves out.

    Raises:
        ConfigError: The configuration has another value.
        UnsupportedError: The engine's loss scale has no such option, or cannot have this value.
    """
    handler, plugin = accelerator.scaler_handler, accelerator.deepspeed_plugin
    if handler is None or accelerator.mixed_precision != "fp16":
        return
    for name, value in handler.to_kwargs().items():  # without defaults
        power = math.log2(value) if name == "init_scale" and value > 0 else 0.5
        if name == "growth_interval":
            key = "fp16.loss_scale_window"
        elif name == "init_scale" and power == int(power) >= 0:
            key, value = "fp16.initial_scale_power", int(power)
        else:
            raise UnsupportedError(
                f"GradScalerKwargs({name}={value!r}) has no effect on the engine's loss scale: it starts at a power of two (init_scale), "
                "doubles after growth_interval steps and halves after an overflow. Remove it, or set the keys of fp16 in the configuration"
            )
        if (static := plugin.get_value("fp16.loss_scale")) not in (None, 0, "auto"):
            raise ConfigError(contradiction("fp16.loss_scale", static, f"GradScalerKwargs({name})", value))
        written = plugin.get_value(key)
        if written in (None, "auto"):
            put(plugin.deepspeed_config, key, value)
        elif not same(written, value):
            raise ConfigError(contradiction(key, written, f"GradScalerKwargs({name})", value))


def require_own_batch(engine: Engine) -> None:
    """Compare the loader's batch size with the configuration's at the first backward of a loop over accelerate, and use it for "auto".

    If ``TrainingArguments`` have filled the configuration, nothing is compared, because a trainer may divide batches.

    Raises:
        ConfigError: The configuration has another ``train_micro_batch_size_per_gpu``.
    """
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils.deepspeed import HfDeepSpeedConfig, get_active_deepspeed_plugin

    plugin, loader = get_active_deepspeed_plugin(AcceleratorState()), GradientState().active_dataloader
    if type(plugin.hf_ds_config) is not HfDeepSpeedConfig:
        return
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    if not isinstance(size, int) or isinstance(size, bool):
        return
    if getattr(sampler, "split_batches", False) or getattr(loader, "split_batches", False):
        size //= getattr(sampler, "num_processes", None) or AcceleratorState().num_processes
    written = engine.resolved.batch.micro
    if size == written:
        return
    if MICRO in plugin.__dict__.get(_FILLED, ()) or plugin.get_value(MICRO) in (None, "auto"):
        set_train_micro_batch_size(engine, size)
        return
    raise ConfigError(contradiction(MICRO, written, "the DataLoader (batch_size, for one process)", size))


def written_clipping(engine: Engine, plugin: Any) -> float | None:
    """Return the clipping norm that the configuration or its optimizer sets; None if it is "auto" or absent."""
    own = getattr(engine.optimizer.inner, "max_grad_norm", None)  # type: ignore[union-attr]
    if own:
        return float(own)
    trainers = hasattr(plugin.hf_ds_config, "mismatches")  # transformers fills its configuration itself
    filled = getattr(plugin.hf_ds_config, OPEN_CLIPPING) if trainers else CLIPPING in plugin.__dict__.get(_FILLED, ())
    written = None if filled else plugin.get_value(CLIPPING)
    return None if written in (None, "auto") else float(written)


def contradiction(key: str, written: Any, given: str, value: Any) -> str:
    """Return the message about a key whose value differs from one of the script."""
    return f"{_both(key, written, given, value)}. {_REMEDY}"


def _both(key: str, written: Any, given: str, value: Any) -> str:
    return f"{key} is {written!r} in the configuration, but {given} is {value!r}"
