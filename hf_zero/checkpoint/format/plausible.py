"""Numbers that steer a run: rates, steps, loss scales and counters that no run can have had are refused by name.

What is meant is told by the name. A number that a run might have had passes: that it is the right one, the checksum of the index says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_zero.errors import CheckpointError
from hf_zero.system.reading import shown

# Hyper-parameters and states of schedulers that are 0 or more, as numbers or lists of them.
_RATES = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "eps", "momentum", "base_lrs", "_last_lr", "min_lrs", "max_lrs", "lrs"}
)
_LISTS = frozenset({"betas", "eps", "base_lrs", "_last_lr", "min_lrs", "max_lrs", "lrs"})  # numbers or lists of them
_TO_COME = frozenset({"frozen_at"})  # None until a run has come to it
_MOST_RATE = 1e9
_FRACTIONS = frozenset({"betas", "beta1", "beta2"})  # of [0, 1]
_COUNTS = frozenset({"step", "last_epoch", "last_batch_iteration", "_step_count", "good_steps", "tolerance"})  # whole numbers
_FROM_MINUS_ONE = frozenset({"last_epoch", "last_batch_iteration"})
_MOST_COUNT = 1 << 62
_MOST_SCALE = 2.0**127
_SWITCHES = frozenset({"amsgrad", "maximize", "nesterov", "centered", "differentiable", "decoupled_weight_decay", "dynamic"})
COUNTERS = ("global_steps", "skipped_steps", "global_samples", "micro_steps")
_SCALER = frozenset({"scale", "dynamic", "good_steps", "tolerance"})


def check_counters(counters: Mapping[str, Any]) -> None:
    """Check the counters of the engine: known names, and whole numbers of at least 0.

    Raises:
        CheckpointError: Names the counter.
    """
    if counters and not set(COUNTERS[:3]) <= counters.keys():
        raise CheckpointError(f"counters are {shown(sorted(counters))}, expected {list(COUNTERS)}")
    for name, value in counters.items():
        if name not in COUNTERS or type(value) is not int or not 0 <= value <= _MOST_COUNT:
            raise CheckpointError(f"counters: {shown(name)} is {shown(value)}; whole numbers from 0 on are allowed for {list(COUNTERS)}")


def check_scaler(scaler: Any) -> None:
    """Check the state of a loss scaler; it is empty where there is none.

    Raises:
        CheckpointError: Names the key.
    """
    if scaler == {}:
        return
    if not isinstance(scaler, dict):
        raise CheckpointError(f"scaler is {shown(scaler)}, expected its state by name")
    if set(scaler) != _SCALER:
        raise CheckpointError(f"scaler has the keys {shown(sorted(map(str, scaler)))}, expected {sorted(_SCALER)}")
    check_values(scaler, "scaler")
    if not isinstance(scaler["dynamic"], bool):
        raise CheckpointError(f"scaler: dynamic is {shown(scaler['dynamic'])}, expected true or false")
    scale = scaler["scale"]
    if type(scale) not in (int, float) or not 0 < scale <= _MOST_SCALE:
        raise CheckpointError(f"scaler: scale is {shown(scale)}, expected a number above 0, at most 2**127")


def check_spikes(spikes: Any) -> None:
    """Check the gradient norms of the last steps; None if the engine did not compare them.

    Raises:
        CheckpointError: Names the key.
    """
    if spikes is None:
        return
    if not isinstance(spikes, dict) or set(spikes) != {"norms", "consecutive"}:
        raise CheckpointError(f"spikes is {shown(spikes)}, expected norms and consecutive")
    norms, consecutive = spikes["norms"], spikes["consecutive"]
    if not isinstance(norms, list) or not all(isinstance(norm, float) and 0 <= norm < math.inf for norm in norms):
        raise CheckpointError(f"spikes: norms is {shown(norms)}, expected a list of finite numbers from 0 on")
    if type(consecutive) is not int or not 0 <= consecutive <= _MOST_COUNT:
        raise CheckpointError(f"spikes: consecutive is {shown(consecutive)}, expected a whole number from 0 on")


def check_group(values: Any, where: str) -> None:
    """Check the hyper-parameters of a param group; they are empty where a conversion knew none.

    Raises:
        CheckpointError: Names ``where`` and the key.
    """
    if not isinstance(values, dict) or (values and "lr" not in values):
        raise CheckpointError(f"{where} is {shown(values)}, expected hyper-parameters with an lr")
    check_values(values, where)


def missing_settings(present: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    """Return the settings of param groups and schedulers that change a run, and that ``present`` has and ``saved`` lacks."""
    return {key for key in present.keys() & (_RATES | _FRACTIONS | _SWITCHES | _COUNTS) if key not in saved and key != "initial_lr"}


def check_numbers(states: Sequence[tuple[str, Any]]) -> None:
    """Check single-number states, given with their place: they are finite, and of one type under each name.

    Raises:
        CheckpointError: Names the place and the state.
    """
    types: dict[str, Any] = {}
    for where, values in states:
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} is {shown(values)}, expected states by name")
        check_values(values, where)
        for key, value in values.items():
            number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if number is not None and not (isinstance(number, (bool, int)) or (isinstance(number, float) and math.isfinite(number))):
                raise CheckpointError(f"{where}: {key} is {shown(value)}, expected a finite number")
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            if types.setdefault(key, kind) != kind:
                raise CheckpointError(f"{where}: {key} is of type {kind}, elsewhere of {types[key]}")


def check_values(values: Any, where: str) -> None:
    """Refuse values that contradict the meaning of their names in ``values``; other names, and values that are no dict, pass.

    Raises:
        CheckpointError: Names ``where``, the key and the value.
    """
    for key, value in values.items() if isinstance(values, dict) else ():
        if key == "betas" and not (isinstance(value, (list, tuple)) and len(value) > 1 and None not in value):
            raise CheckpointError(f"{where}: {key} is {shown(value)}, expected two numbers or more")
        for item in value if key in _LISTS and isinstance(value, (list, tuple)) else (value,):
            problem = _problem(key, item)
            if problem:
                raise CheckpointError(f"{where}: {key} is {shown(value)}, {problem}")


def _problem(key: Any, value: Any) -> str:
    """Return the fault of one number under ``key``; empty when there is none."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return "which is no number"
    if key in _SWITCHES:
        return "" if isinstance(value, bool) else "expected true or false"
    if key not in _RATES | _FRACTIONS | _COUNTS or (value is None and key not in _COUNTS):
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "expected a number"
    if key in _COUNTS:
        least = -1 if key in _FROM_MINUS_ONE else 0
        return "" if least <= value <= _MOST_COUNT and value == int(value) else f"expected a whole number from {least} on"
    if key in _FRACTIONS:
        return "" if 0 <= value <= 1 else "expected numbers from 0 to 1"
    return "" if 0 <= value <= _MOST_RATE else f"expected a number from 0 to {_MOST_RATE:g}"


# -- beside what is there ---------------------------------------------------------------------------------------------


def check_alike(present: Any, saved: Any, where: str) -> None:
    """Refuses a saved value that is of another kind than the one it replaces: text for a number, a list for a switch.

    Args:
        present: Present value of the optimizer or scheduler.
        saved: What it is to get; whatever takes the place of None passes, and None unless in place of a number or switch.
        where: For the message.

    Raises:
        CheckpointError: Names ``where`` and both values.
    """
    if isinstance(present, dict) and isinstance(saved, dict):
        for key in present.keys() & saved.keys():
            if saved[key] is not None or key not in _TO_COME:
                check_alike(present[key], saved[key], f"{where}[{key!r}]")
        return
    own, other = _kind(present), _kind(saved)
    if own in ("a number", "a switch") and saved is None:
        other = "nothing"
    if own != other and own and other:
        raise CheckpointError(f"{where} is {shown(saved)} in the checkpoint, {shown(present)} here: expected {own}, found {other}")
    if isinstance(present, tuple) and len(present) != len(saved or present):
        raise CheckpointError(f"{where} is {shown(saved)} in the checkpoint, {shown(present)} here: expected {len(present)} values")
    if own == other == "a list" and len(present) == len(saved):
        for position, (here, there) in enumerate(zip(present, saved, strict=True)):
            check_alike(here, there, f"{where}[{position}]")


def _kind(value: Any) -> str:
    """Return the kind of a value in words; empty for None and for objects, which nothing is said about."""
    if isinstance(value, torch.Tensor):
        return "a number" if value.numel() == 1 else "a tensor"
    kinds: dict[str, Any] = {"a switch": bool, "a number": (int, float), "a text": str, "a list": (list, tuple), "a dict": dict}
    return next((word for word, kind in kinds.items() if isinstance(value, kind)), "")
