"""Define an engine that stores its configuration, which most of DeepSpeed's read-only methods return."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_zero.core import engine as core

if TYPE_CHECKING:  # importing pydantic takes 0.1 s, and every accelerate program imports the engine's class for an isinstance check
    from hf_zero.config.resolve import ResolvedConfig
    from hf_zero.config.schema.root import ZeroConfig
    from hf_zero.sequence_parallel.state import SequenceParallel


class ConfiguredEngine(core.Engine):
    """A core engine that stores the configuration that it was made from.

    Attributes:
        resolved: The resolved configuration with the source of every value.
        settings: The validated configuration (``resolved.config``).
        sequence_parallel: Groups of ranks that share their samples; None if sequences are not divided.
        training_dataloader: Loader of ``training_data``; None if it was not given.
        optimizer_given: Whether the script gave its optimizer, or a function that made it, to ``initialize``.
        collate_fn: Collate function of loaders that the engine makes; None uses torch's.
    """

    def __init__(
        self, module: nn.Module, resolved: ResolvedConfig, parts: core.EngineParts, sequence_parallel: SequenceParallel | None = None
    ) -> None:
        super().__init__(module, parts)
        self.resolved = resolved
        self.settings: ZeroConfig = resolved.config
        self.sequence_parallel = sequence_parallel
        self.training_dataloader: Any = None
        self.optimizer_given = False
        self.collate_fn: Callable[[Any], Any] | None = None

    @property
    def preempted(self) -> bool:
        """Return whether any rank received the signal to end (`hf_zero.preemption_signal`); the same on all ranks after each ``step``.

        The first read begins to listen for the signal. A script that reads this after its steps must save and end by itself.
        """
        self.preemption.asked = True
        self.preemption.listen()
        return bool(self.preemption.signal)
