"""Average the gradients of parameters that the engine does not train, as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.step.trained_set import TrainedSet
from hf_zero.core.units.marks import is_elsewhere, tp_shard_of
from hf_zero.core.units.sharded_parameter import gradients_of, point, set_gradient
from hf_zero.core.units.unit import find_unit


class UntrainedGradients:
    """Gradients of the parameters that require one and are in no param group of the engine's optimizer.

    [Note: untrained parameters] A script may leave them out by mistake, clip by the norm of all gradients, or train them with an optimizer
    of its own. Under DistributedDataParallel each of these finds the mean over ranks in ``param.grad``. So the backward that completes an
    optimizer step leaves the mean there, too, with the loss scale. A gradient that the script has not cleared since the last step has been
    averaged before, and the sum of it and a mean is the mean of the sums. Expert parameters are left out: ranks have different ones.

    Args:
        trained: The parameters that the script trains.
        reducer: Knows the network and the scale of a mean.
    """

    def __init__(self, trained: TrainedSet, reducer: Reducer) -> None:
        self._trained, self._reducer = trained, reducer
        self._network = reducer.exchange.collectives.data

    def among(self, ids: Collection[int]) -> list[nn.Parameter]:
        """Return the parameters whose id is in ``ids``, with a gradient or without, the same on every rank; local."""
        return [param for _, param in self._trained.untrained() if id(param) in ids]

    def of(self, ids: Collection[int]) -> list[tuple[str, nn.Parameter, torch.Tensor]]:
        """Return name, parameter and gradient of parameters that have a gradient on this rank and whose id is in ``ids``; local."""
        named = [(name, param) for name, param in self._trained.untrained() if id(param) in ids]
        grads = gradients_of([param for _, param in named])
        return [(name, param, grad) for (name, param), grad in zip(named, grads, strict=True) if grad is not None]

    def waits(self) -> bool:
        """Return whether this rank has an untrained parameter's gradient to average; local."""
        if self._network.world == 1 or not self._trained.may_leave_out:
            return False
        self._trained.look()
        return any(grad is not None for grad in gradients_of([param for _, param in self._averaged()]))

    def average(self) -> None:
        """Replace each gradient that any rank has by its mean over ranks; collective.

        A parameter that another rank trains stays as it is: the coming step raises the error.
        """
        own = [name for name, param in self._averaged() if gradients_of([param])[0] is not None]
        gathered: list[list[str]] = self._network.gather_objects(own, "gradients of untrained parameters")
        names = list(dict.fromkeys(name for by_rank in gathered for name in by_rank))
        here = self._trained.in_no_group()
        differs = self._network.any_of([name not in here for name in names], "untrained parameters")
        for name in (name for name, differing in zip(names, differs, strict=True) if not differing):
            param, owner = here[name], find_unit(here[name])
            grad = gradients_of([param])[0]
            shape = owner[0].layout.slots[owner[1]].shape if owner is not None else param.shape
            mean = self._reducer.mean_of(name, grad, torch.Size(shape))
            if grad is None or grad.is_sparse:
                _show(param, mean.to(param.dtype))
            else:
                grad.copy_(mean)

    def _averaged(self) -> list[tuple[str, nn.Parameter]]:
        found = []
        for name, param in self._trained.untrained():
            part = tp_shard_of(param)
            if not (is_elsewhere(param) or (part is not None and part.expert)):
                found.append((name, param))
        return found


def _show(param: nn.Parameter, grad: torch.Tensor) -> None:
    """Set a gradient in the full shape, which torch refuses while the parameter has no values."""
    with torch._C.DisableTorchFunctionSubclass():
        values = param.data
        empty = values.shape != grad.shape
    if empty:
        point(param, grad, empties=False)
    set_gradient(param, grad)
    if empty:
        point(param, values, empties=True)
