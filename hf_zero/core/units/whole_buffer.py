"""Manage the whole buffer of a unit: allocate it, point the parameters at it, free it, and count the tensors that still use its memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.activation_checkpointing.host_activations import mark_resident
from hf_zero.core.units.layout import ParamSlot, UnitLayout
from hf_zero.core.units.marks import bytes_as, own_shape
from hf_zero.core.units.shard import has_memory, require_memory
from hf_zero.core.units.sharded_parameter import point, point_all
from hf_zero.errors import StateError
from hf_zero.memory.host_memory import on_huge_pages


def ordinary_tensors() -> AbstractContextManager[None]:
    """Return a context whose new tensors autograd can use, also inside ``torch.inference_mode``; gradients are off in the latter."""
    return _ordinary() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _ordinary() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # leaving the mode switches gradients on
        yield


class HeldMemory:
    """A weak reference to the memory of a flat tensor, which autograd or a script may keep alive."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._like = flat[:0].new_empty(0)
        self._numel = flat.numel()
        self._storage = StorageWeakRef(flat.untyped_storage())

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor, (numel,); None if its memory was freed."""
        storage = None if self._storage.expired() else torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._numel * self._like.element_size():
            return None
        return torch.empty_like(self._like).set_(storage, 0, (self._numel,), (1,))


def other_uses(tensor: torch.Tensor) -> int:
    """Return how many other tensors share the memory of ``tensor``; its base and tensors saved by autograd count."""
    return _uses(tensor) - _count_of_sole_use()


def is_only_view(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor shares the memory of ``tensor``, except the one of which it is itself a view."""
    return other_uses(tensor) == (tensor._base is not None)


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


@functools.cache
def _count_of_sole_use() -> int:
    """Return the use count of a tensor that shares its memory with no other tensor; in newer versions of torch (2.13, not 2.8) the query
    itself counts as one more use.
    """
    return _uses(torch.empty(1))


class Shown(Enum):
    """Kind of tensors that the parameters of a unit point at now. Only ``WholeBuffer`` changes it."""

    VALUES = auto()  # views of the whole buffer
    PLACEHOLDERS = auto()  # their shapes, without memory
    NOTHING = auto()  # empty tensors


class WholeBuffer:
    """One flat buffer, (padded_numel,), and its view for each parameter; its memory is allocated and freed, the tensor objects stay.

    Attributes:
        flat: The buffer.
        nbytes: Bytes that it takes while allocated.
        shared: Error of a parameter that was pointed at the memory of another one; "" if there is none.
        converted: Types of assigned data that ``adopt`` has cast, each as "from A to B".

    Args:
        layout: Offsets of the parameters.
        flat: The buffer, allocated; the parameters become views of it.
        params: The parameters; None where one has moved to another unit. The unit's own list, which may change.
        alone: Positions of parameters that have values of their own while the other parameters have none; live.

    [Note: data for a divided parameter] The values of ``param.data = value``, assigned while the parameter has no values on this rank,
    would be lost at the next unshard. A rank cannot raise alone in the middle of collective operations. So it records the parameter
    whenever its memory has been replaced, drops the data, and raises at a safe point: when the parameters have been unsharded, or in the
    vote before a step or a save.
    """

    def __init__(
        self, layout: UnitLayout, flat: torch.Tensor, params: Sequence[nn.Parameter | None], alone: Container[int] = frozenset()
    ) -> None:
        self.flat = flat
        self.shared = ""
        self.converted: set[str] = set()
        mark_resident(flat)
        self.nbytes = flat.untyped_storage().nbytes()
        self._layout = layout
        self._params = params
        self._alone = alone
        self._given: list[int] = []  # positions of parameters whose data was assigned while they had no values
        self._placed: list[int] = []  # addresses of the placeholders
        dtypes = [slot.shown_as or flat.dtype for slot in layout.slots]
        unknown = {dtype: _unknown(dtype, flat.device) for dtype in set(dtypes)}
        empty = {dtype: torch.empty(0, dtype=dtype, device=flat.device) for dtype in set(dtypes)}
        self._unknown = [unknown[dtype] for dtype in dtypes]
        self._empty = [empty[dtype] for dtype in dtypes]
        self._views = self._make_views()
        self._left: list[torch.Tensor] = []
        self._older: list[HeldMemory] = []  # earlier buffers that a later backward may read
        self._versions: list[int] = []  # version counters of the parameters when their values, or placeholders, were shown
        self._shown = Shown.VALUES
        self.show()

    def _make_views(self) -> list[torch.Tensor]:
        return [view_of(self.flat, slot) for slot in self._layout.slots]

    def _point(self, values: Iterable[torch.Tensor], shown: Shown) -> None:
        self._note_assigned()
        point_all(self._params, values, empties=shown is Shown.NOTHING)
        self._shown = shown

    def allocate(self) -> None:
        """Allocate the buffer's memory; its contents are undefined."""
        self.flat.untyped_storage().resize_(self.nbytes)
        on_huge_pages(self.flat)

    def show(self) -> None:
        """Point each parameter at its view."""
        self._point(self._views, Shown.VALUES)
        self.note_versions()

    def note_versions(self) -> None:
        """Record the present version counters of the parameters, so that only later writes count as written; local."""
        self._versions = [0 if param is None else param._version for param in self._params]

    def _noted(self) -> Sequence[int | None]:
        """Return the version counter of each parameter when its values were shown; None where it is unknown."""
        known = self._shown is Shown.VALUES and len(self._versions) == len(self._params)
        return self._versions if known else [None] * len(self._params)

    def show_placeholders(self) -> None:
        """Point each parameter at a tensor of its shape, without memory of its own: every element is the same NaN (0 for integers).

        If ``free`` has kept values for autograd, point the parameters at these values.
        """
        if self._shown is not Shown.PLACEHOLDERS:
            values = [self._placeholder(index) for index in range(len(self._params))]
            self._point(values, Shown.PLACEHOLDERS)
            self._placed = [value.data_ptr() for value in values]
            self.note_versions()

    def _placeholder(self, index: int) -> torch.Tensor:
        return self._left[index] if self._left else self._unknown[index].expand(self._layout.slots[index].shape)

    def hide(self) -> None:
        """Point the parameters at empty tensors."""
        if self._shown is not Shown.NOTHING:
            self._point(self._empty, Shown.NOTHING)

    def follow_memory(self) -> None:
        """Empty the parameters if the buffer's memory was moved to the host, and show them again when it is back."""
        if not has_memory(self.flat):
            self.hide()
        elif self._shown is Shown.NOTHING:
            self.show()

    def require_shown(self, what: str) -> None:
        """Raise if the values of ``what`` were moved to the host.

        Raises:
            StateError: The buffer has no memory.
        """
        if self._shown is not Shown.VALUES:
            require_memory(self.flat, what)

    def _note_assigned(self) -> list[int]:
        """Record the parameters whose ``data`` was assigned while they had no values, and return their positions; local."""
        if self._shown is Shown.VALUES:
            return []
        placeholders = self._shown is Shown.PLACEHOLDERS
        with torch._C.DisableTorchFunction():  # ``ConstructorAccess`` would return the full shape
            given = [
                index
                for index, param in enumerate(self._params)
                if param is not None
                and param.numel()
                and index not in self._alone
                and not (placeholders and param.data_ptr() == self._placed[index] and param._version == self._versions[index])
            ]
        self._given += given
        return given

    def drop_assigned(self) -> list[str]:
        """Drop data that was assigned to parameters without values, and return their names: [Note: data for a divided parameter]; local."""
        for index in self._note_assigned():
            param, empties = self._params[index], self._shown is Shown.NOTHING
            value = self._empty[index] if empties else self._placeholder(index)
            if param is not None:
                point(param, value, empties)
                if not empties:
                    self._placed[index], self._versions[index] = value.data_ptr(), param._version
        given, self._given = self._given, []
        return [self._layout.slots[index].name for index in dict.fromkeys(given)]

    def written_values(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield position and values of each parameter that was written in place, or pointed at other memory, since it was shown.

        Raises:
            StateError: The other memory has another number of elements.
        """
        if self._shown is not Shown.VALUES:
            return
        for index, (param, view, version) in enumerate(zip(self._params, self._views, self._noted(), strict=True)):
            if param is None:
                continue
            if version not in (None, param._version) or (view.numel() and param.data_ptr() != view.data_ptr()):
                if own_shape(param).numel() != view.numel():
                    raise _other_shape(self._layout.slots[index].name, view, param)
                yield index, param.data

    def assigned(self) -> bool:
        """Return whether a parameter whose values are shown was pointed at other memory; local."""
        pairs = zip(self._params, self._views, strict=True) if self._shown is Shown.VALUES else ()
        return any(param is not None and view.numel() and param.data_ptr() != view.data_ptr() for param, view in pairs)

    def adopt(self, idle: bool = True, separate: Callable[[], None] | None = None) -> tuple[list[ParamSlot], list[ParamSlot]]:
        """Copy the values of parameters that were pointed at other memory (``param.data = value``), and point them at their views again.

        Args:
            idle: No backward may follow that reads the previous values: autograd has saved views of the buffer.
            separate: Called before the first copy, to copy values out of memory that this method overwrites.

        Returns:
            Slots of the parameters that had other memory, and of those written in place since their values were shown (writes to
            ``.data`` are not detected).

        Raises:
            StateError: The other memory has another shape, or it is not ``idle`` and the values differ.
        """
        assigned: list[ParamSlot] = []
        written: list[ParamSlot] = []
        start, width = self.flat.data_ptr(), self.flat.element_size()
        for param, view, slot, version in zip(self._params, self._views, self._layout.slots, self._noted(), strict=True):
            if param is None:
                continue
            address = start + slot.offset * width if slot.numel else 0  # equals view.data_ptr(), which is slower
            if param.data_ptr() != address or (param.shape != slot.shape and own_shape(param) != slot.shape):
                if own_shape(param) != view.shape:
                    raise _other_shape(slot.name, view, param)
                if separate is not None and not assigned:
                    separate()
                if not idle and not torch.equal(view, param.data):
                    raise _needed(slot.name)
                if param.dtype != view.dtype:
                    self.converted.add(f"from {view.dtype} to {param.dtype}")
                view.copy_(param.data)
                param.data = view
                assigned.append(slot)
            if version not in (None, param._version):
                written.append(slot)
        return assigned, written

    def require_adoptable(self) -> None:
        """Raise if ``adopt(idle=False)`` would raise because a backward needs the previous values; local.

        Raises:
            StateError: ``data`` with other values was assigned to a parameter.
        """
        for param, view, slot in zip(self._params, self._views, self._layout.slots, strict=True):
            elsewhere = param is not None and view.numel() and param.data_ptr() != view.data_ptr()
            if elsewhere and param is not None and own_shape(param) == view.shape and not torch.equal(view, param.data):
                raise _needed(slot.name)

    def free(self, leave: bool, for_autograd: bool = False, awaited: Callable[[], bool] = bool) -> None:
        """Empty the parameters and free the memory.

        Args:
            leave: Tensors that a script took from the buffer keep their values, see [Note: tensors taken out of a gather].
            for_autograd: Keep all values, for ``show_placeholders``, until ``free_kept_memory``.
            awaited: Returns whether a later backward may read the present values.
        """
        self.hide()
        if for_autograd:
            self._left = self._views
        # After ``param.numpy()`` the storage can never be resized.
        if for_autograd or (leave and self._is_held()) or not self.flat.untyped_storage().resizable():
            with ordinary_tensors():  # the buffer outlives an inference mode
                self._older = [one for one in self._older if one.tensor() is not None] + [HeldMemory(self.flat)] * awaited()
                self.flat = torch.empty_like(self.flat)
                mark_resident(self.flat)
                self._views = self._make_views()
        self.flat.untyped_storage().resize_(0)

    def show_older(self, index: int | None = None, value: torch.Tensor | None = None) -> None:
        """Copy values to earlier buffers whose memory is in use, if a backward could still follow when they were replaced; local.

        Autograd may have saved views of them, and plain PyTorch's backward reads the values that were written to a parameter since its
        forward.

        Args:
            index: Position of one parameter; None copies the complete buffer.
            value: Its value.
        """
        for older in self._older:
            values = older.tensor()
            if values is None:
                continue
            with torch.no_grad():
                if index is None or value is None:
                    values.copy_(self.flat)
                else:
                    view_of(values, self._layout.slots[index]).copy_(value.view(self._layout.slots[index].shape))

    def free_kept_memory(self) -> None:
        """Free the values that ``free`` has kept for autograd, and forget earlier buffers: an update is about to run."""
        self._left = []
        self._older = []

    def _is_held(self) -> bool:
        """Return whether a tensor other than the parameters' views shares the buffer's memory.

        [Note: tensors taken out of a gather] Scripts collect weights with ``state[name] = param.detach().cpu()`` inside
        ``GatheredParameters``; on a CPU this copies nothing, so the tensor shares the buffer's storage. While such a tensor, or one that
        autograd saved, is alive, it keeps the storage and the unit allocates another buffer. This is not done while the model runs: then
        the memory of tensors that autograd saved has to be freed.
        """
        return other_uses(self.flat) > len(self._views)

    def view(self, index: int) -> torch.Tensor:
        """Return the view of parameter ``index`` in the buffer."""
        return self._views[index]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a view of the buffer."""
        return tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr() != 0


def _other_shape(name: str, view: torch.Tensor, param: torch.Tensor) -> StateError:
    return StateError(
        f"parameter {name} has shape {tuple(view.shape)}, and was given data of shape {tuple(own_shape(param))}. A parameter "
        "of an engine keeps its shape: to change it, register a new parameter before initialize()"
    )


def _needed(name: str) -> StateError:
    return StateError(
        f"parameter {name} was given data between a forward and its backward, which needs the previous values. Assign data, or save or "
        "read the model with it, after the backward"
    )


def view_of(flat: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    """Return the view of the parameter of ``slot`` in ``flat``, a whole buffer."""
    part = flat[slot.range.start : slot.range.stop]
    return part.view(slot.shape) if slot.shown_as is None else bytes_as(part, slot.shown_as, slot.shape)


def _unknown(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
