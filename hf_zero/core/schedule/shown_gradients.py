"""Show reduced gradients in ``param.grad`` between the backward that completes an optimizer step and the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.read_gradients import ReadGradients
from hf_zero.core.units.sharded_parameter import gradients_of, set_gradient
from hf_zero.core.units.unit import find_unit
from hf_zero.errors import StateError

_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # torch 2.10: a gradient may have another dtype than its parameter


def _of(param: torch.Tensor) -> torch.Tensor | None:
    return gradients_of([param])[0]


class ShownGradients:
    """``param.grad`` as a view of the unit's reduced gradient, where every rank has all of it (stage 0).

    [Note: shown gradients] The shown gradients are the ones that the step uses: the mean over ranks, multiplied by the loss scale. If a
    script writes to them in place, this rank's step uses the result, and a gradient set to None is treated as zero. Autograd must never add
    to them, so they are hidden before the next backward, which the forward before it announces in time. They are not shown if they are on
    another device than the parameter, nor if a step has begun on a copy.

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
        self._views: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}  # by id of the parameter

    def begin(self) -> None:
        """Show the reduced gradients; local."""
        self.reads.open(complete=True)
        for entry in self._gradients:
            total = entry.shard
            if total is not None and not entry.exchange.policy.sharded and entry.total.place.listener is None:
                self._show(entry, total)

    def _show(self, entry: UnitGradients, total: torch.Tensor) -> None:
        for index, param in enumerate(entry.unit.params):
            if param is None or _of(param) is not None or param.device != total.device:  # a gradient that a script has assigned stays
                continue
            if param.dtype != total.dtype:
                if not _HAS_GRAD_DTYPE:
                    continue
                param.grad_dtype = None
            view = entry.collected.place(total, index)
            set_gradient(param, view)
            self._views[id(param)] = param, view

    def end(self) -> None:
        """Stop showing gradients in ``param.grad``; keep gradients that the script assigned. Local."""
        self.reads.close()
        for param, view in self._views.values():
            if _of(param) is view:
                set_gradient(param, None)
            if _HAS_GRAD_DTYPE and _of(param) is None and param.grad_dtype is None:
                param.grad_dtype = param.dtype  # autograd casts to this dtype again
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
        """Zero the reduced gradients of parameters whose shown gradient a script has set to None; ``params`` limits the check. Local."""
        self.reads.fold()
        shown = self._views.values() if params is None else [self._views[id(param)] for param in params if id(param) in self._views]
        for param, view in shown:
            if _of(param) is None:
                view.zero_()

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
