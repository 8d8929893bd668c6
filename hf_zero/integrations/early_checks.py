"""Check a DeepSpeed configuration as soon as a library reads it: before any collective, and before data and models are loaded.

[Note: early checks] Four places read a configuration before an engine does: `accelerate launch --deepspeed_config_file`, before it starts
ranks; `TrainingArguments(deepspeed=...)`; accelerate's `DeepSpeedPlugin`; and `HfDeepSpeedConfig`, through which all of these read. The
mistakes that ``initialize`` would report later are reported there, all in one error, together with the mismatches that transformers finds
in its own arguments. The check is local, because all ranks read the same file. ``initialize`` still checks values that are known only
later: those that come from a model, and the number of ranks that share samples if a script passes it to its Accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config.batch import TOTAL
from hf_zero.config.mesh import AXES, Claim, claims_of_config, claims_of_environment, claims_of_sizes, require_shareable, solve
from hf_zero.config.problems import Problems
from hf_zero.config.read import read_config
from hf_zero.config.resolve import analyse
from hf_zero.errors import HfZeroError
from hf_zero.integrations.typed_values import config_of_launcher
from hf_zero.launch.placement import find_placement
from hf_zero.system.last_words import report_to_launcher

# Training arguments that transformers compares with a configuration, under the names of `config.auto`.
_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "learning_rate",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
)
CHECKS_ITSELF = "hf_zero_checks_itself"
"""Attribute of a class of training arguments that reports the mistakes of its configuration by itself."""
OPEN_CLIPPING = "_hf_zero_open_clipping"
"""Attribute of a ``HfDeepSpeedConfig``: whether ``gradient_clipping`` was "auto" before transformers filled it."""


def read_source(method: Callable[..., None], holder: Any, config_file_or_dict: Any) -> None:
    """Replace ``HfDeepSpeedConfig.__init__``: read the file like ``initialize``, with comments, and raise one error if it is unreadable.

    Args:
        method: The replaced method.
        holder: The ``HfDeepSpeedConfig`` under construction.
        config_file_or_dict: A path, a dict, JSON text or base64 text.

    Raises:
        ConfigError: The file does not exist, or is not JSON.
    """
    if not isinstance(config_file_or_dict, Mapping):
        report_to_launcher()
        config_file_or_dict = read_config(config_file_or_dict)
    method(holder, config_file_or_dict)
    setattr(holder, OPEN_CLIPPING, holder.config.get("gradient_clipping") == "auto")


def make_arguments(method: Callable[..., None], arguments: Any) -> None:
    """Replace ``TrainingArguments.__post_init__``: first check the configuration that they, or the launcher, name.

    If the arguments request evaluation only, they are not compared with the configuration, because transformers compares them only when it
    trains.

    Args:
        method: The replaced method.
        arguments: The training arguments.

    Raises:
        ConfigError: The configuration has mistakes; the message lists all of them.
    """
    source = arguments.deepspeed or _source_of_launcher()
    if source and not getattr(arguments, CHECKS_ITSELF, False):
        report_to_launcher()
        values = {name: getattr(arguments, name, None) for name in _ARGUMENTS}
        sources = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for name in ("fp16", "bf16"):
            sources[name] = bool(getattr(arguments, name, False) or getattr(arguments, f"{name}_full_eval", False))
        check(source, ranks(), sources if _trains(arguments) else {}, getattr(arguments, "parallelism_config", None), all_known=True)
        _check_sizes(source, getattr(arguments, "parallelism_config", None))
    method(arguments)


def check_plugin(source: Any) -> None:
    """Check the configuration of a ``DeepSpeedPlugin``.

    Args:
        source: Configuration of the plugin, which is not changed.

    Raises:
        ConfigError: The configuration has mistakes; the message lists all of them.
    """
    report_to_launcher()
    check(source, ranks(), {}, None)
    _check_sizes(source, None)


def check_launch(options: Any) -> None:
    """Check the configuration file of `accelerate launch` before it starts the ranks.

    Args:
        options: The parsed command line, completed from the file of `accelerate config`.

    Raises:
        ConfigError: The configuration has mistakes; the message lists all of them. Or sizes of axes do not fit the processes.
        UnsupportedError: Axes cannot be combined.
    """
    if not getattr(options, "use_deepspeed", False):
        return
    source, processes = getattr(options, "deepspeed_config_file", None), getattr(options, "num_processes", None)
    elsewhere = (getattr(options, "num_machines", None) or 1) > 1  # the file may exist on the other hosts only
    claims = _claims_of_flags(options)
    if source in (None, "", "none") or (elsewhere and not os.path.exists(source)):
        source = None
    if source is not None:
        report_to_launcher()
        claims = [*claims_of_config(read_config(source)), *claims]
    if processes:  # else accelerate takes as many as there are devices
        require_shareable(claims, processes)
    if source is not None:
        check(source, processes or 1, {}, None)


def check(source: Any, world: int, sources: Mapping[str, Any], parallelism_config: Any, all_known: bool = False) -> None:
    """Raise one error with all mistakes of a configuration that can be found without a model.

    Args:
        source: Configuration as ``initialize`` takes it: path, dict, JSON or base64 text.
        world: Number of ranks.
        sources: Values that replace "auto" and that other values of the configuration must not contradict, by the names of ``config.auto``.
        parallelism_config: accelerate's ParallelismConfig with the sizes of axes, or None.
        all_known: Whether no further sizes of axes will be given later.

    Raises:
        ConfigError: The configuration has mistakes.
    """
    config = read_config(source)
    found: list[Problems] = []
    for replicas in _replicas(config, world, parallelism_config, all_known):
        found.append(analyse(config, world_size=replicas, sources=sources).problems)
        if not any(text.startswith((f"`{TOTAL}`", f"ds {TOTAL}=")) for text in [*found[-1].errors, *found[-1].mismatches]):
            found[-1].raise_all()
            return
    found[0].raise_all()


def ranks() -> int:
    """Return the number of ranks of the run, from the launcher's environment variables; needs no process group."""
    placement = find_placement(os.environ) if "WORLD_SIZE" not in os.environ else None
    number = str(placement.world) if placement is not None else os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdigit() and int(number) > 0 else 1


def _check_sizes(source: Any, parallelism_config: Any) -> None:
    """Raise if sizes of axes that are known already cannot fit the ranks; not in a process outside of a run, which may start ranks later.

    Raises:
        ConfigError: As ``require_shareable``.
        UnsupportedError: As ``require_shareable``.
    """
    if "WORLD_SIZE" in os.environ or find_placement(os.environ) is not None:
        claims = [*claims_of_config(read_config(source)), *claims_of_sizes(parallelism_config), *claims_of_environment(os.environ)]
        require_shareable(tuple(dict.fromkeys(claims)), ranks())


def _claims_of_flags(options: Any) -> list[Claim]:
    """Return the sizes that flags of `accelerate launch`, or the file of `accelerate config`, give."""
    flags = {axis: f"parallelism_config_{axis}_size" for axis in AXES}
    sizes = {axis: getattr(options, flag, None) or 1 for axis, flag in flags.items()}
    return [Claim(axis, size, f"--{flags[axis]}") for axis, size in sizes.items() if size > 1]


def _replicas(config: dict[str, Any], world: int, parallelism_config: Any, all_known: bool) -> list[int]:
    """Return the possible numbers of data-parallel replicas (ranks or groups with their own samples), the most likely one first."""
    claims = [*claims_of_config(config), *claims_of_sizes(parallelism_config), *claims_of_environment(os.environ)]
    divisors = [number for number in range(world, 0, -1) if world % number == 0]
    try:
        likely = solve(claims, world).replicas
    except HfZeroError:  # the Accelerator raises it, which knows all sizes
        return divisors
    # A total may count all ranks; `initialize` corrects it.
    return list(dict.fromkeys([likely, world, *([] if all_known else divisors)]))


def _source_of_launcher() -> Any:
    return config_of_launcher() if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" else None


def _trains(arguments: Any) -> bool:
    """Return False if training arguments request evaluation or prediction only, else True."""
    evaluates = arguments.do_predict or (
        arguments.do_eval and str(getattr(arguments.eval_strategy, "value", arguments.eval_strategy)) == "no"
    )
    return bool(arguments.do_train or not evaluates)
