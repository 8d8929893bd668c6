"""DeepSpeed's constants for the names of schedules and of their parameters, and the script arguments that set them."""

from __future__ import annotations

import argparse

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MOMENTUM = "cycle_momentum"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

NAMES: tuple[str, ...] = tuple(name for name in dir() if name.isupper())
"""Every constant above."""

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
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--lr_schedule`` and one argument per parameter of the schedules, under their names in the configuration.

    Args:
        parser: The script's parser; it is changed.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("Learning rate schedule", "schedules of the configuration's scheduler section")
    group.add_argument(f"--{LR_SCHEDULE}", type=str, default=None, help="name of the schedule")
    group.add_argument(f"--{LR_RANGE_TEST_STAIRCASE}", type=_truth, default=False, help="grow at the end of intervals only")
    group.add_argument(f"--{CYCLE_MOMENTUM}", default=False, action="store_true", help="cycle the momentum too")
    for name, kind, default, text in _ARGUMENTS:
        group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def _truth(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")
