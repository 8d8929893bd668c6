"""Find which parameters a script trains: parameters are frozen, train again, or are added."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.step.agreement import SharedFact
from hf_zero.core.units.marks import is_elsewhere
from hf_zero.core.units.names import named_params
from hf_zero.core.units.sharded_parameter import requires_gradient
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.errors import StateError
from hf_zero.observe import warn_once


class _Registrations:
    """Counter of the parameters and modules that are registered anywhere in this process, from the first engine on."""

    count = 0
    _hooked = False

    @classmethod
    def watch(cls) -> None:
        """Begin to count; further calls do nothing."""
        if not cls._hooked:
            cls._hooked = True
            register_module_parameter_registration_hook(cls._add)
            register_module_module_registration_hook(cls._add)

    @classmethod
    def _add(cls, *_: object) -> None:
        cls.count += 1


_REMOVED = "fewer tensors in param groups"


@dataclass(frozen=True)
class Joining:
    """A parameter that is trained from this step on: its dotted name, the parameter, and the index of its param group."""

    name: str
    param: nn.Parameter
    group: int


class TrainedSet:
    """The parameters of a model that its optimizer trains, found by one look per optimizer step.

    [Note: trained parameters] As in plain PyTorch, a parameter is trained if it requires a gradient and is in a param group; both may
    change at any time. Units are laid out for the parameters that were trained at ``initialize``. The look before each update compares
    ``requires_grad`` of all parameters, the number of registrations in the process and the tensors in the param groups with those of the
    last look, and computes a digest of the set, which the ranks compare in the vote that each step takes anyway. If the set has changed:

    - A parameter of a unit that was frozen, or is no longer in the model, *rests*: its elements become segments of their own, which no
      update touches. Its optimizer state is kept, and its step count does not change until it has a gradient again.
    - A parameter that has a gradient for the first time *joins*: it gets a new unit. Its gradient of this step is in ``param.grad``,
      unsharded and of this rank only, and is reduced like the gradients of any unit.

    - A parameter without a gradient on any rank rests in this step, as plain PyTorch skips it (``grad`` is None): a head that the loss does
      not use, a layer that was dropped, the branch that this batch has not taken. Its unit is still reduced, because the next backward may
      reach it.

    In all cases the gradient decides: a parameter that was frozen after it had a gradient is updated once more, and one that was unfrozen
    is not updated before any rank has a gradient of it. A script may unfreeze a parameter, run a backward and freeze it again before the
    step, which then finds the set of the last look. So each rank also reports in this vote whether a parameter that rests or is in no
    trained unit has a gradient, and whether one that is updated has none; only then the ranks exchange which ones.

    Attributes:
        digest: Digest of the names and groups of the trained parameters; it differs between ranks that train different parameters.
        changed: Whether the set differs from the one that units and segments are laid out for.

    Args:
        module: The user's module.
        optimizer: The engine's optimizer.
        groups: Param group of each parameter of the optimizer by id, frozen ones included.
        default_group: Param group for parameters that are in no group, if the optimizer trains all that require a gradient; else None.
    """

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer, groups: dict[int, int], default_group: int | None = None) -> None:
        _Registrations.watch()
        self._module, self._optimizer, self._groups, self._default_group = module, optimizer, groups, default_group
        self._foreign: list[str] = []  # tensors in param groups that are not parameters of the model
        self._names: list[str] = []
        self._params: list[nn.Parameter] = []
        self._present: set[int] = set()  # ids of ``_params``
        self._listed: list[list[int]] = []  # ids of the tensors in the param groups
        self._registrations = -1
        self._some_left_out = False  # whether parameters are in no param group
        self._outside: list[Joining] | None = None  # see `outside`; None until it is first requested
        self._read()
        self._flags = self._requiring()
        self._untrained: list[tuple[str, nn.Parameter]] | None = None  # see `untrained`
        self.digest = self._digest()
        self.changed = False
        self._frozen: set[int] = set()  # ids of the units' parameters that required no gradient when units and segments were laid out

    def look(self) -> int:
        """Compare the present set with that of the last look, and return its digest; local."""
        anew = self._registrations != _Registrations.count or self._listed != self._lists()
        if anew:
            self._read()
        flags = self._requiring()
        if anew or flags != self._flags:
            self._flags, self._outside, self._untrained = flags, None, None
            digest = self._digest()
            self.changed |= digest != self.digest
            self.digest = digest
            self._warn_of_untrained()
        return self.digest

    def alike(self) -> SharedFact:
        """Look again; return the digest as a fact for the vote of a step, with an error that names parameters and ranks."""
        return SharedFact([self.look()], self._refuse)

    def _refuse(self, collectives: Collectives) -> NoReturn:
        by_rank: list[list[str]] = collectives.gather_objects([*self._trained_names(), *self._foreign], "trained parameters")
        everywhere = set(by_rank[0]).intersection(*by_rank[1:])
        differing = list(dict.fromkeys(name for names in by_rank for name in names if name not in everywhere))
        clauses = []
        for name in differing[:5]:
            ranks = ", ".join(str(rank) for rank, names in enumerate(by_rank) if name in names)
            clauses.append(f"{name} on rank(s) {ranks}")
        more = f", and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise StateError(
            f"the ranks train different parameters: {'; '.join(clauses)} of {len(by_rank)}{more}. requires_grad was set, or a module or a "
            "param group was added, on some ranks only: do the same on all ranks"
        )

    def require_own(self) -> None:
        """Raise if param groups contain tensors that are not parameters of the model; all ranks have the same ones.

        Raises:
            StateError: There are such tensors.
        """
        if _REMOVED in self._foreign:
            raise StateError(
                "a script has removed tensors from lists in optimizer.param_groups, or moved them to others. They are this rank's parts "
                "of masters, not the model's parameters: to train a parameter no longer, call param.requires_grad_(False) on all ranks; to "
                "train some with other options, make param groups of them before initialize()"
            )
        if self._foreign:
            raise StateError(
                f"the optimizer was given {', '.join(self._foreign[:3])} after initialize(), which is not a parameter of the model: "
                "add the module to the model first, then its parameters to the optimizer, or train it with an optimizer of its own"
            )

    @property
    def over_stages(self) -> bool:
        """Return whether other ranks have other layers of the model (a pipeline), as of the last look; the same on every rank."""
        return any(map(is_elsewhere, self._params))

    @property
    def may_leave_out(self) -> bool:
        """Return whether the model may have parameters in no param group, as of the last look; local."""
        return self._default_group is None and (self._some_left_out or self._registrations != _Registrations.count)

    def untrained(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters that require a gradient and are in no param group, in the model's order, as of the last look;
        local.
        """
        if self._untrained is None:
            required = {id(param) for param, requires in zip(self._params, self._flags, strict=True) if requires}
            self._untrained = [(name, param) for name, param in self.in_no_group().items() if id(param) in required]
        return self._untrained

    def in_no_group(self) -> dict[str, nn.Parameter]:
        """Return the parameters in no param group by name, in the model's order, frozen ones included, as of the last look; local."""
        grouped = {name for name, _, _ in self._grouped()}
        return {name: param for name, param in zip(self._names, self._params, strict=True) if name not in grouped}

    def outside(self) -> list[Joining]:
        """Return the parameters of param groups that belong to no trained unit, frozen or not, in the model's order; local."""
        if self._outside is None:
            self._outside = [Joining(*entry) for entry in self._grouped() if not _is_in_trained_unit(entry[1])]
        return self._outside

    def waiting(self) -> list[Joining]:
        """Return the parameters of ``outside`` that have a gradient on this rank; local."""
        return [entry for entry in self.outside() if entry.param.grad is not None]

    def agree_on_joining(self, everyone: Collectives) -> list[Joining]:
        """Return the parameters of ``outside`` that have a gradient on any rank, in the model's order; collective.

        Raises:
            StateError: On all ranks, if one of the parameters is in no param group on another rank, or is frozen and only some ranks have
                written a gradient of it, or another stage of a pipeline holds it.
        """
        self._read()  # no event reports modules that were removed
        self._flags, self._outside, self._untrained = self._requiring(), None, None
        self.digest = self._digest()
        own = [(entry.name, is_elsewhere(entry.param)) for entry in self.waiting()]
        gathered: list[list[tuple[str, bool]]] = everyone.gather_objects(own, "parameters that join")
        _refuse_elsewhere(sorted({name for names in gathered for name, elsewhere in names if elsewhere}))
        by_rank = [[name for name, _ in names] for names in gathered]
        somewhere = set[str]().union(*by_rank)
        found = [entry for entry in self.outside() if entry.name in somewhere]
        if everyone.any_rank(len(found) < len(somewhere), "parameters that join"):
            raise StateError(
                f"{', '.join(sorted(somewhere)[:5])}: first trained after initialize(), but on some ranks the parameter is not in "
                "the model, or not in a param group of the optimizer. Add modules and param groups on all ranks in the same way"
            )
        everywhere = somewhere.intersection(*by_rank)
        alone = next((entry.name for entry in found if not entry.param.requires_grad and entry.name not in everywhere), "")
        if alone:
            ranks = ", ".join(str(rank) for rank, names in enumerate(by_rank) if alone in names)
            raise StateError(
                f"{alone} requires no gradient and has one ({alone}.grad) on rank(s) {ranks} of {len(by_rank)} only, but the engine "
                "averages gradients over all ranks: write the gradient on every rank, with zeros on ranks that have nothing to add"
            )
        return found

    def idle(self, unit: Unit, resting: Collection[int]) -> list[int]:
        """Return the positions in ``unit`` of the parameters that rest, or required no gradient or were not in the model at this look or
        the last one; local.
        """
        slots = zip(unit.params, unit.layout.slots, strict=True)
        return [
            index
            for index, (param, slot) in enumerate(slots)
            if slot.numel and (index in resting or (param is not None and (not self.trains(param) or id(param) in self._frozen)))
        ]

    def trains(self, param: nn.Parameter) -> bool:
        """Return whether ``param`` requires a gradient and was in the model when its parameters were last listed; local."""
        return param.requires_grad and id(param) in self._present

    def laid_out(self, resting: Mapping[int, Collection[int]], units: Sequence[Unit]) -> None:
        """Record the parameters for which units and segments are laid out now.

        If a parameter is trained but requires no gradient any more (or has left the model), the next step looks again, and it rests from
        then on. One that rests but requires a gradient rests until it has one.

        Args:
            resting: Positions of the parameters that rest, by id of their unit.
            units: All trained units.
        """
        self._outside = None
        self._frozen = {id(param) for unit in units for param in unit.params if param is not None and not self.trains(param)}
        self.changed = any(
            param is not None and slot.numel and not self.trains(param) and index not in resting.get(id(unit), ())
            for unit in units
            for index, (param, slot) in enumerate(zip(unit.params, unit.layout.slots, strict=True))
        )

    # -- the look -------------------------------------------------------------------------------------------------------

    def _requiring(self) -> list[bool]:
        return requires_gradient(self._params)

    def _lists(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _read(self) -> None:
        """List the model's parameters, and remove parameters of the model that a script has added to the inner optimizer's groups from
        these; local.
        """
        self._registrations = _Registrations.count
        named = dict(named_params(self._module))
        self._names, self._params = list(named), list(named.values())
        self._present = known = {id(param) for param in self._params}
        own = self._optimizer.group_of_tensors()
        self._look_for_removed(own)
        for index, group in enumerate(self._optimizer.param_groups):
            for position, tensor in enumerate(group["params"]):
                if id(tensor) in own:
                    continue
                if id(tensor) in known:
                    self._groups[id(tensor)] = index
                else:
                    self._foreign.append(f"tensor {position} of param group {index}, of shape {tuple(tensor.shape)}")
            group["params"] = [tensor for tensor in group["params"] if id(tensor) in own]
        self._listed = self._lists()
        self._some_left_out = not self._present <= self._groups.keys()

    def _look_for_removed(self, own: Mapping[int, int]) -> None:
        """Note whether the script has removed tensors of ``own`` (id -> group) from their param groups; local.

        Lists of new parameters alone are no removal: the script has replaced all parameters of the model.
        """
        listed = [(tensor, index) for index, group in enumerate(self._optimizer.param_groups) for tensor in group["params"]]
        removed = own.items() - {(id(tensor), index) for tensor, index in listed}
        replaced = listed and all(id(tensor) in self._present and not _is_in_trained_unit(tensor) for tensor, _ in listed)
        if removed and not replaced:
            self._foreign.append(_REMOVED)

    def _grouped(self) -> Iterator[tuple[str, nn.Parameter, int]]:
        """Yield name, parameter and param group of each parameter that is in a group."""
        for name, param in zip(self._names, self._params, strict=True):
            group = self._groups.get(id(param), self._default_group)
            if group is not None:
                yield name, param, group

    def _trained(self) -> Iterator[tuple[str, nn.Parameter, int]]:
        """Yield name, parameter and param group of each trained parameter."""
        required = {id(param) for param, requires in zip(self._params, self._flags, strict=True) if requires}
        return (entry for entry in self._grouped() if id(entry[1]) in required)

    def _trained_names(self) -> Iterator[str]:
        return (f"{name} (param group {group})" for name, _, group in self._trained())

    def _digest(self) -> int:
        return zlib.crc32("\n".join([*self._trained_names(), *self._foreign]).encode())

    def _warn_of_untrained(self) -> None:
        """Warn of parameters that require a gradient but are in no param group: plain PyTorch does not train them either."""
        untrained = self.untrained()
        if untrained:
            warn_once(
                f"{len(untrained)} parameter(s) require a gradient and are in no param group of the optimizer ({untrained[0][0]}, ...): "
                "the engine averages their gradients over ranks, and does not train them. Call engine.optimizer.add_param_group("
                '{"params": ...}) with them, or give the optimizer all parameters before initialize()'
            )


def _is_in_trained_unit(param: torch.Tensor) -> bool:
    owner = find_unit(param)
    return owner is not None and owner[0].trainable


def _refuse_elsewhere(names: Sequence[str]) -> None:
    """Raise if there are ``names``: parameters with a gradient on a rank of another stage of a pipeline."""
    if names:
        raise StateError(
            f"a loss computes with {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''} outside of the model's "
            "forward, and another stage of the pipeline holds these parameters: this rank has no values of them. Use the optimizer's "
            "weight decay in place of the penalty, or ZeRO stage 3 or tensor parallelism in place of the pipeline"
        )
