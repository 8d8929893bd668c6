"""Gradients that travel as codes of 4 bits, and what the codes lose, kept for the next ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.nodes import TwoHops
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
# No unit is called so.
_STEPS = "(steps)"
_PARTS = "(parts)"
_SECOND_HOP = " (second hop)"


class QuantizedExchange(GradientExchange):
    """Reduces codes of 4 bits to the owner of each shard, in one hop, or inside nodes and then, coded anew, over them.

    [Note: errors of gradients] An error is what a rank's own codes of one unit have lost, in the scale of the loss at that time; the codes
    of the second hop have errors of their own. When the loss scale changes, so do the errors. A step that is skipped drops them all,
    because the gradients that they belong to are dropped.

    Args:
        collectives: Network of the reductions.
        policy: Element types and factors.
        feedback: How errors are kept; None keeps none.
        hops: Networks of the two hops over the ranks of ``collectives``; None is one hop.
    """

    def __init__(
        self, collectives: Collectives, policy: GradientPolicy, feedback: ErrorFeedback | None = None, hops: TwoHops | None = None
    ) -> None:
        super().__init__(collectives, policy)
        self.feedback = feedback
        self.hops = hops
        self._errors: dict[str, tuple[KeptError, int]] = {}  # by unit and hop, with the elements of a part
        self._loaded: dict[str, torch.Tensor] = {}  # errors of a checkpoint, until they are needed
        self._steps = 0

    def start(self, message: torch.Tensor, unit: str) -> Pending:
        if self.collectives.world == 1 or not can_quantize(message.dtype):
            return super().start(message, unit)
        error = self._error(message, unit, self.collectives.world)
        if self.hops is None:
            return reduce_scatter_codes(self.collectives, message, self.policy.accumulation_dtype, unit, error)
        return reduce_scatter_codes(self.hops.inside, message, torch.float32, unit, error, each=self.hops.across.world)

    def crosses(self, dtype: torch.dtype) -> bool:
        return self.hops is not None and can_quantize(dtype)

    def cross(self, partial: torch.Tensor, travelled: torch.dtype, unit: str) -> Pending:
        if self.hops is None:
            return super().cross(partial, travelled, unit)
        error = self._error(partial, unit + _SECOND_HOP, self.hops.across.world)
        return reduce_scatter_codes(self.hops.across, partial, self.policy.accumulation_dtype, unit, error)

    def _error(self, message: torch.Tensor, name: str, parts: int) -> KeptError | None:
        """What the codes of one hop have lost of a unit, for a message in so many parts."""
        if self.feedback is None:
            return None
        if name not in self._errors:
            numel = message.numel() // parts
            codes = torch.zeros(parts, message_bytes(numel, 8), dtype=torch.uint8, device=message.device)
            saved = self._loaded.pop(name, None)
            if saved is not None and saved.numel() == codes.numel():
                codes.view(-1).copy_(saved)
            self._errors[name] = KeptError(codes, self.feedback.keep), numel
        return self._errors[name][0]

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
        """This rank's errors as their codes, (parts * message_bytes,) uint8 per unit and hop, the parts, and the optimizer steps so far."""
        if self.feedback is None:
            return {}
        errors = self._loaded | {name: error.messages.view(-1) for name, (error, _) in self._errors.items()}
        return {GRADIENT_ERROR: {**errors, _STEPS: torch.tensor([self._steps]), _PARTS: self._parts()}}

    def _parts(self) -> torch.Tensor:
        """Into how many parts the messages of each hop are divided."""
        return torch.tensor([self.collectives.world, self.hops.across.world if self.hops is not None else 1])

    def load_rank_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restores what ``rank_states`` returned for this rank; errors of other parts, or that are not there, start from zero."""
        saved = dict(states.get(GRADIENT_ERROR, {}))
        steps, parts = saved.pop(_STEPS, None), saved.pop(_PARTS, None)
        self._steps = int(steps) if steps is not None else 0
        self._errors.clear()
        self._loaded = saved if parts is not None and parts.tolist() == self._parts().tolist() else {}
