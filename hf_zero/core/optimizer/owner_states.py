"""Keep the parameters that one rank updates in their full shape, and their optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.param_states import no_state
from hf_zero.core.units.layout import ParamSlot
from hf_zero.core.units.packed import is_wrapped
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError


@dataclass(frozen=True)
class WholeParam:
    """A parameter that this rank updates in its full shape.

    Attributes:
        unit: Unit of the parameter.
        slot: Place of the parameter in the unit.
        param: The tensor of full shape that the inner optimizer updates; it has values during a step only.
        writes: Whether this rank writes the parameter's state into checkpoints: at stage 0 all ranks hold it, and one of them does.
        inner: The optimizer that updates the parameter.
    """

    unit: Unit
    slot: ParamSlot
    param: nn.Parameter
    writes: bool
    inner: torch.optim.Optimizer

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the state that the inner optimizer keeps for the parameter, live; empty before the first step."""
        state: Mapping[str, Any] = self.inner.state.get(self.param, {})
        return state

    def install(self, state: dict[str, Any]) -> None:
        """Replace the parameter's state; an empty ``state`` removes it."""
        if state:
            self.inner.state[self.param] = state
        else:
            self.inner.state.pop(self.param, None)


class OwnerStates:
    """``ParamStates`` of parameters that have an owner. A state has the shape that the owner's optimizer gives it: for example moments of
    rows, or moments of all experts.

    Args:
        whole: Parameters that this rank updates, by name.
        owners: The rank that updates each parameter, by name (at stage 0, where all ranks do, the rank that saves its state).
        collectives: Network of these ranks.
    """

    def __init__(self, whole: Mapping[str, WholeParam], owners: Mapping[str, int], collectives: Collectives) -> None:
        self._whole, self._owners, self._net = whole, owners, collectives

    def read(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """Return the complete state, which the owner sends to all ranks; see ``ParamStates.read``."""
        name = unit.layout.slots[index].name
        value = self._numbers(name, key)
        if not _travels(unit):
            return value
        net, owner = self._net, self._owners.get(name)
        if owner is None:  # a parameter without elements
            return None
        kind = net.broadcast_object((tuple(value.shape), value.dtype) if value is not None else None, owner, f"{unit.name}: {key}")
        if kind is None:
            return None
        device = net.topology.device
        flat = value.to(device).reshape(-1) if value is not None else torch.empty(kind[0], dtype=kind[1], device=device).view(-1)
        net.broadcast(flat, owner, f"{unit.name}: {key}")
        return flat.view(kind[0])

    def write(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Set the complete state on the owner; all ranks raise if it cannot be set. Collective at stages 1 to 3. See
        ``ParamStates.write``.
        """
        name = unit.layout.slots[index].name
        present, owner = self._present(name, key), self._owners.get(name)
        shape = tuple(present.shape) if present is not None else None
        if _travels(unit) and owner is not None:
            shape = self._net.broadcast_object(shape, owner, f"{unit.name}: {key}")
        if shape is None:
            raise no_state(key)
        if shape != tuple(value.shape):
            raise _other_shape(key, name, shape, value)
        if present is not None:
            present.copy_(value.detach())

    def read_own(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """Return the complete state on the owner, None on other ranks; see ``ParamStates.read_own``."""
        name = unit.layout.slots[index].name
        value = self._present(name, key)
        if value is not None and is_wrapped(value):
            value = self._numbers(name, key)
        return value.reshape(-1) if value is not None else None

    def write_own(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Set the state on the owner; do nothing on other ranks. See ``ParamStates.write_own``."""
        name = unit.layout.slots[index].name
        present = self._present(name, key)
        if present is None:
            if _travels(unit) and self._owners.get(name) != self._net.rank:
                return
            raise no_state(key)
        if present.numel() != value.numel():
            raise _other_shape(key, name, tuple(present.shape), value)
        present.copy_(value.detach().reshape(present.shape))

    def _numbers(self, name: str, key: str) -> torch.Tensor | None:
        """Return a copy of the state tensor ``key`` of parameter ``name``; the numbers that codes of a library's own class stand for."""
        value = self._present(name, key)
        if value is None or not is_wrapped(value):
            return value.detach().clone() if value is not None else None
        return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)

    def _present(self, name: str, key: str) -> torch.Tensor | None:
        """Return the state tensor ``key`` of parameter ``name`` on this rank; None if this rank keeps none."""
        entry = self._whole.get(name)
        value = entry.state.get(key) if entry is not None else None
        return value if isinstance(value, torch.Tensor) else None


def _travels(unit: Unit) -> bool:
    """Return whether some ranks do not have all parameters of the unit, so that owners must send updates to them."""
    return unit.layout.world > 1 or unit.collectives.topology.of_experts


def _other_shape(key: str, name: str, shape: tuple[int, ...], value: torch.Tensor) -> StateError:
    return StateError(f"the state {key!r} of parameter {name} has shape {shape}, the value has {tuple(value.shape)}")
