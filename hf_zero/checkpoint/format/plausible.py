"""Refuse numbers that no run can have saved: learning rates, steps, loss scales and counters out of range, by name.

The name of a value decides its range. Whether a possible value is also the saved one, the checksum of the index decides.

[Note: whose values are checked] A script's own optimizer or scheduler may give any value to any name (``momentum=(0.9, 0.5)``, a ``step``
that counts in halves, a best value that is still infinite), and the checkpoint that has it must load. So ranges are checked where the names
have a known meaning: for values of the engine itself and of the classes of PyTorch and of this package. ``Index.own_classes`` says which
values are the script's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_zero.errors import CheckpointError
from hf_zero.system.reading import shown

# Names of hyper-parameters and scheduler states that are at least 0.
_RATES = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "eps", "momentum", "base_lrs", "_last_lr", "min_lrs", "max_lrs", "lrs"}
)
_LISTS = frozenset({"betas", "eps", "base_lrs", "_last_lr", "min_lrs", "max_lrs", "lrs"})  # names of values that may be lists of numbers
_TO_COME = frozenset({"frozen_at"})  # names of values that are None until a run has reached them
_MOST_RATE = 1e9
_FRACTIONS = frozenset({"betas", "beta1", "beta2"})  # names of values between 0 and 1
_COUNTS = frozenset({"step", "last_epoch", "last_batch_iteration", "_step_count", "good_steps", "tolerance"})  # names of whole numbers
_FROM_MINUS_ONE = frozenset({"last_epoch", "last_batch_iteration"})
_MOST_COUNT = 1 << 62
_MOST_SCALE = 2.0**127
_SWITCHES = frozenset({"amsgrad", "maximize", "nesterov", "centered", "differentiable", "decoupled_weight_decay", "dynamic"})
COUNTERS = ("global_steps", "skipped_steps", "global_samples", "micro_steps")
_SPIKES = frozenset({"norms", "losses", "consecutive", "rewinds", "updates"})
_SCALER = frozenset({"scale", "dynamic", "good_steps", "tolerance"})


def has_known_values(owner: object) -> bool:
    """Return whether PyTorch or this package defines the class of an optimizer or scheduler, so that its values' ranges are known."""
    return type(owner).__module__.partition(".")[0] in ("torch", "hf_zero")


def check_counters(counters: Mapping[str, Any]) -> None:
    """Check the counters of the engine: their names are known, and they are whole numbers of at least 0.

    Raises:
        CheckpointError: A check failed; the message names the counter.
    """
    if counters and not set(COUNTERS[:3]) <= counters.keys():
        raise CheckpointError(f"counters are {shown(sorted(counters))}, expected {list(COUNTERS)}")
    for name, value in counters.items():
        if name not in COUNTERS or type(value) is not int or not 0 <= value <= _MOST_COUNT:
            raise CheckpointError(
                f"counters: {shown(name)} is {shown(value)}; whole numbers of at least 0 are allowed for {list(COUNTERS)}"
            )


def check_scaler(scaler: Any) -> None:
    """Check the state of a loss scaler; it is empty without a loss scaler.

    Raises:
        CheckpointError: A check failed; the message names the key.
    """
    if scaler == {}:
        return
    if not isinstance(scaler, dict):
        raise CheckpointError(f"scaler is {shown(scaler)}, expected a dict")
    if set(scaler) != _SCALER:
        raise CheckpointError(f"scaler has the keys {shown(sorted(map(str, scaler)))}, expected {sorted(_SCALER)}")
    check_values(scaler, "scaler")
    if not isinstance(scaler["dynamic"], bool):
        raise CheckpointError(f"scaler: dynamic is {shown(scaler['dynamic'])}, expected true or false")
    scale = scaler["scale"]
    if type(scale) not in (int, float) or not 0 < scale <= _MOST_SCALE:
        raise CheckpointError(f"scaler: scale is {shown(scale)}, expected a number above 0, at most 2**127")


def check_spikes(spikes: Any) -> None:
    """Check the gradient norms and losses of the last steps; None if the engine did not record them. Older checkpoints have norms alone.

    Raises:
        CheckpointError: A check failed; the message names the key.
    """
    if spikes is None:
        return
    if not isinstance(spikes, dict) or not {"norms", "consecutive"} <= set(spikes) <= _SPIKES:
        raise CheckpointError(f"spikes is {shown(spikes)}, expected a dict with the keys {', '.join(sorted(_SPIKES))}")
    norms, losses = spikes["norms"], spikes.get("losses", [])
    if not isinstance(norms, list) or not all(isinstance(norm, float) and 0 <= norm < math.inf for norm in norms):
        raise CheckpointError(f"spikes: norms is {shown(norms)}, expected a list of finite numbers of at least 0")
    if not isinstance(losses, list) or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        raise CheckpointError(f"spikes: losses is {shown(losses)}, expected a list of finite numbers")
    for key, least in (("consecutive", 0), ("rewinds", 0), ("updates", -1)):
        value = spikes.get(key, 0)
        if type(value) is not int or not least <= value <= _MOST_COUNT:
            raise CheckpointError(f"spikes: {key} is {shown(value)}, expected a whole number of at least {least}")


def check_group(values: Any, where: str, ranges: bool = True) -> None:
    """Check the hyper-parameters of a param group; they are empty if the source of a conversion had none. A rate may have another name than
    lr; ``missing_settings`` finds one that the present group has.

    Args:
        values: Hyper-parameters by name.
        where: Description of the group for messages.
        ranges: Whether their names imply ranges; else any values are allowed.

    Raises:
        CheckpointError: A check failed; the message names ``where`` and the key.
    """
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is {shown(values)}, expected a dict of hyper-parameters")
    if ranges:
        check_values(values, where)


def missing_settings(present: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    """Return the keys of a param group or scheduler that affect training and that ``present`` has and ``saved`` lacks."""
    return {key for key in present.keys() & (_RATES | _FRACTIONS | _SWITCHES | _COUNTS) if key not in saved and key != "initial_lr"}


def check_numbers(states: Sequence[tuple[int, str, Any]], ranges: bool) -> None:
    """Check single-number states: they are finite, and states of one name have one type in all places of a param group. Groups may have
    rules of their own.

    Args:
        states: Param group, place, and values by name, per record.
        ranges: Whether their names imply ranges and types; else any values are allowed.

    Raises:
        CheckpointError: A check failed; the message names the place and the state.
    """
    types: dict[tuple[int, str], Any] = {}
    for group, where, values in states:
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} is {shown(values)}, expected a dict of states by name")
        if not ranges:
            continue
        check_values(values, where)
        for key, value in values.items():
            number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if number is not None and not (isinstance(number, (bool, int)) or (isinstance(number, float) and math.isfinite(number))):
                raise CheckpointError(f"{where}: {key} is {shown(value)}, expected a finite number")
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            if types.setdefault((group, key), kind) != kind:
                raise CheckpointError(f"{where}: {key} has type {kind}, but type {types[group, key]} elsewhere in the index")


def check_values(values: Any, where: str) -> None:
    """Check the values whose names imply a range; accept values of other names, and ``values`` that is not a dict.

    Raises:
        CheckpointError: A value is out of range; the message names ``where``, the key and the value.
    """
    for key, value in values.items() if isinstance(values, dict) else ():
        if key == "betas" and not (isinstance(value, (list, tuple)) and len(value) > 1 and None not in value):
            raise CheckpointError(f"{where}: {key} is {shown(value)}, expected two numbers or more")
        for item in value if key in _LISTS and isinstance(value, (list, tuple)) else (value,):
            problem = _problem(key, item)
            if problem:
                raise CheckpointError(f"{where}: {key} is {shown(value)}, {problem}")


def _problem(key: Any, value: Any) -> str:
    """Return a clause that says why ``value`` is not possible for the name ``key``; "" if it is possible."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if key in _SWITCHES:
        return "" if isinstance(value, (bool, int)) and value in (0, 1) else "expected true or false"  # SGD(nesterov=1) is valid
    if key not in _RATES | _FRACTIONS | _COUNTS or (value is None and key not in _COUNTS):
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "expected a number"
    if math.isnan(value):
        return "which is not a number"
    if key in _COUNTS:
        least = -1 if key in _FROM_MINUS_ONE else 0
        return "" if least <= value <= _MOST_COUNT and value == int(value) else f"expected a whole number of at least {least}"
    if key in _FRACTIONS:
        return "" if 0 <= value <= 1 else "expected numbers from 0 to 1"
    return "" if 0 <= value <= _MOST_RATE else f"expected a number from 0 to {_MOST_RATE:g}"


# -- comparison with the present values -------------------------------------------------------------------------------


def check_alike(present: Any, saved: Any, where: str) -> None:
    """Raise an error if a saved value has another type than the present value that it replaces, such as text instead of a number.

    Args:
        present: Present value of the optimizer or scheduler.
        saved: Saved value. Any value may replace None; None may replace any value except a number or a switch.
        where: Description of the value for messages.

    Raises:
        CheckpointError: The types differ; the message names ``where`` and both values.
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
        raise CheckpointError(f"{where} is {shown(saved)} in the checkpoint, but {shown(present)} here: expected {own}, found {other}")
    if isinstance(present, tuple) and len(present) != len(saved or present):
        raise CheckpointError(f"{where} is {shown(saved)} in the checkpoint, but {shown(present)} here: expected {len(present)} values")
    if own == other == "a list" and len(present) == len(saved):
        for position, (here, there) in enumerate(zip(present, saved, strict=True)):
            check_alike(here, there, f"{where}[{position}]")


def _kind(value: Any) -> str:
    """Return the type of a value in words; "" for None and for other objects, whose types are not compared."""
    if isinstance(value, torch.Tensor):
        return "a number" if value.numel() == 1 else "a tensor"
    kinds: dict[str, Any] = {"a switch": bool, "a number": (int, float), "a text": str, "a list": (list, tuple), "a dict": dict}
    return next((word for word, kind in kinds.items() if isinstance(value, kind)), "")
