"""Script arguments that set a learning-rate schedule and its parameters, and what DeepSpeed reads off them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hf_zero.deepspeed.served.schedule_names import (
    COS_MIN_RATIO,
    CYCLE_FIRST_STAIR_COUNT,
    CYCLE_FIRST_STEP_SIZE,
    CYCLE_MAX_LR,
    CYCLE_MAX_MOM,
    CYCLE_MIN_LR,
    CYCLE_MIN_MOM,
    CYCLE_MOMENTUM,
    CYCLE_SECOND_STAIR_COUNT,
    CYCLE_SECOND_STEP_SIZE,
    DECAY_LR_RATE,
    DECAY_MOM_RATE,
    DECAY_STEP_SIZE,
    LR_RANGE_TEST,
    LR_RANGE_TEST_MIN_LR,
    LR_RANGE_TEST_STAIRCASE,
    LR_RANGE_TEST_STEP_RATE,
    LR_RANGE_TEST_STEP_SIZE,
    LR_SCHEDULE,
    ONE_CYCLE,
    WARMUP_COSINE_LR,
    WARMUP_DECAY_LR,
    WARMUP_LOG_RATE,
    WARMUP_LR,
    WARMUP_MAX_LR,
    WARMUP_MIN_LR,
    WARMUP_MIN_RATIO,
    WARMUP_NUM_STEPS,
    WARMUP_TYPE,
)
from hf_zero.optim.schedules import VALID_LR_SCHEDULES

_ARGUMENTS: tuple[tuple[str, type, float | str | None, str], ...] = (
    (LR_RANGE_TEST_MIN_LR, float, 1e-3, "first learning rate"),
    (LR_RANGE_TEST_STEP_RATE, float, 1.0, "growth per interval"),
    (LR_RANGE_TEST_STEP_SIZE, int, 1000, "steps of an interval"),
    (CYCLE_FIRST_STEP_SIZE, int, 1000, "steps of the first half of the cycle"),
    (CYCLE_FIRST_STAIR_COUNT, int, -1, "stairs of the first half"),
    (CYCLE_SECOND_STEP_SIZE, int, -1, "steps of the second half"),
    (CYCLE_SECOND_STAIR_COUNT, int, -1, "stairs of the second half"),
    (DECAY_STEP_SIZE, int, 1000, "steps of a decay interval"),
    (CYCLE_MIN_LR, float, 0.01, "lowest learning rate of the cycle"),
    (CYCLE_MAX_LR, float, 0.1, "highest learning rate of the cycle"),
    (DECAY_LR_RATE, float, 0.0, "decay of the learning rate per interval"),
    (CYCLE_MIN_MOM, float, 0.8, "lowest momentum of the cycle"),
    (CYCLE_MAX_MOM, float, 0.9, "highest momentum of the cycle"),
    (DECAY_MOM_RATE, float, 0.0, "decay of the momentum per interval"),
    (WARMUP_MIN_LR, float, 0.0, "learning rate the warm-up starts from"),
    (WARMUP_MAX_LR, float, 0.001, "learning rate the warm-up ends at"),
    (WARMUP_NUM_STEPS, int, 1000, "steps of the warm-up"),
    (WARMUP_TYPE, str, WARMUP_LOG_RATE, "log or linear"),
    (WARMUP_MIN_RATIO, float, 0.01, "part of the learning rate that the warm-up of WarmupCosineLR starts from"),
    (COS_MIN_RATIO, float, 0.01, "part of the learning rate that WarmupCosineLR ends at"),
)
_RANGE_TEST = (LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE)
_LIKE_THE_RISE = (CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT)
"""Arguments whose -1 means that they were not given: the schedule has a default of its own."""
_ONE_CYCLE = (
    *(CYCLE_FIRST_STEP_SIZE, *_LIKE_THE_RISE, DECAY_STEP_SIZE, CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE),
    *(CYCLE_MOMENTUM, CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE),
)
_WARMUP = (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE)
_COSINE = (WARMUP_MIN_RATIO, COS_MIN_RATIO, WARMUP_NUM_STEPS, WARMUP_TYPE)
_PEAKS = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR, WARMUP_LR: WARMUP_MAX_LR, WARMUP_DECAY_LR: WARMUP_MAX_LR}
"""Parameter of each schedule that is the learning rate of the run; WarmupCosineLR has none."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--lr_schedule`` and one argument per parameter of the schedules, under their names in the configuration.

    Args:
        parser: The script's parser; it is changed.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("Learning rate schedule", "schedules of the configuration's scheduler section")
    group.add_argument(f"--{LR_SCHEDULE}", type=str, default=None, help="name of the schedule")
    # Both as a flag and with a value: DeepSpeed's argument has been either.
    text = "grow at the end of intervals only"
    group.add_argument(f"--{LR_RANGE_TEST_STAIRCASE}", type=_truth, nargs="?", const=True, default=False, help=text)
    group.add_argument(f"--{CYCLE_MOMENTUM}", default=False, action="store_true", help="cycle the momentum too")
    for name, kind, default, text in _ARGUMENTS:
        group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def _truth(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The arguments of schedules on this process' command line, and its other words."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes the arguments of LRRangeTest into ``params``."""
    _take(args, params, _RANGE_TEST)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes the arguments of OneCycle into ``params``; those that were not given and have no default stay away."""
    _take(args, params, _ONE_CYCLE)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:  # noqa: N802  (DeepSpeed's name)
    """Writes the arguments of WarmupLR and WarmupDecayLR into ``params``."""
    _take(args, params, _WARMUP)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes the arguments of the three above into ``params``."""
    _take(args, params, (*_RANGE_TEST, *_ONE_CYCLE, *_WARMUP))


def _take(args: argparse.Namespace, params: dict[str, Any], names: tuple[str, ...]) -> None:
    given = {name: getattr(args, name, None) for name in names}
    params.update({name: value for name, value in given.items() if value is not None and not (name in _LIKE_THE_RISE and value == -1)})


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The ``scheduler`` section that the arguments describe, and None; or None and what is wrong with them."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} is not among the arguments"
    if name not in VALID_LR_SCHEDULES:
        return None, f"--{LR_SCHEDULE} is {name!r}; known: {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _take(args, params, {LR_RANGE_TEST: _RANGE_TEST, ONE_CYCLE: _ONE_CYCLE, WARMUP_COSINE_LR: _COSINE}.get(name, _WARMUP))
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The learning rate in a ``scheduler`` section, and an empty text; or None and why there is none."""
    missing = [key for key in ("type", "params") if key not in config]
    if missing:
        return None, f"the scheduler section has no {missing[0]}"
    name = config["type"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"scheduler.type is {name!r}; known: {', '.join(VALID_LR_SCHEDULES)}"
    if name not in _PEAKS:
        return None, f"{name} takes the learning rates of the optimizer's groups; it has none of its own"
    return config["params"][_PEAKS[name]], ""
