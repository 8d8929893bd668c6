"""An engine with the configuration it was made from, which most of DeepSpeed's questions are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_zero.core import engine as core

if TYPE_CHECKING:  # pydantic costs 0.1 s, and every accelerate program imports the engine's class for an isinstance
    from hf_zero.config.resolve import ResolvedConfig
    from hf_zero.config.schema.root import ZeroConfig
    from hf_zero.sequence_parallel.state import SequenceParallel


class ConfiguredEngine(core.Engine):
    """A core engine that knows its configuration.

    Attributes:
        resolved: The configuration with the source of every value.
        settings: The configuration.
        sequence_parallel: Groups of ranks that share their samples; None where sequences are whole.
        training_dataloader: Loader of ``training_data``, if that was given.
        collate_fn: For loaders that the engine makes; None is torch's.
    """

    def __init__(
        self, module: nn.Module, resolved: ResolvedConfig, parts: core.EngineParts, sequence_parallel: SequenceParallel | None = None
    ) -> None:
        super().__init__(module, parts)
        self.resolved = resolved
        self.settings: ZeroConfig = resolved.config
        self.sequence_parallel = sequence_parallel
        self.training_dataloader: Any = None
        self.collate_fn: Callable[[Any], Any] | None = None

    @property
    def preempted(self) -> bool:
        """Return whether a signal has asked some rank to end (`hf_zero.preemption_signal`): the same on all ranks after each ``step``.

        Asking begins to listen: a script that asks after its steps saves and ends by itself.
        """
        self.preemption.asked = True
        self.preemption.listen()
        return bool(self.preemption.signal)
