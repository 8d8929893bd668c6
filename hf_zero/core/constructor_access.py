"""Unshard sharded parameters that a constructor reads or writes inside ``zero.Init``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_zero.core.schedule.gathered_parameters import GatheredParameters
from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.unit import Unit, find_unit, full_shape, is_sharded

# Fewer parameters than this appear in one line of a constructor. Of the parameters accessed, the oldest are resharded first.
_MOST_OPEN = 8

_SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "nbytes"})
_SHAPE_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "__len__"})
_DEVICE_ATTRIBUTES = frozenset({"device", "is_cpu", "is_cuda", "is_xpu", "is_mps", "get_device"})
_VALUE_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_VALUELESS_METHODS = frozenset(
    {"requires_grad_", "is_floating_point", "is_complex", "element_size", "register_hook", "register_post_accumulate_grad_hook", "__hash__"}
)


class ConstructorAccess(TorchFunctionMode):
    """A mode that unshards a sharded parameter when a torch function that needs its values receives it, and keeps the values that rank 0
    writes.

    [Note: writes in constructors] ``self.out = nn.Linear(...)`` shards the weight. A write in the next line,
    ``self.out.weight.data.zero_()``, would go to an empty tensor and be lost silently; torch's own Transformer ends its constructor with a
    loop of such writes. So while a model is built, a parameter that is accessed is unsharded, collectively, until the next module is
    assigned (or ``_MOST_OPEN`` others were accessed). Constructors must run the same code on all ranks, since otherwise the ranks' modules
    would differ anyway; if one rank alone prints a norm, it waits for the other ranks. Queries about shapes are answered without values,
    and queries about dtypes and gradients need none. The device is the one that the parameter was built on ([Note: as it was built]).
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Unit, GatheredParameters] = {}  # in the order in which they were unsharded

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owned = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, nn.Parameter) and find_unit(value)]
        sharded = [param for param in owned if is_sharded(param)]
        if not sharded:
            return func(*args, **kwargs)
        name, attribute = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            if attribute in _SHAPE_ATTRIBUTES:
                return func(_placeholder(sharded[0]), *args[1:])
            if attribute in _DEVICE_ATTRIBUTES:
                return func(_empty_as_built(sharded[0]), *args[1:])
            touches = attribute in _VALUE_ATTRIBUTES
        elif name in _SHAPE_METHODS and args and args[0] is sharded[0]:
            return func(_placeholder(sharded[0]), *args[1:], **kwargs)
        elif name in _DEVICE_ATTRIBUTES:
            return func(_empty_as_built(sharded[0]), *args[1:], **kwargs)
        else:
            touches = name not in _VALUELESS_METHODS
        if touches:
            self._touch(owned)
        return func(*args, **kwargs)

    def _touch(self, params: Sequence[nn.Parameter]) -> None:
        """Unshard all of ``params``, and reshard the other parameters that have been unsharded longest if there are too many."""
        wanted = {find_unit(param)[0]: param for param in params}  # type: ignore[index]
        others = [unit for unit in self._open if unit not in wanted]
        for unit in others[: max(0, len(others) + len(wanted) - _MOST_OPEN)]:
            self._open.pop(unit).__exit__(None, None, None)
        for unit, param in wanted.items():
            if unit not in self._open and unit.state is not UnitState.UNSHARDED:
                self._open[unit] = GatheredParameters([param], modifier_rank=0)
                self._open[unit].__enter__()

    def close(self) -> None:
        """Reshard all parameters that were unsharded, with rank 0's values; collective."""
        while self._open:
            _, context = self._open.popitem()
            context.__exit__(None, None, None)

    def abandon(self, error: BaseException) -> None:
        """Reshard all parameters that were unsharded, and discard values that were written to them; local."""
        while self._open:
            _, context = self._open.popitem()
            context.__exit__(type(error), error, error.__traceback__)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _placeholder(param: nn.Parameter) -> torch.Tensor:
    return torch.empty(full_shape(param), dtype=param.dtype, device="meta")


def _empty_as_built(param: nn.Parameter) -> torch.Tensor:
    owner = find_unit(param)
    built = owner[0].built if owner is not None else None
    return torch.empty(0, dtype=param.dtype, device=built.device) if built is not None else param.detach()
