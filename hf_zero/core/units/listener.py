"""Where a layer above hears of the parameters of units, to show their state under names of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import UnitState


class ParamListener:
    """Is told what happens to parameters; this one does nothing about it.

    Attributes:
        attributes: Names of what it sets on parameters. They are removed from a parameter that leaves its unit, and left out where
            one is pickled.
    """

    attributes: tuple[str, ...] = ()

    def registered(self, param: nn.Parameter, shape: torch.Size, part: torch.Tensor, collectives: Collectives) -> None:
        """A parameter has a unit, or is known to have none; whole and staying so until one of the others says otherwise.

        Args:
            param: The parameter.
            shape: Its whole shape.
            part: This rank's part of it, 1D.
            collectives: Network of the data-parallel axis.
        """

    def state_changed(self, params: Iterable[nn.Parameter | None], state: UnitState) -> None:
        """The unit of ``params`` is in another state; None stands for a parameter that has moved to another unit."""

    def stays_unsharded(self, params: Iterable[nn.Parameter | None], stays: bool) -> None:
        """Whether ``params`` are whole for good or resharded between uses."""
