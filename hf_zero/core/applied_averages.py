"""The averages of weights that belong to one engine, and whether one of them is in the place of the weights now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from hf_zero.errors import StateError


class Averages(Protocol):
    """One kind of average that an engine's checkpoints hold."""

    @property
    def name(self) -> str:
        """Tells it from others of the engine."""

    def follow(self) -> None:
        """Parameters have come to other units."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """All that it keeps on this rank."""


class AppliedAverages:
    """What an engine knows of averages of its weights.

    Attributes:
        kept: All of them, by name.
        applied: Name of those that are in the place of the weights; "" where none are.
        loaded_from: Folder of the checkpoint that was loaded last with its optimizer state, for averages that are made after the load.
        loaded_steps: Optimizer steps that the checkpoint had counted.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Averages] = {}
        self.applied = ""
        self.loaded_from = ""
        self.loaded_steps = 0

    def follow(self) -> None:
        """Units were laid out anew: averages go with their parameters, before the next update changes these; collective."""
        for averages in self.kept.values():
            averages.follow()

    def require_weights(self, what: str) -> None:
        """Raises where the weights are averages now, and ``what`` needs those that are trained.

        Raises:
            StateError: They are.
        """
        if self.applied:
            raise StateError(
                f"{what} while the averages {self.applied!r} are in the place of the weights (AveragedWeights.apply). Leave the `with "
                "averages.applied():`, or call averages.restore() on all ranks, first; an error inside of the `with` leaves them there"
            )
