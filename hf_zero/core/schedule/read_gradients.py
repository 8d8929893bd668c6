"""Serve ``param.grad`` between a backward and the step: at stage 0 the reduced gradient itself, at other stages the gathered one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import nn

from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.units.alone import whole_from_owners
from hf_zero.core.units.marks import whole_shape
from hf_zero.core.units.parts import is_divided, part_of, shown_part, whole_of
from hf_zero.core.units.sharded_parameter import gradients_of, mark_waiting, set_gradient, unmark_waiting
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.core.units.whole_buffer import other_uses
from hf_zero.errors import StateError
from hf_zero.observe import warn_once

_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # torch 2.10: a gradient may have another dtype than its parameter
_OURS = 2  # references to a tensor that the script holds no more: from its record, and from the question


@dataclass
class _Served:
    """A whole gradient that a script has read: its place, and the tensor of the parameter's shape."""

    entry: UnitGradients
    index: int
    tensor: torch.Tensor


class ReadGradients:
    """Reads of ``param.grad`` from the end of a backward to the step or the next forward, at stages 1 to 3; at stage 0 in accumulations.

    [Note: read gradients] While gradients wait, each trained parameter has a class whose ``grad`` is a property, so a usual step pays only
    for the change of classes. If the configuration says so, a read gathers the gradient from its owners, after a vote of all ranks, which
    finds ranks that do not read; then the gradients of divided parameters are joined at every stage (tensor parallelism, experts). The
    script may change the tensor: each rank copies its own part back before the step, or any other reader, looks. A whole gradient that the
    script does not hold any more is freed at the next read, so a loop over all parameters needs the memory of one. Otherwise a read returns
    None, and a warning names the way that works.

    [Note: gradients after a step] In plain PyTorch gradients stay until ``zero_grad``, and scripts read them after the step (AdaLoRA does).
    Where a loop is known to call ``zero_grad`` soon, the reduced gradients of the step stay until then, or until the next forward that may
    train: as the step has used them, clipped and without loss scale. A native pass scales them on the way, so the factor is kept too.

    Args:
        gradients: Gradients of all trainable units; a list that may change.

    Attributes:
        wait_for_ranks: Votes on what the rank is about to do; set if reads are served.
        exposed: Whether the script has parts of the waiting gradients in their own memory, which it can write through ``data`` uncounted.
        prepare: Called once before waiting gradients are read or replaced; may change them.
    """

    def __init__(self, gradients: Sequence[UnitGradients]) -> None:
        self.wait_for_ranks: WeakMethod[Callable[[str], None]] | None = None
        self.prepare: WeakMethod[Callable[[], None]] | None = None
        self.exposed = False
        self._gradients = gradients
        self._open = self._complete = False
        self._served: dict[tuple[int, int], _Served] = {}  # by id of the unit and position
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # gradients of the last step, by id of the unit, and factors
        self._wide: list[nn.Parameter] = []  # parameters with an assigned gradient of another dtype
        self._warned = set[bool]()  # whether the gradients were complete when a warning was given

    @property
    def complete(self) -> bool:
        """Return whether the waiting gradients complete an optimizer step; local."""
        return self._complete

    def open(self, complete: bool) -> None:
        """Serve reads from now on: a backward has ended. ``complete``: its gradients complete an optimizer step. Local."""
        self._complete = complete
        if not self._open:
            self._open = True
            for entry in self._gradients:
                if entry.exchange.policy.sharded or not complete or self.wait_for_ranks is not None:
                    mark_waiting(entry.unit.params)

    def mark(self, unit: Unit) -> None:
        """Serve reads of the parameters of ``unit``, which has just been unsharded; local."""
        if self._open and unit.trainable:
            mark_waiting(unit.params)

    def mark_all(self) -> None:
        """Detect reads of all ``param.grad``, also of gradients that torch has; local."""
        for entry in self._gradients if self._open else ():
            mark_waiting(entry.unit.params)

    def begin(self) -> None:
        """Prepare for a read of waiting gradients, or for a write to them; local."""
        prepare, self.prepare = self.prepare() if self.prepare is not None else None, None
        if prepare is not None:
            prepare()

    def close(self) -> None:
        """Copy changes back and serve no more reads; local."""
        if self._open:
            self.fold()
            self._forget_all()

    def drop(self) -> None:
        """Serve no more reads, because the gradients are discarded; local."""
        if self._open:
            self._forget_all()

    def _forget_all(self) -> None:
        self._open = self._complete = self.exposed = False
        self.prepare = None
        self._served.clear()
        self._kept.clear()
        for entry in self._gradients:
            unmark_waiting(entry.unit.params)
        self._wide = [param for param in self._wide if not _narrow(param)]

    # -- after a step ----------------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Return whether gradients of the last step are kept."""
        return bool(self._kept)

    def keep(self, gradients: Iterable[tuple[Unit, torch.Tensor, torch.Tensor | None]]) -> None:
        """Serve reads of the gradients of a step that has ended; local.

        Args:
            gradients: For each unit its gradient, (shard_numel,), and the 0-dim factor by which it is still to be multiplied, or None.
        """
        self._kept = {id(unit): (shard, factor) for unit, shard, factor in gradients}
        self._open = self._complete = True
        scales = any(factor is not None for _, factor in self._kept.values())
        self.prepare = WeakMethod(self._scale_kept) if scales else None
        for entry in self._gradients:
            if scales or entry.exchange.policy.sharded:
                mark_waiting(entry.unit.params)

    @torch.no_grad()
    def _scale_kept(self) -> None:
        for key, (shard, factor) in self._kept.items():
            if factor is not None:
                near = factor.to(shard.device)
                # In place, because ``param.grad`` may show it; a product with the inverse of a loss scale may need a wider type.
                wide = torch.promote_types(shard.dtype, torch.float32)
                self._kept[key] = (shard.mul_(near) if wide == shard.dtype else shard.to(wide).mul_(near)), None

    def of_last_step(self, unit: Unit, index: int) -> torch.Tensor | None:
        """Return the whole gradient of the last step, a new tensor without loss scale; None if it is not kept. Collective."""
        self.begin()
        kept = self._kept.get(id(unit))
        if kept is None:
            return None
        return _whole(unit, index, kept[0])

    # -- what a script does ----------------------------------------------------------------------------------------------

    def read(self, unit: Unit, index: int, found: torch.Tensor | None) -> torch.Tensor | None:
        """Return the whole gradient of a parameter, of its full shape, with the loss scale; None if there is none, or it is not served.

        Collective if it is served: every rank reads the same parameter.

        Args:
            unit: Unit of the parameter.
            index: Position of the parameter in it.
            found: The gradient that torch has; returned if there is one.

        Raises:
            StateError: On every rank, if another rank does not read it.
        """
        entry = self._entry(unit)
        if entry is None:
            return found
        if found is not None or (self._complete and not self._gathers(entry, index)):
            self.begin()
            return found
        name, wait_for_ranks = unit.layout.slots[index].name, self.wait_for_ranks() if self.wait_for_ranks is not None else None
        if not self._complete or wait_for_ranks is None or not entry.exchange.reduces:
            if self._complete not in self._warned and (entry.shard is not None or entry.has_local or self._kept):
                self._warned.add(self._complete)
                warn_once(_unserved(name, self._complete))
            return None
        wait_for_ranks(f"read {name}.grad")
        self.begin()
        self.fold()
        held = entry.held()
        if held is None:
            return self.of_last_step(unit, index)
        # Gathered at every read: whether a rank still has the last result is its own affair, and no reason to communicate or not.
        served = self._served.pop((id(unit), index), None)
        self._free_unheld()
        whole = _whole(unit, index, held)
        if served is None:
            served = _Served(entry, index, whole)
        else:  # the script may hold it
            with torch.no_grad():
                served.tensor.copy_(whole)
        self._served[id(unit), index] = served
        return served.tensor

    def write(self, unit: Unit, index: int, value: torch.Tensor | None) -> bool:
        """Set the gradient of a parameter in the place of ``param.grad``, if gradients of a step wait and a script sets it; local.

        Args:
            unit: Unit of the parameter.
            index: Position of the parameter in it.
            value: Of the parameter's full shape, the same on all ranks; None drops the gradient.

        Returns:
            Whether it was set here; otherwise the assignment is torch's.
        """
        entry = self._entry(unit)
        if entry is None or self._kept or not self._complete or not entry.exchange.reduces:
            return False
        self.begin()
        slot = unit.layout.slots[index]
        if not self._gathers(entry, index):
            return False
        if value is None:
            self.forget(unit, index)
            unit.shard_part(index, entry.writable(index)).zero_()
            entry.collected.used[index] = False
            return False  # a gradient that the script has assigned before goes too
        if self.wait_for_ranks is None or not (unit.reshards or self.joins(unit.params[index])):
            self.forget(unit, index)  # whole parameters: torch has it, and the step averages it over ranks
            param = unit.params[index]
            if _HAS_GRAD_DTYPE and param is not None and value.dtype != param.dtype:  # a read gives the dtype of the sum over ranks
                param.grad_dtype = None
                self._wide.append(param)
            return False
        shape = _shape(unit, index)
        if value.shape != shape:
            raise StateError(f"{slot.name}.grad was given a gradient of shape {tuple(value.shape)}, not {tuple(shape)}")
        self._served[id(unit), index] = _Served(entry, index, value)
        return True

    def joins(self, param: torch.Tensor | None) -> bool:
        """Return whether reads are served, and ``param`` is divided: ``grad`` is that of the whole parameter at every stage. Local."""
        return self.wait_for_ranks is not None and param is not None and is_divided(param)

    def _gathers(self, entry: UnitGradients, index: int) -> bool:
        return entry.exchange.policy.sharded or self.joins(entry.unit.params[index])

    # -- what has become of it -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fold(self) -> None:
        """Copy this rank's parts of the gradients that a script has read, and may have changed, to where the step reads them; local."""
        for served in self._served.values():
            self._fold(served)

    def _fold(self, served: _Served) -> None:
        entry, unit = served.entry, served.entry.unit
        slot = unit.layout.slots[served.index]
        own = slot.range.intersect(unit.owned).shift(-slot.offset)
        if own.numel and entry.shard is not None:
            param = unit.params[served.index]
            values = part_of(param, served.tensor) if param is not None else served.tensor
            new, present = values.reshape(-1)[own.start : own.stop], unit.shard_part(served.index, entry.reduced())
            if not torch.equal(new.to(present), present):
                unit.shard_part(served.index, entry.writable(served.index)).copy_(new)

    def forget(self, unit: Unit, index: int) -> None:
        """Discard the gradient that a script has read from one parameter, because it is replaced; local."""
        self._served.pop((id(unit), index), None)

    def forget_read(self) -> None:
        """Copy changes back and read all gradients anew at their next read, because the waiting ones are about to change; local."""
        self.fold()
        self._served.clear()

    def _free_unheld(self) -> None:
        for key, served in list(self._served.items()):
            if sys.getrefcount(served.tensor) <= _OURS and other_uses(served.tensor) <= (served.tensor._base is not None):
                del self._served[key]

    def _entry(self, unit: Unit) -> UnitGradients | None:
        return next((entry for entry in self._gradients if entry.unit is unit), None) if self._open else None


def _narrow(param: nn.Parameter) -> bool:
    """Let autograd cast gradients of ``param`` to its dtype again, unless it has a gradient; return whether it does. Local."""
    if _of(param) is not None:
        return False
    param.grad_dtype = param.dtype
    return True


def _whole(unit: Unit, index: int, flat: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the whole parameter ``index``, a new tensor; ``flat``, (shard_numel,), has this rank's part. Collective."""
    own, param = whole_from_owners(unit, index, flat, f"{unit.name}: gradient").view(unit.layout.slots[index].shape), unit.params[index]
    return own if param is None else whole_of(param, own)


def _shape(unit: Unit, index: int) -> torch.Size:
    """Return the shape of the gradient of the whole parameter ``index``; local."""
    param = unit.params[index]
    return (whole_shape(param) if param is not None else None) or unit.layout.slots[index].shape


def _unserved(name: str, complete: bool) -> str:
    if not complete:
        return (
            f"{name}.grad is None in the middle of a gradient accumulation: the gradients so far are in the engine's buffers, so code "
            "under `if param.grad is not None` does nothing. Read it after the backward that completes the optimizer step"
        )
    return (
        f"{name}.grad is None: gradients are sharded over the ranks (ZeRO stages 1 to 3), so code under `if param.grad is not None` does "
        'nothing. Set "hf_zero": {"show_gradients": true} in the configuration to read and change it as without ZeRO, on every rank '
        "alike; or use hf_zero.utils.safe_get_full_grad and safe_set_full_grad on all ranks"
    )


def _of(param: torch.Tensor) -> torch.Tensor | None:
    return gradients_of([param])[0]


def _moved(held: Sequence[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return for each of ``held`` whether a script has given the view, which showed the place, other memory."""
    return [view.untyped_storage()._cdata != place.untyped_storage()._cdata for _, view, place in held]


class ShownGradients:
    """``param.grad`` as a view of the unit's reduced gradient, where every rank has all of it (stage 0).

    [Note: shown gradients] The shown gradients are the ones that the step uses: the mean over ranks, multiplied by the loss scale. If a
    script writes to them in place, this rank's step uses the result, and a gradient set to None counts as none. One that got other
    memory (``param.grad.data = value``, as Grokfast writes) is copied back. Autograd must never add to them, so they are hidden before the
    next backward, which the forward before it announces in time. They are not shown if they are on another device than the parameter, nor
    if a step has begun on a copy.

    Attributes:
        reads: Reads of gradients that are sharded.
        replaced: Whether a script has set a gradient of the coming step (``safe_set_full_grad``) since the last call of ``step``.

    Args:
        gradients: Gradients of all trainable units.
    """

    def __init__(self, gradients: Sequence[UnitGradients]) -> None:
        self.replaced = False
        self.reads = ReadGradients(gradients)
        self._gradients = gradients
        self._views: dict[int, tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = {}  # by id of the parameter: what it shows, and the place

    def begin(self) -> None:
        """Show the reduced gradients; local."""
        self.reads.open(complete=True)
        for entry in self._gradients:
            total = entry.shard
            if total is not None and not entry.exchange.policy.sharded and entry.total.place.listener is None:
                self._show(entry, total)

    def _show(self, entry: UnitGradients, total: torch.Tensor) -> None:
        waits = self.reads.wait_for_ranks is not None
        for index, (param, grad) in enumerate(zip(entry.unit.params, gradients_of(entry.unit.params), strict=True)):
            if param is None or grad is not None or param.device != total.device or (waits and is_divided(param)):
                continue  # a gradient that a script has assigned stays
            if param.dtype != total.dtype:
                if not _HAS_GRAD_DTYPE:
                    continue
                param.grad_dtype = None
            place = entry.collected.place(total, index)
            view = shown_part(param, place.detach())
            set_gradient(param, view)
            self._views[id(param)] = param, view, place

    def end(self) -> None:
        """Stop showing gradients in ``param.grad``; keep gradients that the script assigned. Local."""
        self.reads.close()
        if not self._views:
            return
        held = list(self._views.values())
        grads = gradients_of(param for param, _, _ in held)
        for (param, view, _), grad, moved in zip(held, grads, _moved(held), strict=True):
            if grad is view and not moved:
                set_gradient(param, None)
                grad = None
            if _HAS_GRAD_DTYPE and grad is None and param.grad_dtype is None:
                param.grad_dtype = param.dtype  # autograd casts its gradients again
        self._views.clear()

    def has(self, param: torch.Tensor) -> bool:
        """Return whether ``param.grad`` is a shown gradient."""
        return id(param) in self._views and self._views[id(param)][1] is _of(param)

    def require_hidden(self, param: torch.Tensor, name: str) -> None:
        """Raise if autograd has added to the shown gradient of ``param``; ``name`` is the parameter's name.

        Raises:
            StateError: Autograd has added to it.
        """
        if self.has(param):
            raise StateError(
                f"{name}: a second backward before step() reached this parameter before the engine knew of the backward, because "
                "a part of the model was called directly. Call engine.backward(loss), or compute the loss from the forward of "
                "the whole model"
            )

    def drop_removed(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Discard the reduced gradients of parameters whose shown gradient a script has set to None, and copy back those that got other
        memory; ``params`` limits the check. Local.
        """
        self.reads.fold()
        if not self._views:
            return
        shown = list(self._views.values()) if params is None else [self._views[id(param)] for param in params if id(param) in self._views]
        grads = gradients_of(param for param, _, _ in shown)
        for (param, view, place), grad, moved in zip(shown, grads, _moved(shown), strict=True):
            if grad is None:
                place.zero_()
                self._forget(param)
            elif moved and grad is view:
                place.copy_(view.detach().reshape(place.shape))
                view.data = place

    def _forget(self, param: torch.Tensor) -> None:
        """Note that ``param`` has no gradient any more, so that the step skips it if no rank has one; local."""
        unit, index = find_unit(param) or (None, 0)
        for entry in self._gradients:
            if entry.unit is unit:
                entry.collected.used[index] = False

    def begin_read(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Bring the waiting gradients up to date for a reader or a writer; ``params`` as for ``drop_removed``. Local."""
        self.reads.begin()
        self.drop_removed(params)

    def is_written(self, param: torch.Tensor) -> bool:
        """Return whether a script has assigned a gradient to ``param``, which the coming step uses instead of the reduced one; local."""
        return _of(param) is not None and not self.has(param)

    def written_of(self, params: Sequence[nn.Parameter | None]) -> list[int]:
        """Return the positions in ``params`` for which ``is_written`` is True; local."""
        found = []
        for index, (param, grad) in enumerate(zip(params, gradients_of(params), strict=True)):
            if grad is not None:
                shown = self._views.get(id(param))
                if shown is None or shown[1] is not grad:
                    found.append(index)
        return found

    def replace_written(self, param: torch.Tensor) -> None:
        """Note that a script has set the gradient of the coming step, and discard a gradient that it assigned to ``param.grad``; local."""
        self.replaced = True
        if self.reads.keeps:
            self.end()
        if (owner := find_unit(param)) is not None:
            self.reads.forget(*owner)
        set_gradient(param, self._views[id(param)][1] if id(param) in self._views else None)
