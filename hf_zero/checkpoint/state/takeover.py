"""Loading the saved state of another optimizer class: rates and decay, and the states whose names both classes use."""

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
from hf_zero.observe import warn_once

# Classes whose states have the same names and meaning, lower-case: which of them trains depends on the machine (native kernels or not).
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
_COMMON = ("lr", "weight_decay", "initial_lr")  # hyper-parameters that mean the same everywhere


class Takeover:
    """Decides by the index and the optimizer's class and options alone, for all parameters of all ranks, so that ranks agree.

    Attributes:
        foreign: The state was saved by an optimizer of another class.

    Args:
        optimizer: That takes the state.
        record: Record of the saved optimizer.
        catalog: Contents of the checkpoint.
        whole: It keeps states of whole parameters, not of segments.
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
        slots = [slot for unit in optimizer.units for slot in unit.layout.slots if slot.group != FROZEN and slot.numel]
        saved = {slot.name: (slot, self._saved(slot)) for slot in slots} if self.foreign else {}
        self._left = {name for name, (slot, names) in saved.items() if names and names != self._names(slot)}
        if self.foreign:
            self._warn(sum(bool(names) for _, names in saved.values()) - len(self._left))

    def _is_foreign(self) -> bool:
        name, own = self._record.name.lower(), type(self._optimizer.inner).__name__.lower()
        if name:
            return _ALIKE.get(name, name) != _ALIKE.get(own, own)
        # A conversion may not know the class, so the names decide.
        known = self._kept(0, 1) if self._record.states and self._optimizer.param_groups else None
        return known is not None and known - {"step"} != set(self._record.states)

    def _names(self, slot: ParamSlot) -> frozenset[str] | None:
        return self._kept(slot.group, len(slot.shape) if self._whole else 1)

    def _saved(self, slot: ParamSlot) -> set[str]:
        """Return names of the states that this optimizer could read for a parameter."""
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
            f"{', '.join(_COMMON)} of the param groups, and the states of {taken} parameters{left}. A state is loaded where "
            "both optimizers keep the same one"
        )

    def takes(self, name: str) -> bool:
        """Return whether the saved states of parameter ``name`` are taken, where there are any."""
        return name not in self._left

    def lacks(self, group: int, names: set[str]) -> set[str]:
        """Return the states that an optimizer of the saved class keeps for a flat row of ``group`` in addition to ``names``, as far as
        known.
        """
        converted = self._catalog.index.library == CONVERTED  # others may keep a step elsewhere
        kept = None if self.foreign or self._whole or converted else self._kept(group, 1)
        return set(kept or ()) - names

    def settings(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved hyper-parameters that a present group takes."""
        if not self.foreign:
            return dict(saved)
        # None: an optimizer that sets its rate itself.
        return {key: saved[key] for key in _COMMON if saved.get(key) is not None and group.get(key, 0.0) is not None}
