"""Define the listener that a package above implements to be notified of changes to the parameters of units."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import UnitState


class ParamListener:
    """Listener that is notified of changes to parameters; this base class ignores them.

    Attributes:
        attributes: Names of the attributes that the listener sets on parameters. They are removed from a parameter that leaves its unit,
            and left out when a parameter is pickled.
    """

    attributes: tuple[str, ...] = ()

    def registered(self, param: nn.Parameter, shape: torch.Size, part: torch.Tensor, collectives: Collectives) -> None:
        """Note that a parameter was registered: it is in a unit, or in an engine's model and in no unit. It is unsharded until
        ``state_changed`` reports another state.

        Args:
            param: The parameter.
            shape: Its full shape.
            part: This rank's part of it, 1D.
            collectives: Network of the data-parallel axis.
        """

    def state_changed(self, params: Iterable[nn.Parameter | None], state: UnitState) -> None:
        """Note that the unit of ``params`` entered ``state``; None in ``params`` is a parameter that has moved to another unit."""

    def stays_unsharded(self, params: Iterable[nn.Parameter | None], stays: bool) -> None:
        """Note whether ``params`` are always unsharded, or resharded between uses."""
