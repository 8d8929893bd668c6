"""Notify a package above of changes to the parameters of units, so that it can show their state under names of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import UnitState


class ParamListener:
    """Listener that is notified of changes to parameters; this base class ignores them.

    Attributes:
        attributes: Names of the attributes that it sets on parameters. They are removed from a parameter that leaves its unit, and left
            out when one is pickled.
    """

    attributes: tuple[str, ...] = ()

    def registered(self, param: nn.Parameter, shape: torch.Size, part: torch.Tensor, collectives: Collectives) -> None:
        """Note that a parameter has a unit, or belongs to none; it is unsharded until another method says otherwise.

        Args:
            param: The parameter.
            shape: Its full shape.
            part: This rank's part of it, 1D.
            collectives: Network of the data-parallel axis.
        """

    def state_changed(self, params: Iterable[nn.Parameter | None], state: UnitState) -> None:
        """Note that the unit of ``params`` is in another state; None means that they have moved to another unit."""

    def stays_unsharded(self, params: Iterable[nn.Parameter | None], stays: bool) -> None:
        """Note whether ``params`` are always unsharded, or resharded between uses."""
