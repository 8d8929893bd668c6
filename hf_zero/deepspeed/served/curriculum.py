"""Provide the schedule of curriculum learning, for scripts that shorten or choose samples themselves; the engine does not use it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Final

from hf_zero.errors import ConfigError

_OF_TIME: Final = ("total_curriculum_step", "difficulty_step")
_NEEDED: Final[dict[str, tuple[str, ...]]] = {  # keys of schedule_config
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": _OF_TIME,
    "fixed_root": (*_OF_TIME, "root_degree"),
    "custom": (),
}


class CurriculumScheduler:
    """A schedule of the largest difficulty of samples by step, in any unit, for example tokens of a sequence.

    Args:
        config: ``min_difficulty``, ``max_difficulty``, ``schedule_type`` and ``schedule_config``, as in DeepSpeed's sections of curricula.
            ``fixed_linear`` rises from the minimum to the maximum in ``total_curriculum_step`` steps, in multiples of
            ``difficulty_step``; ``fixed_root`` rises with the ``root_degree``-th root of the share of steps; ``fixed_discrete`` has
            ``difficulty[i]`` up to step ``max_step[i]``, with one more difficulty than steps; ``custom`` calls the function of
            ``set_custom_get_difficulty``.

    Attributes:
        state: The current difficulty (``current_difficulty``) and the settings, as returned by ``get_state``.

    Raises:
        ConfigError: A key is missing, or the schedule is unknown.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _require(config, ("min_difficulty", "max_difficulty", "schedule_type"), "")
        kind, schedule = config["schedule_type"], config.get("schedule_config", {})
        if kind not in _NEEDED:
            raise ConfigError(f"CurriculumScheduler: schedule_type {kind!r}; {', '.join(_NEEDED)} are allowed")
        _require(schedule, _NEEDED[kind], "schedule_config.")
        if kind == "fixed_discrete" and len(schedule["difficulty"]) != len(schedule["max_step"]) + 1:
            raise ConfigError(
                "CurriculumScheduler: schedule_config.difficulty must have one entry more than max_step: its last entry holds "
                "for all later steps"
            )
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": kind,
            "schedule_config": schedule,
        }
        self.custom_get_difficulty: Callable[[int], Any] | None = None

    def get_current_difficulty(self) -> Any:
        """Return the current difficulty, the last result of ``update_difficulty``; the lowest difficulty at first."""
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: Any) -> None:
        """Set the current difficulty."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Set the function of a ``custom`` schedule, from steps to difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        """Return all state that a checkpoint needs."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the result of ``get_state``."""
        self.state = state

    def get_difficulty(self, global_steps: int) -> Any:
        """Return the difficulty after ``global_steps`` steps.

        Raises:
            ConfigError: A ``custom`` schedule has no function.
        """
        kind, schedule = self.state["schedule_type"], self.state["schedule_config"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise ConfigError("CurriculumScheduler: schedule_type 'custom' needs set_custom_get_difficulty(function)")
            return self.custom_get_difficulty(global_steps)
        if kind == "fixed_discrete":
            return schedule["difficulty"][bisect_left(schedule["max_step"], global_steps)]
        share = (global_steps / schedule["total_curriculum_step"]) ** (1 / schedule.get("root_degree", 1) if kind == "fixed_root" else 1)
        least, most = self.state["min_difficulty"], self.state["max_difficulty"]
        reached = math.floor(least + share * (most - least))
        return min(reached - reached % schedule["difficulty_step"], most)

    def update_difficulty(self, global_steps: int) -> Any:
        """Set ``get_difficulty(global_steps)`` as the current difficulty and return it; the highest one stays once it is reached."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]


def _require(config: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    missing = [where + key for key in keys if key not in config]
    if missing:
        raise ConfigError(f"CurriculumScheduler: {', '.join(missing)} must be given")
