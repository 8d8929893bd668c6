"""Load the saved state of another optimizer class: learning rates, weight decay, and the states that both classes keep."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from hf_zero.checkpoint.files.catalog import Catalog
from hf_zero.checkpoint.format.names import CONVERTED, state_kind
from hf_zero.checkpoint.format.records import OptimizerRecord
from hf_zero.core.optimizer.clones import state_names
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.units.layout import FROZEN, ParamSlot
from hf_zero.errors import CheckpointError
from hf_zero.observe import warn_once

# Lower-case names of classes whose states have the same names and meaning; the machine (native kernels or not) decides which one trains.
_ALIKE = {
    "hostadam": "adamw",
    "adam": "adamw",
    "uncorrectedadam": "adamw",
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "hostlion": "lion",
    "fusedlion": "lion",
    "fusedlamb": "lamb",
}
_COMMON = ("lr", "weight_decay", "initial_lr")  # hyper-parameters with the same meaning in every optimizer
# Switches that not every one of the classes above has, with the value that all of them have in effect.
_NEUTRAL = {"amsgrad": False, "maximize": False, "nesterov": False, "bias_correction": True}


class Takeover:
    """The decision which saved states the present optimizer loads; it follows from index and optimizer alone, so all ranks agree.

    Attributes:
        foreign: Whether an optimizer of another class saved the state.
        same_class: Whether an optimizer of this very class saved it, so that param groups have the same keys.

    Args:
        optimizer: Optimizer that loads the state.
        record: Record of the saved optimizer.
        catalog: Contents of the checkpoint.
        whole: Whether the optimizer keeps states of whole parameters instead of segments.
    """

    def __init__(self, optimizer: ShardedOptimizer, record: OptimizerRecord, catalog: Catalog, whole: bool) -> None:
        self._optimizer = optimizer
        self._record = record
        self._catalog = catalog
        self._whole = whole
        self._numbers = record.numbers()
        self._params = {entry.param: entry.values for entry in record.params} if self._whole else {}
        self._kept = cache(lambda group, ndim: state_names(optimizer.inner, group, ndim))
        self.foreign = self._is_foreign()
        self.same_class = record.name in ("", type(optimizer.inner).__name__)
        slots = [slot for unit in optimizer.units for slot in unit.layout.slots if slot.group != FROZEN and slot.numel]
        saved = {slot.name: (slot, self._saved(slot)) for slot in slots} if self.foreign else {}
        self._left = {name for name, (slot, names) in saved.items() if names and names != self._names(slot)}
        if self.foreign:
            self._warn(sum(bool(names) for _, names in saved.values()) - len(self._left))

    def _is_foreign(self) -> bool:
        name, own = self._record.name.lower(), type(self._optimizer.inner).__name__.lower()
        if name:
            return _ALIKE.get(name, name) != _ALIKE.get(own, own)
        # A converted checkpoint may lack the class name; then compare the names of the states.
        known = self._kept(0, 1) if self._record.states and self._optimizer.param_groups else None
        return known is not None and known - {"step"} != set(self._record.states)

    def _names(self, slot: ParamSlot) -> frozenset[str] | None:
        return self._kept(slot.group, len(slot.shape) if self._whole else 1)

    def _saved(self, slot: ParamSlot) -> set[str]:
        """Return the names of the saved states of a parameter."""
        whole = self._params.get(self._catalog.canonical(slot.name))
        if whole is not None:
            return set(whole)
        found = self._catalog.find(slot.name)
        if found is None or not found.trained:
            return set()
        numbers = self._numbers(found.unit.name, found.group, self._catalog.canonical(slot.name)) if found.unit is not None else None
        return {state for state in self._record.states if self._catalog.dtype(found, state_kind(state)) is not None} | set(numbers or ())

    def _warn(self, taken: int) -> None:
        left = f"; the other {len(self._left)} parameters ({min(self._left)}, ...) start with empty state" if self._left else ""
        saved, own = self._record.name or "another optimizer", type(self._optimizer.inner).__name__
        warn_once(
            f"the checkpoint holds the optimizer state of {saved}, but this engine trains with {own}. Loaded: "
            f"{', '.join(_COMMON)} of the param groups, and the states of {taken} parameters{left}. States are loaded for "
            "parameters for which both optimizers keep the same states"
        )

    def takes(self, name: str) -> bool:
        """Return whether the saved states of parameter ``name``, if there are any, are loaded."""
        return name not in self._left

    def check_complete(self, group: int, names: set[str], param: str) -> None:
        """Raise if ``names``, the saved states of ``param`` in ``group``, lack one that the present optimizer needs.

        Raises:
            CheckpointError: The message names parameter and states.
        """
        converted = self._catalog.index.library == CONVERTED  # other libraries may store a step elsewhere
        kept = None if self.foreign or self._whole or converted else self._kept(group, 1)
        lost = ", ".join(sorted(set(kept or ()) - names))
        if lost and self.same_class:
            raise CheckpointError(f"the optimizer state of {param} lacks {lost}: the index was changed")
        if lost:
            own = type(self._optimizer.inner).__name__
            raise CheckpointError(
                f"the optimizer state of {param} was saved by {self._record.name}, without {lost}, which {own} needs with its present "
                f"settings: train with {self._record.name}'s settings, or pass load_optimizer_states=False"
            )

    def check_switches(self, group: Mapping[str, Any], taken: Mapping[str, Any], where: str) -> None:
        """Raise if a switch in ``taken`` changes the update and the present optimizer class does not have it.

        Raises:
            CheckpointError: The message names the param group ``where`` and the switch.
        """
        for key, neutral in _NEUTRAL.items():
            if key in taken and key not in group and bool(taken[key]) != neutral:
                saved, own = self._record.name or "another optimizer", type(self._optimizer.inner).__name__
                raise CheckpointError(
                    f"{where} was saved by {saved} with {key} {taken[key]!r}, and {own}, which trains now, does not have this switch: "
                    f"train with {saved}, or pass load_optimizer_states=False"
                )

    def settings(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved hyper-parameters that the present param group ``group`` loads."""
        if not self.foreign:
            return dict(saved)
        # None marks a learning rate that the optimizer computes itself.
        return {key: saved[key] for key in _COMMON if saved.get(key) is not None and group.get(key, 0.0) is not None}
