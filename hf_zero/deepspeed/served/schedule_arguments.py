"""Add command-line arguments to scripts that set a learning-rate schedule and its parameters."""

from __future__ import annotations

import argparse

_ARGUMENTS: tuple[tuple[str, type, float | str | None, str], ...] = (
    ("lr_range_test_min_lr", float, 1e-3, "first learning rate"),
    ("lr_range_test_step_rate", float, 1.0, "growth per interval"),
    ("lr_range_test_step_size", int, 1000, "steps of an interval"),
    ("cycle_first_step_size", int, 1000, "steps of the first half of the cycle"),
    ("cycle_first_stair_count", int, -1, "stairs of the first half"),
    ("cycle_second_step_size", int, -1, "steps of the second half"),
    ("cycle_second_stair_count", int, -1, "stairs of the second half"),
    ("decay_step_size", int, 1000, "steps of a decay interval"),
    ("cycle_min_lr", float, 0.01, "lowest learning rate of the cycle"),
    ("cycle_max_lr", float, 0.1, "highest learning rate of the cycle"),
    ("decay_lr_rate", float, 0.0, "decay of the learning rate per interval"),
    ("cycle_min_mom", float, 0.8, "lowest momentum of the cycle"),
    ("cycle_max_mom", float, 0.9, "highest momentum of the cycle"),
    ("decay_mom_rate", float, 0.0, "decay of the momentum per interval"),
    ("warmup_min_lr", float, 0.0, "learning rate at the start of the warm-up"),
    ("warmup_max_lr", float, 0.001, "learning rate at the end of the warm-up"),
    ("warmup_num_steps", int, 1000, "steps of the warm-up"),
    ("warmup_type", str, "log", "log or linear"),
    ("warmup_min_ratio", float, 0.01, "fraction of the learning rate at the start of WarmupCosineLR's warm-up"),
    ("cos_min_ratio", float, 0.01, "fraction of the learning rate at the end of WarmupCosineLR"),
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and one argument per parameter of the schedules, with its name in the configuration.

    Args:
        parser: The script's parser; it is changed.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("Learning rate schedule", "schedules of the configuration's scheduler section")
    group.add_argument("--lr_schedule", type=str, default=None, help="name of the schedule")
    # Accept it as a flag and with a value, because versions of DeepSpeed differ.
    text = "grow at the end of intervals only"
    group.add_argument("--lr_range_test_staircase", type=_truth, nargs="?", const=True, default=False, help=text)
    group.add_argument("--cycle_momentum", default=False, action="store_true", help="cycle the momentum too")
    for name, kind, default, text in _ARGUMENTS:
        group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def _truth(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")
