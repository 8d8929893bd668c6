"""Find writes of a script to the tensors in ``optimizer.param_groups``, parts of this rank's masters, and show them in the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.sharded_parameter import quiet
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import own_part_changed
from hf_zero.errors import StateError

_DATA: Any = torch.Tensor.data  # torch's own property
_GRAD: Any = vars(torch._C.TensorBase)["grad"].__get__
_WITHOUT_FUNCTION: Any = torch._C.DisableTorchFunctionSubclass
_OF_VALUES: Any = {getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")} | {_DATA.__set__}
_OF_SHAPE_NAMES = frozenset(
    (
        "__get__", "__set__", "size", "dim", "numel",
        "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size", "__len__",
        "__repr__", "__hash__", "get_device", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty",
        "new_full", "new_tensor", "requires_grad_", "__reduce_ex__", "is_inference", "untyped_storage", "data_ptr",
    )
)  # fmt: skip
_SHOWN, _KEEPER = "_hf_zero_shown", "_hf_zero_keeper"  # attributes of a part: the tensor that ``data`` returns; the part's ``MasterParts``


def _refuse_gradients(part: Any) -> None:
    """Raise if gradients wait for a step: ``part`` has none outside of updates, so work with it (SAM's first step) would do nothing.

    Raises:
        StateError: They do.
    """
    if _keeper(part).waits() and not quiet:
        raise StateError(
            "the script read gradients of the tensors in optimizer.param_groups between backward and step(): they are parts of masters, "
            "which have gradients only inside of step(). Do the work in step(), or use hf_zero.utils.safe_get_full_grad, or param.grad of "
            'the model\'s parameters ("hf_zero": {"show_gradients": true})'
        )


class MasterPart(nn.Parameter):
    """The tensor of a segment while no update runs.

    [Note: writes to parts of masters] A script may write to the tensors in ``optimizer.param_groups`` (weight decay by hand). Each of them
    is a part of a master. Where the master is another tensor than the shard, a look for written weights compares the two, and cannot tell
    which one was written. So torch's counts of writes in place are compared: each part has a count of its own, and ``data`` always returns
    the same tensor, whose count is compared too. torch's optimizers choose their fast implementations by the class of the parameters, so
    during an update the parts are ordinary parameters. Operations of a script wait for an offloaded update that is still running.
    """

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for part in (arg for arg in tree_leaves((args, kwargs)) if type(arg) is MasterPart):
            _keeper(part).settle()
        if func == _GRAD:
            _refuse_gradients(args[0])
        with _WITHOUT_FUNCTION():
            return func(*args, **(kwargs or {}))

    @property
    def data(self: Any) -> torch.Tensor:
        """Return the values, without gradient: the same tensor at every call."""
        return _shown(self)

    @data.setter
    def data(self: Any, value: torch.Tensor) -> None:
        """Copy ``value`` into the master: other memory would be no part of it."""
        if value is not (shown := _shown(self)):
            shown.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with the values: a copy is no part of a master."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_shown(self).clone(), requires_grad=False)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a recipe for an ordinary parameter with the values."""
        return nn.Parameter(_shown(self), requires_grad=False).__reduce_ex__(protocol)


class RestingParam(nn.Parameter):
    """A parameter of full shape that an optimizer updates, outside of updates: it has shape and type, and no values."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func == _GRAD:
            _refuse_gradients(args[0])
        elif func in _OF_VALUES or name not in _OF_SHAPE_NAMES:
            raise StateError(
                f"{'data' if func in _OF_VALUES else name} of a tensor in optimizer.param_groups: this optimizer updates whole parameters, "
                "whose values are here inside of step() only. Read and write the parameters of the model: for param in model.parameters(), "
                "under torch.no_grad()"
            )
        with _WITHOUT_FUNCTION():
            return func(*args, **(kwargs or {}))


def _keeper(part: Any) -> MasterParts:
    keeper: MasterParts = vars(part)[_KEEPER]
    return keeper


def _shown(part: Any) -> torch.Tensor:
    _keeper(part).settle()
    shown: torch.Tensor | None = vars(part).get(_SHOWN)
    if shown is None:
        with _WITHOUT_FUNCTION():
            shown = vars(part)[_SHOWN] = _DATA.__get__(part)
        _keeper(part).note_shared(part)
    return shown


def set_memory(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Point ``tensor.data`` at ``values``, also if it is a part of a master."""
    with _WITHOUT_FUNCTION():
        _DATA.__set__(tensor, values)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor``, without gradient, also if it has none to show to scripts now."""
    with _WITHOUT_FUNCTION():
        values: torch.Tensor = _DATA.__get__(tensor)
    return values


def new_part(values: torch.Tensor) -> nn.Parameter:
    """Return a segment's tensor, which shares the memory of ``values`` but not its count of writes."""
    return nn.Parameter(values.data, requires_grad=False)


class MasterParts:
    """The segments' tensors of one optimizer, and the writes of a script to them.

    Attributes:
        late: Names of units that were written between an update and a forward and that other ranks hold whole: the forward has computed
            with their previous values on those ranks.
        settle: Waits for running updates.
        waits: Returns whether gradients wait for a step.
    """

    def __init__(self) -> None:
        self.late: list[str] = []
        self.waits: Callable[[], bool] = bool
        self.settle: Callable[[], None] = lambda: None
        self._parts: list[tuple[Unit, nn.Parameter, Callable[[], torch.Tensor | None]]] = []
        self._tensors: list[nn.Parameter] = []  # those of ``_parts``
        self._counts: list[int] = []  # counts of writes at the last look, by part
        self._shared: list[Any] = []  # parts whose ``data`` the script has asked for
        self._shared_counts: list[int] = []  # counts of writes to these tensors
        self._resting: list[nn.Parameter] = []  # parameters of full shape, which have values inside of an update only

    def watch(self, parts: Iterable[tuple[Unit, nn.Parameter, Callable[[], torch.Tensor | None]]]) -> None:
        """Look for writes to these parts from now on.

        Args:
            parts: Unit, tensor, and a function that returns the part of the shard that follows it (None where the master is the shard).
        """
        self.pause()
        self._parts = [entry for entry in parts if type(entry[1]) is nn.Parameter]  # a plan has tensors of another class
        self._shared = []
        self._tensors = [part for _, part, _ in self._parts]
        for part in self._tensors:
            vars(part)[_KEEPER] = self
        self._shared += [part for part in self._tensors if _SHOWN in vars(part)]
        self.resume()

    def rest(self, params: Iterable[nn.Parameter]) -> None:
        """Note that ``params``, of full shape, have no values outside of updates."""
        self._resting = list(params)
        for param in self._resting:
            vars(param)[_KEEPER] = self
            param.__class__ = RestingParam

    def note_shared(self, part: nn.Parameter) -> None:
        """Note that the script has ``part.data``, which must stay the memory of its values."""
        self._shared.append(part)

    @property
    def shares_masters(self) -> bool:
        """Return whether the script has read ``data`` of a part."""
        return bool(self._shared)

    def pause(self) -> None:
        """Begin an update: the parts are ordinary parameters, and may be written."""
        for part in (*self._tensors, *self._resting):
            part.__class__ = nn.Parameter

    def resume(self) -> None:
        """End an update, whose writes do not count."""
        for part in self._tensors:
            part.__class__ = MasterPart
        for param in self._resting:
            param.__class__ = RestingParam
        self._look()

    def _look(self) -> set[int]:
        """Count writes again, and return the ids of the parts that were written since the last look."""
        with _WITHOUT_FUNCTION():
            counts, shared = [part._version for part in self._tensors], [vars(part)[_SHOWN]._version for part in self._shared]
        if counts == self._counts and shared == self._shared_counts:
            return set()
        before = self._shared_counts + [0] * (len(shared) - len(self._shared_counts))  # the count of a new tensor
        written = {id(part) for part, now, then in zip(self._tensors, counts, self._counts, strict=False) if now != then}
        written |= {id(part) for part, now, then in zip(self._shared, shared, before, strict=False) if now != then}
        self._counts, self._shared_counts = counts, shared
        return written

    @torch.no_grad()
    def take(self, forward: bool) -> None:
        """Copy values that a script has written since the last call into shards and into this rank's part of whole buffers; local.

        Args:
            forward: A forward begins. Before a step this is False: the step distributes the values.
        """
        found = self._look()
        written: dict[int, Unit] = {}
        for unit, part, low in self._parts if found else ():
            if id(part) in found:
                written[id(unit)] = unit
                if (follows := low()) is not None:
                    follows.copy_(part)  # waits for a running update of the unit
        for unit in written.values():
            whole = unit.state is UnitState.UNSHARDED
            if whole and unit.reshards and unit.exact:
                unit.full[unit.owned.start : unit.owned.stop].copy_(unit.shard)
            own_part_changed(unit)
            if forward and whole and unit.layout.world > 1:
                self.late.append(unit.name)

    def refusal(self) -> str:
        """Return the error for ``late``, and clear it; "" if there is none."""
        late, self.late = list(dict.fromkeys(self.late)), []
        if not late:
            return ""
        return (
            f"a script has written to tensors in optimizer.param_groups (unit {late[0]}) after step(), and a forward has run since. Each "
            "rank has only its own parts of masters there (ZeRO stages 1 and 2; at stage 3 parameters that stay whole), so the other ranks "
            "have computed with the previous values. Write to the parameters of the model instead (for param in model.parameters(), under "
            "torch.no_grad()), or write between backward() and step()"
        )
