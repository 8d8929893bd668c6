"""``GatheredParameters``: whole parameters inside a ``with``, and what happens to changes made there."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from hf_zero.core.schedule.external_parameters import register_external_parameter
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.core.units.values import broadcast_from, show_as_built
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
        self._wanted = positions_of(params) if enabled else {}
        self._modifier_rank = modifier_rank
        self._entered: list[tuple[Unit, bool]] = []
        self._alone: list[Unit] = []
        if enabled and fwd_module is not None and params is not None:
            for param in [params] if isinstance(params, torch.Tensor) else list(params):
                if isinstance(param, nn.Parameter) and find_unit(param) is not None:
                    register_external_parameter(fwd_module, param)

    def __enter__(self) -> GatheredParameters:
        for unit, indices in self._wanted.items():
            if self._modifier_rank is None and unit.alone.serves(indices):
                unit.alone.add(indices)
                self._alone.append(unit)
            else:
                self._entered.append((unit, unit.pin(modifier_rank=self._modifier_rank)))
                if unit.built is not None and unit.built.shown:
                    show_as_built(unit)
        return self

    @property
    def gathered(self) -> list[Unit]:
        """The units that are pinned, while the context is entered."""
        return [unit for unit, _ in self._entered]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._alone:
            unit = self._alone.pop()
            if kind is None:
                _warn_of_dropped(unit, self._wanted[unit])
            unit.alone.remove(self._wanted[unit])
        while self._entered:
            unit, was_whole = self._entered.pop()
            if kind is None and self._modifier_rank is not None and unit.pins.modifier_of_outer is None:
                with torch.no_grad():
                    broadcast_from(unit, self._modifier_rank)
            if kind is None and self._modifier_rank is None and not was_whole:
                _warn_of_dropped(unit, range(len(unit.params)))
            unit.unpin(reshard=not was_whole)


_said = False  # a loop over all parameters says it once


def _warn_of_dropped(unit: Unit, indices: Iterable[int]) -> None:
    global _said
    name = None if _said else _changed_here(unit, indices)
    if name is not None:
        _said = True
        warn_once(
            f"GatheredParameters(...) without modifier_rank: the new values of {name} are dropped. Pass modifier_rank=0 to keep what "
            "rank 0 wrote"
        )


def _changed_here(unit: Unit, indices: Iterable[int]) -> str | None:
    """The first of the parameters that requires a gradient and whose part is not what this rank's shard holds; local.

    None too where the shard rests elsewhere than the whole values.
    """
    for index in indices if unit.reshards else ():
        param, slot = unit.params[index], unit.layout.slots[index]
        if param is None or not param.requires_grad or param.numel() != slot.numel or param.device != unit.shard.device:
            continue
        part = slot.range.intersect(unit.owned).shift(-slot.offset)
        if part.numel and not _same_bits(param.data.reshape(-1)[part.start : part.stop], unit.shard_part(index, unit.shard)):
            return slot.name
    return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def units_of(params: Iterable[torch.Tensor | None] | torch.Tensor | None) -> list[Unit]:
    """The units that hold any of ``params``, each once, in order of first appearance."""
    return list(positions_of(params))


def positions_of(params: Iterable[torch.Tensor | None] | torch.Tensor | None) -> dict[Unit, list[int]]:
    """The units that hold any of ``params``, in order of first appearance, and the positions of those in them, each once."""
    found: dict[Unit, dict[int, None]] = {}
    for param in [params] if isinstance(params, torch.Tensor) else () if params is None else params:
        owner = find_unit(param) if isinstance(param, torch.Tensor) else None
        if owner is not None:
            found.setdefault(owner[0], {})[owner[1]] = None
    return {unit: list(indices) for unit, indices in found.items()}
