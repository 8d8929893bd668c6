"""Unshard parameters outside of their block's forward: ``GatheredParameters``, and external parameters, which another module owns."""

from __future__ import annotations

import os.path
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.checksums import checksum
from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.marks import is_elsewhere, is_part
from hf_zero.core.units.registration import network_of_loose, noted_loose
from hf_zero.core.units.shard import exchange_changes
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.core.units.values import (
    adopt_writes,
    broadcast_from,
    broadcast_over_layers,
    place_of,
    separate,
    show_as_built,
)
from hf_zero.errors import StateError

_declared: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module``'s forward reads ``parameter``, which another module owns; before or after ``initialize``.

    Raises:
        StateError: ``parameter`` is not an ``nn.Parameter``.
    """
    if not isinstance(parameter, nn.Parameter):
        raise StateError(f"register_external_parameter takes an nn.Parameter, got {type(parameter).__name__}")
    known = _declared.setdefault(module, [])
    if not any(parameter is other for other in known):
        known.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo ``register_external_parameter``; do nothing if it was never called."""
    known = _declared.get(module, [])
    known[:] = [other for other in known if other is not parameter]


def external_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that are declared external to ``module`` itself."""
    yield from _declared.get(module, ())


class GatheredParameters:
    """A context that unshards the given parameters; collective on entry and exit.

    It accepts any argument that callers pass: one tensor or any iterable, with duplicates, None, ordinary or detached tensors and buffers
    among them (which it ignores), or None. Nests: units that an outer context or a running forward has unsharded stay unsharded.

    [Note: changes inside GatheredParameters] With ``modifier_rank`` the values of that rank are broadcast at exit and written to shards and
    masters on all ranks; this includes parameters in no unit (frozen ones at stages 0 to 2). Without it, only changes that all ranks have
    made alike are kept, as they would be in plain PyTorch: the ranks compare a checksum of the parameters at exit, and where it differs all
    ranks raise, and the changes are dropped. Parameters that were unsharded before this context (small parameters, stages 0 to 2) are not
    compared here: at the next step their changes are adopted, and the ranks compare which parameters were written. If an outer context
    holds the same unit, only the outer one does this: loaders enter inner contexts on rank 0 only.

    Args:
        params: Parameters.
        modifier_rank: Global rank whose changes are kept; None keeps changes that all ranks make alike.
        fwd_module: Module whose forward will read the parameters; they are registered as external to it.
        enabled: False makes the context do nothing.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor | None] | torch.Tensor | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        params = list(_each(params))  # it may be a generator, which can be read once
        self._wanted = positions_of(params) if enabled else {}
        self._loose = _loose_of(params) if enabled else []
        self._loose_sums: list[int] = []  # checksums at entry of `_loose`
        self._loose_records: list[int | None] = []  # records of writes before the context, if a rank's values will be broadcast
        self._has_others = enabled and any(isinstance(param, torch.Tensor) and is_elsewhere(param) for param in params)
        self._modifier_rank = modifier_rank
        self._entered: list[tuple[Unit, bool]] = []
        self._alone: list[Unit] = []
        self._sums: dict[Unit, dict[int, int]] = {}  # checksums at entry of parameters that were unsharded already
        if enabled and fwd_module is not None:
            for param in params:
                if isinstance(param, nn.Parameter) and find_unit(param) is not None:
                    register_external_parameter(fwd_module, param)

    def __enter__(self) -> GatheredParameters:
        for unit in self._wanted if self._modifier_rank is not None else ():
            if unit.state is UnitState.UNSHARDED and not unit.gathers and unit.awaited():
                unit.whole.require_adoptable()  # before anything is gathered
        if self._modifier_rank is not None:
            _require_complete(self._wanted, self._loose, self._modifier_rank, self._has_others)
        for unit, indices in self._wanted.items():
            if self._modifier_rank is None and unit.alone.serves(indices):
                unit.alone.add(indices)
                self._alone.append(unit)
                was_whole = False
            else:
                was_whole = unit.pin(modifier_rank=self._modifier_rank)
                self._entered.append((unit, was_whole))
                if unit.built is not None and unit.built.shown:
                    show_as_built(unit)
            if _is_noted(unit, was_whole, self._modifier_rank is None):
                self._sums[unit] = {index: checksum(param.data) for index in indices if (param := unit.params[index]) is not None}
            unit.gathers += 1
            unit.unsaved.difference_update(indices)
            training: Any = unit.belongs_to() if unit.belongs_to is not None else None
            if training is not None:
                training.mark_read(unit)
        if self._modifier_rank is None:
            self._loose = [(param, network) for param, network in self._loose if network.topology.copies]
        else:
            self._loose_records = [noted.record(name) for noted, name in map(noted_loose, (param for param, _ in self._loose))]
        self._loose_sums = [checksum(param.data) for param, _ in self._loose]
        return self

    @property
    def gathered(self) -> list[Unit]:
        """Return the units that are pinned while the context is entered."""
        return [unit for unit, _ in self._entered]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for unit in self._wanted:
            unit.gathers -= 1
            if unit.whole.assigned() or unit.alone.assigned():
                separate(unit)
        refusal = self._settle(failed=kind is not None) if self._modifier_rank is None else None
        while self._alone:
            unit = self._alone.pop()
            unit.alone.remove(self._wanted[unit])
        dropped = refusal is not None or (kind is not None and self._modifier_rank is not None)
        while self._entered:
            unit, was_whole = self._entered.pop()
            if kind is None and self._modifier_rank is not None and unit.pins.modifier_of_outer is None:
                with torch.no_grad():
                    broadcast_from(unit, self._modifier_rank, self._wanted[unit])
                    self._look(unit)
            unit.unpin(reshard=not was_whole, adopt=not dropped or unit.collectives.data.world == 1)
        if kind is None and self._modifier_rank is not None:
            for (param, network), record in zip(self._loose, self._loose_records, strict=True):
                place, _ = place_of(network.topology, self._modifier_rank)
                network.broadcast(param.data, place, "parameter outside of units")
                broadcast_over_layers(network.topology, param.data, self._modifier_rank, "parameter outside of units")
                noted, name = noted_loose(param)
                noted.restore_record(name, record)
            self._record_loose_changes(lambda network: network.topology.model is not None)
        if refusal is not None and kind is None:
            raise refusal

    def _look(self, unit: Unit) -> None:
        """Record the parameters of ``unit`` that have changed since the context was entered, for the vote of the next step; local."""
        sums = self._sums.get(unit, {})
        now = {index: checksum(param.data) for index in sums if (param := unit.params[index]) is not None}
        for index, after in now.items():
            unit.written.look(index, after if after != sums[index] else None)

    def _record_loose_changes(self, wanted: Callable[[Collectives], bool] = lambda _: True) -> None:
        """Do as ``_look`` for parameters outside of units, of the networks that are ``wanted``; local."""
        for (loose, network), before in zip(self._loose, self._loose_sums, strict=True):
            if wanted(network):
                noted, name = noted_loose(loose)
                after = checksum(loose.data)
                noted.look(name, after if after != before else None)

    @torch.no_grad()
    def _settle(self, failed: bool) -> StateError | None:
        """Adopt changes that all ranks have made alike; collective for units that this context has unsharded.

        Returns:
            The error that ranks without an exception of their own raise, if changes differ or a rank has left the block with an exception.
        """
        self._record_loose_changes()
        for unit in self._sums:
            self._look(unit)
        held: dict[Unit, list[int]] = {unit: self._wanted[unit] for unit in self._alone if not unit.gathers}
        held |= {unit: [*range(len(unit.params))] for unit, was_whole in self._entered if not (was_whole or unit.gathers)}
        by_network: dict[int, list[Unit]] = {}
        for unit in held:
            by_network.setdefault(id(unit.collectives.data), []).append(unit)
        refusals = [_compare(units, held, failed) for units in by_network.values()]
        refusal = _of_any_group(next((one for one in refusals if one is not None), None), held)
        if refusal is not None:
            for unit in held:
                unit.whole.note_versions()
            return refusal
        for units in by_network.values():
            for unit in units if not failed else ():
                _keep(unit, held[unit])
            exchange_changes(units, units[0].collectives.data)
        return None


@contextmanager
def gathered_while_loading(model: nn.Module, modifier_rank: int | None) -> Iterator[None]:
    """Return a context in which ``model.load_state_dict`` gathers the parameters of one unit after the other; collective.

    The parameters of a unit are whole while the smallest module that has all of them, and the modules in it, load their values. Units of
    ``model`` as a whole are whole from the start, for models whose own ``load_state_dict`` calls those of their children.

    Args:
        model: The module whose ``load_state_dict`` is called, on every rank.
        modifier_rank: See ``GatheredParameters``.
    """
    by_module, entered = _by_smallest_module(model), dict[nn.Module, GatheredParameters]()

    def enter(module: nn.Module) -> None:
        if module not in entered:
            entered[module] = GatheredParameters(by_module[module], modifier_rank=modifier_rank).__enter__()

    def load(module: nn.Module, function: Callable[..., None], *args: Any) -> None:
        enter(module)
        function(*args)

    def leave(module: nn.Module, _keys: Any) -> None:
        if module in entered:
            entered.pop(module).__exit__(None, None, None)

    name = "_load_from_state_dict"
    former = {module: vars(module).get(name) for module in by_module}
    hooks = [module.register_load_state_dict_post_hook(leave) for module in by_module]
    for module in by_module:
        vars(module)[name] = partial(load, module, getattr(module, name))
    try:
        if model in by_module:
            enter(model)
        yield
        for module in reversed(list(entered)):
            leave(module, None)
    except BaseException as error:
        while entered:
            entered.popitem()[1].__exit__(type(error), error, error.__traceback__)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for module, own in former.items():
            del vars(module)[name]
            if own is not None:
                vars(module)[name] = own


def _by_smallest_module(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the parameters of ``model`` by the smallest module that has all parameters of their unit; ``model`` for those in no unit."""
    params: dict[Unit | None, list[nn.Parameter]] = {}
    places: dict[Unit | None, list[str]] = {None: []}
    for path, module in model.named_modules(remove_duplicate=False):
        for param in module._parameters.values():
            if param is None:
                continue
            owner = find_unit(param)
            unit, names = (None if owner is None else owner[0]), path.split(".") if path else []
            params.setdefault(unit, []).append(param)
            places[unit] = list(os.path.commonprefix([places.get(unit, names), names]))
    found: dict[nn.Module, list[nn.Parameter]] = {}
    for unit, of_unit in params.items():
        found.setdefault(model.get_submodule(".".join(places[unit])), []).extend(of_unit)
    return found


def _is_noted(unit: Unit, was_whole: bool, written_by_all: bool) -> bool:
    """Return whether the next step compares changes, because the end of the context does not, or not over the ranks of a model axis.

    Args:
        unit: The unit.
        was_whole: It was unsharded before the context.
        written_by_all: The context has no ``modifier_rank``.
    """
    topology = unit.collectives.topology
    if unit.gathers or (unit.built is not None and unit.built.shown):
        return False
    return topology.model is not None or (was_whole and written_by_all and topology.data.world > 1)


def _require_complete(
    wanted: Mapping[Unit, Iterable[int]], loose: Iterable[tuple[torch.Tensor, Collectives]], modifier_rank: int, has_others: bool
) -> None:
    """Raise unless ``modifier_rank`` has all values of the parameters; local, with the same result on all ranks.

    Args:
        wanted: Positions of the parameters in units.
        loose: Parameters outside of units, each with its network.
        modifier_rank: See ``GatheredParameters``.
        has_others: Other stages of a pipeline hold further parameters.

    Raises:
        StateError: The parameters are divided over a pipeline, or one of them over ranks of tensor or expert parallelism.
    """
    found: list[tuple[torch.Tensor | None, Collectives, str]] = []
    found += [(unit.params[index], unit.collectives, unit.layout.slots[index].name) for unit in wanted for index in wanted[unit]]
    found += [(param, network, noted_loose(param)[1]) for param, network in loose]
    names = [name for param, net, name in found if param is not None and (is_part(param) or net.topology.pipe is not None)]
    if names or has_others:
        raise StateError(
            f"GatheredParameters(modifier_rank={modifier_rank}): rank {modifier_rank} does not have all values of "
            f"{names[0] if names else 'a parameter of another stage'}, which tensor parallelism, experts or a pipeline divide over "
            "ranks, so parts of other ranks would keep their values. Leave modifier_rank out, and let each rank write its part"
        )


def _keep(unit: Unit, indices: Iterable[int]) -> None:
    """Copy writes to the parameters at ``indices`` into shard and master; local."""
    if unit.state is UnitState.UNSHARDED:
        adopt_writes(unit)
        return
    unit.alone.take_assigned()
    for index in indices:
        param = unit.params[index]
        if param is not None:
            unit.alone.adopt_value(index, param.data)


def _compare(units: Sequence[Unit], held: Mapping[Unit, Sequence[int]], failed: bool) -> StateError | None:
    """Compare parameters over the ranks that hold the same ones; collective. Return the error for values that differ, or None."""
    network = units[0].collectives.data
    if network.world == 1:
        return None
    sums = {}
    for unit in units:
        for index in held[unit]:
            param = unit.params[index]
            if param is not None:
                sums[unit.layout.slots[index].name] = checksum(param.data)
    total = zlib.crc32(repr(sums).encode()) & 0xFFFFFF  # votes have 24 bits
    largest, smallest, somewhere = network.largest_of([total, -total, failed], "gathered parameters")
    if somewhere:
        return StateError("another rank has left the block of GatheredParameters with an exception; see that rank's message")
    if largest == -smallest:
        return None
    by_rank: list[dict[str, int]] = network.gather_objects(sums, "gathered parameters")
    names = [name for name in sums if any(other.get(name) != by_rank[0].get(name) for other in by_rank)]
    return StateError(
        f"{', '.join(names[:5])}: written inside GatheredParameters(...) without modifier_rank, and the ranks have different values now. "
        "Pass modifier_rank=0 to keep what rank 0 wrote, or write the same on all ranks. The changes are dropped"
    )


def _of_any_group(refusal: StateError | None, held: Iterable[Unit]) -> StateError | None:
    """Return ``refusal``, or the error of ranks that hold other parts of the same layers; collective over the ranks that hold layers
    together. Which experts a context holds may differ between these ranks, so units of experts alone are not compared.
    """
    axes = [unit.collectives.topology for unit in held if not unit.collectives.topology.of_experts]
    layers = next((axis.layers.model for axis in axes if axis.layers.model is not None and axis.data.world > 1), None)
    if layers is None or not (network := open_collectives(layers)).any_rank(refusal is not None, "gathered parameters"):
        return refusal
    texts: list[str] = network.gather_objects(str(refusal or ""), "gathered parameters")
    return refusal or StateError(next(filter(None, texts)))


def _each(params: Iterable[torch.Tensor | None] | torch.Tensor | None) -> Iterable[torch.Tensor | None]:
    """Return the argument of ``GatheredParameters`` as an iterable."""
    return [params] if isinstance(params, torch.Tensor) else () if params is None else params


def _loose_of(params: Iterable[torch.Tensor | None] | torch.Tensor | None) -> list[tuple[torch.Tensor, Collectives]]:
    """Return the parameters of an engine's model that are in no unit, each with the network of the ranks that hold it."""
    found: dict[int, tuple[torch.Tensor, Collectives]] = {}
    for param in _each(params):
        if not isinstance(param, torch.Tensor):
            continue
        network = network_of_loose(param) if find_unit(param) is None else None
        if network is not None:
            found[id(param)] = param, network
    return list(found.values())


def units_of(params: Iterable[torch.Tensor | None] | torch.Tensor | None) -> list[Unit]:
    """Return the units that contain any of ``params``, each once, in order of first appearance."""
    return list(positions_of(params))


def positions_of(params: Iterable[torch.Tensor | None] | torch.Tensor | None) -> dict[Unit, list[int]]:
    """Return the units that contain any of ``params``, in order of first appearance, with the positions of these parameters, each once."""
    found: dict[Unit, dict[int, None]] = {}
    for param in _each(params):
        owner = find_unit(param) if isinstance(param, torch.Tensor) else None
        if owner is not None:
            found.setdefault(owner[0], {})[owner[1]] = None
    return {unit: list(indices) for unit, indices in found.items()}
