"""A DeepSpeed configuration is checked where it is first seen: before the ranks meet, and before data and models are loaded.

[Note: early checks] Four places see a configuration before an engine does: `accelerate launch --deepspeed_config_file`, before it starts
ranks; `TrainingArguments(deepspeed=...)`; accelerate's `DeepSpeedPlugin`; and `HfDeepSpeedConfig`, which all of these read it with. What
``initialize`` would refuse in it later is refused there, all findings in one error, those of transformers about its own arguments
among them. Nothing is asked of other ranks, which read the same file. What can be known only later stays with ``initialize``: values that
come from a model, and the number of ranks that share their samples where a script tells it to its Accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config.batch import TOTAL
from hf_zero.config.mesh import claims_of_config, claims_of_environment, claims_of_sizes, solve
from hf_zero.config.problems import Problems
from hf_zero.config.read import read_config
from hf_zero.config.resolve import analyse
from hf_zero.errors import HfZeroError
from hf_zero.integrations.typed_values import config_of_launcher
from hf_zero.launch.placement import find_placement
from hf_zero.system.last_words import tell_launcher

# Training arguments that transformers compares with a configuration when it has made them, under the names of `config.auto`.
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
"""Attribute of a class of training arguments that reports what is wrong in its configuration by itself."""


def read_source(method: Callable[..., None], holder: Any, config_file_or_dict: Any) -> None:
    """``HfDeepSpeedConfig(...)``, which reads as ``initialize`` does: comments are allowed, and what cannot be read is one error.

    Args:
        method: The method itself.
        holder: The object that is being made.
        config_file_or_dict: A path, a dict, JSON text or base64 text.

    Raises:
        ConfigError: There is no such file, or it is no JSON.
    """
    if not isinstance(config_file_or_dict, Mapping):
        tell_launcher()
        config_file_or_dict = read_config(config_file_or_dict)
    method(holder, config_file_or_dict)


def make_arguments(method: Callable[..., None], arguments: Any) -> None:
    """``TrainingArguments.__post_init__``; checks the configuration that they name, or the launcher's, before devices are looked for.

    Arguments that ask for evaluation alone are not compared with the configuration: transformers does that when it trains.

    Args:
        method: The method itself.
        arguments: The training arguments.

    Raises:
        ConfigError: Something is wrong; all findings.
    """
    source = arguments.deepspeed or _source_of_launcher()
    if source and not getattr(arguments, CHECKS_ITSELF, False):
        tell_launcher()
        values = {name: getattr(arguments, name, None) for name in _ARGUMENTS}
        sources = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for name in ("fp16", "bf16"):
            sources[name] = bool(getattr(arguments, name, False) or getattr(arguments, f"{name}_full_eval", False))
        check(source, ranks(), sources if _trains(arguments) else {}, getattr(arguments, "parallelism_config", None), all_known=True)
    method(arguments)


def check_plugin(source: Any) -> None:
    """Checks the configuration of a ``DeepSpeedPlugin``.

    Args:
        source: Its configuration, which is not changed.

    Raises:
        ConfigError: Something is wrong; all findings.
    """
    tell_launcher()
    check(source, ranks(), {}, None)


def check_launch(options: Any) -> None:
    """Checks the file that `accelerate launch` is to give to its ranks, before they start.

    Args:
        options: Its command line, with what the file of `accelerate config` adds.

    Raises:
        ConfigError: Something is wrong; all findings.
    """
    source = getattr(options, "deepspeed_config_file", None)
    elsewhere = (getattr(options, "num_machines", None) or 1) > 1  # what is on the other hosts is theirs to say
    if getattr(options, "use_deepspeed", False) and source not in (None, "", "none") and not (elsewhere and not os.path.exists(source)):
        tell_launcher()
        check(source, getattr(options, "num_processes", None) or 1, {}, None)


def check(source: Any, world: int, sources: Mapping[str, Any], parallelism_config: Any, all_known: bool = False) -> None:
    """Raises one error with all that is wrong in a configuration, as far as that can be known without a model.

    Args:
        source: As ``initialize`` takes it.
        world: Ranks.
        sources: Values that "auto" stands for and that written values must not contradict, by the names of ``config.auto``.
        parallelism_config: accelerate's, with the sizes of axes.
        all_known: Nobody will give further sizes of axes.

    Raises:
        ConfigError: Something is wrong.
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
    """Ranks of the run, from the launcher's variables, where no group has been made."""
    placement = find_placement(os.environ) if "WORLD_SIZE" not in os.environ else None
    number = str(placement.world) if placement is not None else os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdigit() and int(number) > 0 else 1


def _replicas(config: dict[str, Any], world: int, parallelism_config: Any, all_known: bool) -> list[int]:
    """Return how many ranks, or groups of ranks, may train on samples of their own; the most likely number first."""
    claims = [*claims_of_config(config), *claims_of_sizes(parallelism_config), *claims_of_environment(os.environ)]
    divisors = [number for number in range(world, 0, -1) if world % number == 0]
    try:
        likely = solve(claims, world).replicas
    except HfZeroError:  # said where the Accelerator is made, which knows all sizes
        return divisors
    # Totals may be given over all ranks: `initialize` sees to that.
    return list(dict.fromkeys([likely, world, *([] if all_known else divisors)]))


def _source_of_launcher() -> Any:
    return config_of_launcher() if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" else None


def _trains(arguments: Any) -> bool:
    """Return whether training arguments do not say that they are for evaluation alone."""
    evaluates = arguments.do_predict or (
        arguments.do_eval and str(getattr(arguments.eval_strategy, "value", arguments.eval_strategy)) == "no"
    )
    return bool(arguments.do_train or not evaluates)
