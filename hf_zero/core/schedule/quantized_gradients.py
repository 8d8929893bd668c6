"""Gradients that travel as codes of 4 bits, and what the codes lose, kept for the next ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.quantized import reduce_scatter_codes
from hf_zero.core.schedule.gradients import GradientExchange, GradientPolicy
from hf_zero.native.block_codes import KeptError, message_bytes, scales_of
from hf_zero.native.quantize import can_quantize


@dataclass(frozen=True)
class ErrorFeedback:
    """How what codes lose is kept (Xie et al., "LoCo", arXiv:2407.04480).

    Attributes:
        keep: Weight of the old error when a new one is mixed in, from 0 to 1.
        reset_steps: Errors start from zero again after so many optimizer steps.
    """

    keep: float
    reset_steps: int


GRADIENT_ERROR = "loco_error"
_STEPS = "(steps)"  # no unit is called so


class QuantizedExchange(GradientExchange):
    """Reduces codes of 4 bits to the owner of each shard.

    [Note: errors of gradients] An error is what a rank's own codes of one unit have lost, in the scale of the loss at that time. When the
    loss scale changes, so do the errors. A step that is skipped drops them all, because the gradients that they belong to are dropped.

    Args:
        collectives: Network of the reductions.
        policy: Element types and factors.
        feedback: How errors are kept; None keeps none.
    """

    def __init__(self, collectives: Collectives, policy: GradientPolicy, feedback: ErrorFeedback | None = None) -> None:
        super().__init__(collectives, policy)
        self.feedback = feedback
        self._errors: dict[str, tuple[KeptError, int]] = {}  # by unit, with the elements of a part
        self._loaded: dict[str, torch.Tensor] = {}  # errors of a checkpoint, until they are needed
        self._steps = 0

    def start(self, message: torch.Tensor, unit: str) -> Pending:
        if self.collectives.world == 1 or not can_quantize(message.dtype):
            return super().start(message, unit)
        return reduce_scatter_codes(self.collectives, message, self.policy.accumulation_dtype, unit, self._error(message, unit))

    def _error(self, message: torch.Tensor, unit: str) -> KeptError | None:
        if self.feedback is None:
            return None
        if unit not in self._errors:
            world, numel = self.collectives.world, message.numel() // self.collectives.world
            codes = torch.zeros(world, message_bytes(numel, 8), dtype=torch.uint8, device=message.device)
            saved = self._loaded.pop(unit, None)
            if saved is not None and saved.numel() == codes.numel():
                codes.view(-1).copy_(saved)
            self._errors[unit] = KeptError(codes, self.feedback.keep), numel
        return self._errors[unit][0]

    def stepped(self, skipped: bool, growth: float) -> None:
        if self.feedback is None:
            return
        self._steps += 1
        if skipped or self._steps % self.feedback.reset_steps == 0:
            self._errors.clear()
            self._loaded.clear()
        elif growth != 1.0:
            for error, numel in self._errors.values():
                scales_of(error.messages, numel).mul_(growth)

    # -- checkpoints ------------------------------------------------------------------------------------------------------

    def rank_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's errors as their codes, (world * message_bytes,) uint8 per unit, and the optimizer steps so far."""
        if self.feedback is None:
            return {}
        errors = self._loaded | {unit: error.messages.view(-1) for unit, (error, _) in self._errors.items()}
        return {GRADIENT_ERROR: {**errors, _STEPS: torch.tensor([self._steps])}}

    def load_rank_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restores what ``rank_states`` returned, for this rank at this number of ranks; errors that are not there start from zero."""
        saved = dict(states.get(GRADIENT_ERROR, {}))
        steps = saved.pop(_STEPS, None)
        self._steps = int(steps) if steps is not None else 0
        self._errors.clear()
        self._loaded = saved
