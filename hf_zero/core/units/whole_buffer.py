"""The whole buffer of a unit: allocated, shown to the parameters, freed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from itertools import repeat

import torch
from torch import nn

from hf_zero.core.units.layout import UnitLayout
from hf_zero.errors import StateError
from hf_zero.memory.host_memory import on_huge_pages


class WholeBuffer:
    """One flat buffer, (padded_numel,), and its view per parameter; the storage comes and goes, the tensors stay.

    Attributes:
        flat: The buffer.
        nbytes: Bytes that it takes while allocated.

    Args:
        layout: Offsets of the parameters.
        flat: The buffer, allocated.
    """

    def __init__(self, layout: UnitLayout, flat: torch.Tensor) -> None:
        self.flat = flat
        self._layout = layout
        self.nbytes = flat.untyped_storage().nbytes()
        self._empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
        self._unknown = torch.full((1,), math.nan, dtype=flat.dtype, device=flat.device)
        self._views = self._make_views()

    def _make_views(self) -> list[torch.Tensor]:
        return [self.flat[slot.range.start : slot.range.stop].view(slot.shape) for slot in self._layout.slots]

    def allocate(self) -> None:
        """Gives the buffer memory; what it holds is undefined."""
        self.flat.untyped_storage().resize_(self.nbytes)
        on_huge_pages(self.flat)

    def show(self, params: Iterable[nn.Parameter | None]) -> None:
        """Points each parameter at its view."""
        _point(params, self._views)

    def show_placeholders(self, params: Iterable[nn.Parameter | None]) -> None:
        """Gives each parameter its shape, without memory of its own: every element is the same NaN."""
        _point(params, (self._unknown.expand(slot.shape) for slot in self._layout.slots))

    def hide(self, params: Iterable[nn.Parameter | None]) -> None:
        """Empties the parameters."""
        _point(params, repeat(self._empty))

    def refuse_assigned(self, params: Iterable[nn.Parameter | None]) -> None:
        """Raises when a hidden parameter was given values: they would be lost.

        Raises:
            StateError: It names the parameter.
        """
        with torch._C.DisableTorchFunction():  # zero.Init would answer with the whole shape
            given = [index for index, param in enumerate(params) if param is not None and param.numel()]
        for index in given:
            raise StateError(
                f"parameter {self._layout.slots[index].name} was given data while it was divided (ZeRO stage 3). Set it on all ranks "
                "inside `with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`"
            )

    def adopt(self, params: Iterable[nn.Parameter | None]) -> bool:
        """Takes the values of parameters that were given other memory (``param.data = value``), and shows them their views again.

        Returns:
            Whether there were any.

        Raises:
            StateError: The other memory has another shape.
        """
        found = False
        start, width = self.flat.data_ptr(), self.flat.element_size()
        for param, view, slot in zip(params, self._views, self._layout.slots, strict=True):
            address = start + slot.offset * width if slot.numel else 0  # the view's, which would say it more slowly
            if param is None or (param.data_ptr() == address and param.shape == slot.shape):
                continue
            if param.shape != view.shape:
                raise StateError(
                    f"parameter {slot.name} has shape {tuple(view.shape)}, and was given data of shape {tuple(param.shape)} while it was "
                    "whole; a parameter of an engine keeps its shape: register a new one in its place, before initialize"
                )
            view.copy_(param.data)
            param.data = view
            found = True
        return found

    def free(self, params: Iterable[nn.Parameter | None], leave: bool) -> None:
        """Empties the parameters and gives the memory back.

        Args:
            params: The parameters of the unit.
            leave: Tensors that somebody took of the buffer keep their values, see [Note: tensors taken out of a gather].
        """
        self.hide(params)
        # ``param.numpy()`` has taken the right to resize from the storage for good.
        if (leave and self._is_held()) or not self.flat.untyped_storage().resizable():
            self.flat = torch.empty_like(self.flat)
            self._views = self._make_views()
        self.flat.untyped_storage().resize_(0)

    def _is_held(self) -> bool:
        """[Note: tensors taken out of a gather]

        ``state[name] = param.detach().cpu()`` inside ``GatheredParameters`` is how scripts collect weights; on a CPU it copies nothing,
        so the tensor shares the buffer's storage. When such a tensor, or one that autograd saved, is alive, the storage stays with
        it and the unit takes another buffer. While the model runs this is not done: what autograd saved is to be freed then.
        """
        return _uses(self.flat) > _uses_of_one() + len(self._views)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the buffer."""
        return tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr() != 0


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


@functools.cache
def _uses_of_one() -> int:
    """What a tensor counts that nobody else shares: asking is one more use in newer versions of torch (2.13, not 2.8)."""
    return _uses(torch.empty(1))


def _point(params: Iterable[nn.Parameter | None], values: Iterable[torch.Tensor]) -> None:
    with torch._C.DisableTorchFunction():  # nobody's business, and zero.Init would take it for a constructor's
        for param, value in zip(params, values, strict=False):
            if param is not None:
                param.data = value
