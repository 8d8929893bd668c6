"""``GatheredParameters``: whole parameters inside a ``with``, and what happens to changes made there."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from hf_zero.core.schedule.external_parameters import register_external_parameter
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.core.units.values import broadcast_from
from hf_zero.observe import warn_once


class GatheredParameters:
    """Context in which the given parameters are whole; collective on entry and exit.

    Lenient about its argument, because callers pass anything: one tensor or any iterable, with duplicates, None, ordinary or
    detached tensors and buffers among them (they are left alone), or nothing at all. Nests: what an outer context or a running
    forward has unsharded stays unsharded.

    [Note: changes inside GatheredParameters] With ``modifier_rank`` the values of that rank are broadcast at exit and become the
    values of shards and masters on all ranks. Without it changes made to a sharded parameter are dropped at exit (who
    merges adapters for generation relies on it); where the parameter requires a gradient, as an average of weights does, a warning
    says so. When an outer context with a ``modifier_rank`` holds the same unit, the broadcast is left to it: loaders enter inner
    contexts on rank 0 only.

    Args:
        params: Parameters.
        modifier_rank: Rank whose changes are kept; None keeps none.
        fwd_module: Module whose forward will read them: registers them as external to it.
        enabled: False makes it do nothing.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor | None] | torch.Tensor | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._units = units_of(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._entered: list[tuple[Unit, bool]] = []
        if enabled and fwd_module is not None and params is not None:
            for param in [params] if isinstance(params, torch.Tensor) else list(params):
                if isinstance(param, nn.Parameter) and find_unit(param) is not None:
                    register_external_parameter(fwd_module, param)

    def __enter__(self) -> GatheredParameters:
        for unit in self._units:
            self._entered.append((unit, unit.pin(modifier_rank=self._modifier_rank)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._entered:
            unit, was_whole = self._entered.pop()
            if kind is None and self._modifier_rank is not None and unit.pins.modifier_of_outer is None:
                with torch.no_grad():
                    broadcast_from(unit, self._modifier_rank)
            if kind is None and self._modifier_rank is None and not was_whole:
                _warn_of_dropped(unit)
            unit.unpin(reshard=not was_whole)


_said = False  # a loop over all parameters says it once


def _warn_of_dropped(unit: Unit) -> None:
    global _said
    name = None if _said else _changed_here(unit)
    if name is not None:
        _said = True
        warn_once(
            f"GatheredParameters(...) without modifier_rank: the new values of {name} are dropped. Pass modifier_rank=0 to keep what "
            "rank 0 wrote"
        )


def _changed_here(unit: Unit) -> str | None:
    """The first parameter that requires a gradient and whose part in the whole buffer is not what this rank's shard holds; local.

    None too where the shard rests elsewhere than the buffer.
    """
    if not unit.reshards or not any(param is not None and param.requires_grad for param in unit.params):
        return None
    if unit.shard.device != unit.full.device:
        return None
    here = unit.full[unit.owned.start : unit.owned.stop]
    if _same_bits(here, unit.shard):
        return None
    for index, param in enumerate(unit.params):
        if param is not None and param.requires_grad and not _same_bits(unit.shard_part(index, here), unit.shard_part(index, unit.shard)):
            return unit.layout.slots[index].name
    return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def units_of(params: Iterable[torch.Tensor | None] | torch.Tensor | None) -> list[Unit]:
    """The units that hold any of ``params``, each once, in order of first appearance."""
    if params is None:
        return []
    candidates = [params] if isinstance(params, torch.Tensor) else params
    units: dict[int, Unit] = {}
    for param in candidates:
        owner = find_unit(param) if isinstance(param, torch.Tensor) else None
        if owner is not None:
            units.setdefault(id(owner[0]), owner[0])
    return list(units.values())
