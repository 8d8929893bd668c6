"""Learning-rate schedules of the ``scheduler`` section: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest.

Each schedule is a function of one integer, ``last_batch_iteration``: -1 before the first ``step()``, then 0, 1, 2, ... The
rate for the present iteration is always in the optimizer's ``param_groups``, from construction on, so the first optimizer
step runs at the rate of iteration -1. Parameter names, defaults and numbers are DeepSpeed's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hf_zero.errors import CheckpointError, ConfigError, StateError
from hf_zero.observe import warn_once
from hf_zero.optim.keywords import at_least, boolean, nearest, number, per_group

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

SECTION = "scheduler.params"
_WARMUP_TYPES = ("log", "linear")


class IterationSchedule(LRScheduler):
    """A schedule that computes every group's rate from ``last_batch_iteration`` alone.

    It is an instance of torch's ``LRScheduler``, but needs only live ``param_groups`` of its optimizer, so it works on wrappers too;
    unlike torch's it does not replace ``optimizer.step``.

    Args:
        optimizer: Any object with ``param_groups``, a list of dicts with ``lr`` (float or tensor).
        last_batch_iteration: The iteration to continue from; -1 starts afresh.

    Attributes:
        last_batch_iteration: The iteration whose rate is set; also readable as torch's ``last_epoch``.
        base_lrs: The rate that each group had before any schedule changed it.

    Raises:
        ConfigError: A parameter is out of its range; raised by subclasses.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        groups = optimizer.param_groups
        for group in groups:
            # Torch's convention: schedules built one after the other share one base rate, even if the first has changed "lr".
            group.setdefault("initial_lr", _as_float(group["lr"]))
        # The same numbers twice: torch declares base_lrs as float or tensor, but the formulas below need floats.
        self._peaks = [_as_float(group["initial_lr"]) for group in groups]
        self.base_lrs = list(self._peaks)
        self.last_batch_iteration = int(at_least(f"{SECTION}.last_batch_iteration", last_batch_iteration, -1))
        self._step_count = 1
        self._last_lr: list[float | torch.Tensor] = []

    @property
    def last_epoch(self) -> int:
        """Return ``last_batch_iteration``; this is torch's name for it."""
        return self.last_batch_iteration

    @last_epoch.setter
    def last_epoch(self, value: int) -> None:
        self.last_batch_iteration = value

    def rates(self, iteration: int) -> list[float]:
        """Return one rate per parameter group for ``iteration`` (-1 or more), without changing any state."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the present iteration, one per parameter group."""
        return list(self.rates(self.last_batch_iteration))

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the rates that are set, one per parameter group; valid from construction on.

        DeepSpeed raises an ``AssertionError`` here before the first step of some schedules, which Trainer logs as rate 0;
        here the rate that the first step will use is known and returned.
        """
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None, *, batch_iteration: int | None = None) -> None:
        """Move to the next iteration, or to the given one, and write its rates into ``param_groups``.

        Args:
            last_batch_iteration: The iteration to move to; None for the next one.
            batch_iteration: The iteration to move to; name of this argument in DeepSpeed's OneCycle and LRRangeTest.
        """
        target = batch_iteration if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = self.last_batch_iteration + 1 if target is None else int(target)
        self._step_count += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration as plain JSON; no other state is saved, so that a changed config takes effect on resuming."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to the saved iteration and write its rates into ``param_groups``.

        Raises:
            CheckpointError: ``last_batch_iteration`` in the state is missing, or is not a whole number of -1 or more.
        """
        iteration = state_dict.get("last_batch_iteration")
        if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < -1:
            raise CheckpointError(
                f"the saved state of {type(self).__name__} has last_batch_iteration {iteration!r} (keys "
                f"{sorted(state_dict)}); a whole number from -1 on is expected: was it saved from another scheduler?"
            )
        self.last_batch_iteration = iteration
        self._apply()

    def _highest(self, key: str, value: object) -> list[float]:
        """Return the highest rate of each group; warn if one number replaces rates that differ between the groups."""
        rates = per_group(f"{SECTION}.{key}", value, len(self.base_lrs))
        if not isinstance(value, (list, tuple)) and len(set(self._peaks)) > 1:
            own = ", ".join(f"{rate:g}" for rate in self._peaks)
            warn_once(
                f"{SECTION}.{key} is {rates[0]:g}, one rate for all {len(rates)} parameter groups: {type(self).__name__} replaces the "
                f"groups' own rates ({own}), as in DeepSpeed. To keep them, set {key} to a list with one rate per group, or leave "
                "the section `scheduler` out and use a scheduler of torch or Trainer."
            )
        return rates

    def _apply(self) -> None:
        """Write the present rates into the groups; subclasses call it at the end of their constructor."""
        groups, rates = self._groups(), self.rates(self.last_batch_iteration)
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = list(rates)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups; raise a ``StateError`` if their number has changed since the schedule was built."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            raise StateError(
                f"{type(self).__name__} was built for {len(self.base_lrs)} parameter groups and the optimizer now has "
                f"{len(groups)}; build the scheduler again after adding groups."
            )
        return groups


class WarmupLR(IterationSchedule):
    """Rise from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``, then a constant rate.

    Args:
        optimizer: Any object with ``param_groups``.
        warmup_min_lr: Rate at iteration 0; a number, or a list with one per group.
        warmup_max_lr: Rate after the warm-up; a number, a list, or None for each group's own rate.
        warmup_num_steps: Length of the warm-up. 1 counts as 2, as in DeepSpeed; so does 0, which HF libraries write for
            "no warm-up".
        warmup_type: ``"log"``: the rise is log(iteration + 1) / log(warmup_num_steps) of the difference; ``"linear"``: iteration /
            warmup_num_steps of it.
        last_batch_iteration: The iteration to continue from.

    Raises:
        ConfigError: A value is out of its range, or a list does not match the groups.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = len(self.base_lrs)
        self.min_lrs = per_group(f"{SECTION}.warmup_min_lr", warmup_min_lr, groups)
        self.max_lrs = self._peaks if warmup_max_lr is None else self._highest("warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps, self.warmup_type = _read_warmup(warmup_num_steps, warmup_type)
        self._apply()

    def rates(self, iteration: int) -> list[float]:
        """Return ``min + (max - min) * fraction`` for each group."""
        way = self._fraction(iteration)
        return [low + (high - low) * way for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _fraction(self, iteration: int) -> float:
        """Return the rate's fraction of the way from the lowest to the highest rate, 0 to 1."""
        return _warmup_fraction(iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a linear fall back to ``warmup_min_lr`` at ``total_num_steps``.

    Args:
        optimizer: Any object with ``param_groups``.
        total_num_steps: Length of the whole schedule in optimizer steps.
        warmup_min_lr: Rate at iteration 0 and at the end; a number or a list.
        warmup_max_lr: Rate after the warm-up; a number or a list.
        warmup_num_steps: Length of the warm-up, as in WarmupLR.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: The iteration to continue from.

    Raises:
        ConfigError: A value is out of its range, or a list does not match the groups.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        # Before the base class, whose constructor already computes a rate.
        self.total_num_steps = at_least(f"{SECTION}.total_num_steps", total_num_steps, 0)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_short(self.total_num_steps, self.warmup_num_steps)

    def _fraction(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._fraction(iteration)
        falling_steps = max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - iteration) / falling_steps)


class WarmupCosineLR(IterationSchedule):
    """Rise to each group's own rate, then a fall along half a cosine to ``cos_min_ratio`` of it, then a constant rate.

    Before the first ``step()`` the rate is 0 for every ``warmup_min_ratio``, as in DeepSpeed.

    Args:
        optimizer: Any object with ``param_groups``; their rates are the peaks.
        total_num_steps: Length of the whole schedule in optimizer steps.
        warmup_min_ratio: Fraction of the peak at iteration 0.
        warmup_num_steps: Length of the warm-up, as in WarmupLR.
        cos_min_ratio: Fraction of the peak at the end.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: The iteration to continue from.

    Raises:
        ConfigError: A value is out of its range.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = at_least(f"{SECTION}.total_num_steps", total_num_steps, 0)
        self.warmup_min_ratio = number(f"{SECTION}.warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = number(f"{SECTION}.cos_min_ratio", cos_min_ratio)
        self.warmup_num_steps, self.warmup_type = _read_warmup(warmup_num_steps, warmup_type)
        _warn_short(self.total_num_steps, self.warmup_num_steps)
        self._apply()

    def rates(self, iteration: int) -> list[float]:
        """Return each group's own rate times the ratio of ``iteration``."""
        ratio = self._ratio(iteration)
        return [peak * ratio for peak in self._peaks]

    def get_lr_ratio(self) -> float:
        """Return the fraction of the peak rates at the present iteration."""
        return self._ratio(self.last_batch_iteration)

    def _ratio(self, iteration: int) -> float:
        """Return the fraction of the peak rate at ``iteration``, 0 to 1."""
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            way = _warmup_fraction(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * way
        falling_steps = max(1.0, self.total_num_steps - self.warmup_num_steps)
        way = min(1.0, (iteration - self.warmup_num_steps + 1) / falling_steps)
        cosine = (1.0 + math.cos(math.pi * way)) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class OneCycle(IterationSchedule):
    """One rise and fall of the rate, while Adam's first beta falls and rises; then a decay.

    The cycle is one iteration ahead: iteration i has the rate of position i + 1. ``betas[1]`` becomes 0.99 while the momentum is
    cycled. Before the first ``step()`` beta 1 is ``cycle_min_mom``, as in DeepSpeed.

    Args:
        optimizer: Any object with ``param_groups``.
        cycle_min_lr: Rate at both ends of the cycle; a number or a list.
        cycle_max_lr: Rate in the middle; a number or a list.
        decay_lr_rate: After the cycle the rate is ``cycle_min_lr / (1 + decay_lr_rate * intervals)``; 0 keeps it.
        cycle_first_step_size: Length of the rise in iterations.
        cycle_second_step_size: Length of the fall in iterations; None for the length of the rise.
        cycle_first_stair_count: Number of stairs of the rise; 0 for a straight line.
        cycle_second_stair_count: Number of stairs of the fall; None for as many as the rise has.
        decay_step_size: Iterations per decay interval; 0 turns both decays off.
        cycle_momentum: Cycle beta 1; switched off, with one warning, for optimizers without ``betas``.
        cycle_min_mom: Beta 1 in the middle of the cycle; a number or a list.
        cycle_max_mom: Beta 1 at both ends of the cycle; a number or a list.
        decay_mom_rate: After the cycle beta 1 is ``cycle_max_mom * (1 + decay_mom_rate * intervals)``; 0 keeps it.
        last_batch_iteration: The iteration to continue from.

    Raises:
        ConfigError: A value is out of its range, or a list does not match the groups.
    """

    _SECOND_BETA = 0.99

    # Fourteen parameters: they are the keys of the JSON section, and scripts build the class by hand with them.
    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = len(self.base_lrs)
        self.min_lrs = per_group(f"{SECTION}.cycle_min_lr", cycle_min_lr, groups)
        self.max_lrs = self._highest("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = number(f"{SECTION}.decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = number(f"{SECTION}.decay_mom_rate", decay_mom_rate)
        self.decay_step_size = at_least(f"{SECTION}.decay_step_size", decay_step_size, 0)
        self.first_step_size = at_least(f"{SECTION}.cycle_first_step_size", cycle_first_step_size, 1)
        fall_steps = self.first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.second_step_size = at_least(f"{SECTION}.cycle_second_step_size", fall_steps, 0)
        self.first_stair_count = at_least(f"{SECTION}.cycle_first_stair_count", cycle_first_stair_count, 0)
        fall_stairs = self.first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.second_stair_count = at_least(f"{SECTION}.cycle_second_stair_count", fall_stairs, 0)
        self.min_moms = per_group(f"{SECTION}.cycle_min_mom", cycle_min_mom, groups)
        self.max_moms = per_group(f"{SECTION}.cycle_max_mom", cycle_max_mom, groups)
        self.cycle_momentum = boolean(f"{SECTION}.cycle_momentum", cycle_momentum) and self._has_betas()
        self._apply()

    @property
    def total_size(self) -> float:
        """Return the number of iterations of the whole cycle."""
        return self.first_step_size + self.second_step_size

    @property
    def step_ratio(self) -> float:
        """Return the fraction of the cycle in which the rate rises."""
        return self.first_step_size / self.total_size

    def rates(self, iteration: int) -> list[float]:
        """Return each group's rate in the cycle, or in the decay after it."""
        if iteration < self.total_size:
            height = self._height(iteration + 1)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        factor = 1.0 + self.decay_lr_rate * self._decay_intervals(iteration)
        return [low / factor for low in self.min_lrs]

    def momenta(self, iteration: int) -> list[float]:
        """Return each group's beta 1 of ``iteration`` (-1 or more)."""
        if iteration < self.total_size:
            height = self._height(iteration + 1)
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        factor = 1.0 + self.decay_mom_rate * self._decay_intervals(iteration)
        return [high * factor for high in self.max_moms]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of the present iteration, one pair per group; None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        return [(momentum, self._SECOND_BETA) for momentum in self.momenta(self.last_batch_iteration)]

    def _height(self, position: float) -> float:
        """Return the height of the cycle at ``position`` (0 to its length): 0 at the ends, 1 in the middle."""
        if position <= self.first_step_size:
            climbed, steps, stairs = position, self.first_step_size, self.first_stair_count
        else:
            climbed, steps, stairs = self.total_size - position, self.second_step_size, self.second_stair_count
        # Multiply before dividing: a whole number of stairs must stay whole, or floor() loses one.
        return math.floor(climbed * stairs / steps) / stairs if stairs else climbed / steps

    def _decay_intervals(self, iteration: int) -> float:
        """Return the number of decay intervals since the cycle's end."""
        return (iteration - self.total_size + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def _has_betas(self) -> bool:
        """Return whether every group has ``betas``; warn once otherwise."""
        if all("betas" in group for group in self.optimizer.param_groups):
            return True
        warn_once(
            f"{SECTION}.cycle_momentum has no effect: {type(self.optimizer).__name__} has no betas to cycle. "
            "Set it to false to silence this."
        )
        return False

    def _apply(self) -> None:
        super()._apply()
        # Before the first step DeepSpeed's groups have the lowest momentum, while its get_mom() returns the highest.
        for group, betas, lowest in zip(self._groups(), self.get_mom() or [], self.min_moms, strict=False):
            group["betas"] = betas if self.last_batch_iteration >= 0 else (lowest, self._SECOND_BETA)


class LRRangeTest(IterationSchedule):
    """Sweep of the rate upwards, to find where training diverges: ``min_lr * (1 + step_rate * (iteration + 1) / step_size)``.

    Args:
        optimizer: Any object with ``param_groups``.
        lr_range_test_min_lr: First rate; a number or a list.
        lr_range_test_step_size: Iterations per interval.
        lr_range_test_step_rate: Growth per interval.
        lr_range_test_staircase: Change the rate only at whole intervals.
        last_batch_iteration: The iteration to continue from.

    Raises:
        ConfigError: A value is out of its range, or a list does not match the groups.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | list[float] = 0.001,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = per_group(f"{SECTION}.lr_range_test_min_lr", lr_range_test_min_lr, len(self.base_lrs))
        self.step_size = at_least(f"{SECTION}.lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = number(f"{SECTION}.lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = boolean(f"{SECTION}.lr_range_test_staircase", lr_range_test_staircase)
        self._apply()

    def rates(self, iteration: int) -> list[float]:
        """Return each group's rate in the sweep."""
        interval = (iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [low * (1.0 + self.step_rate * interval) for low in self.min_lrs]


def _as_float(rate: float | torch.Tensor) -> float:
    """Return a group's rate as a Python number; torch allows tensors of one element there."""
    return float(rate)


def _read_warmup(num_steps: object, kind: object) -> tuple[float, str]:
    """Check the two warm-up parameters; return the length, raised to at least 2 so that its logarithm is not 0, and the type."""
    steps = at_least(f"{SECTION}.warmup_num_steps", num_steps, 0)
    if kind not in _WARMUP_TYPES:
        near = nearest(str(kind), _WARMUP_TYPES)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"{SECTION}.warmup_type is {kind!r}; allowed: {', '.join(_WARMUP_TYPES)}.{hint}")
    return max(2, steps), str(kind)


def _warmup_fraction(iteration: int, num_steps: float, kind: str) -> float:
    """Return the part of the warm-up's height that is reached at ``iteration``, 0 to 1; 0 before the first iteration."""
    if iteration < 0:
        return 0.0
    if iteration >= num_steps:
        return 1.0
    return math.log(iteration + 1) / math.log(num_steps) if kind == "log" else iteration / num_steps


def _warn_short(total: float, warmup: float) -> None:
    """Warn about a schedule whose total length is less than its warm-up."""
    if total < warmup:
        warn_once(
            f"{SECTION}.total_num_steps is {total:g}, less than warmup_num_steps {warmup:g}: the rate drops to its "
            "minimum right after the warm-up."
        )
