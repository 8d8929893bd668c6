"""Add up a number of an optimizer step, such as its loss, on each rank, for readers that compare it with other steps or other ranks.

[Note: the loss of a step] On each rank it is the sum of the losses of the step's backwards as they were back-propagated, without loss scale
and divided by ``gradient_accumulation_steps`` where the engine divides. It travels with the gradient norm where that is summed over the
same ranks (``core/step/step.py``). A backward that the script starts without telling the engine the loss makes the loss of the step
unknown, and an unknown loss is not compared.
"""

from __future__ import annotations

import torch


class StepSum:
    """Sum of one number over the backwards, or the forwards, since the last step, such as the loss.

    Attributes:
        wanted: Whether a reader exists, for callers that would compute the number only for it.
        last: The sum of the step that was taken last, 0-dim; None if it is unknown.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.last: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._unknown = False

    def add(self, number: torch.Tensor | None, divisor: int = 1) -> None:
        """Add the number of a backward or forward, without waiting for the device.

        Args:
            number: Scalar; None if it is unknown.
            divisor: Number that the gradients are divided by later.
        """
        if number is None or number.numel() != 1:
            self._unknown = True
            return
        value = number.detach().reshape(())
        value = value if divisor == 1 else value.double() / divisor
        self._sum = value if self._sum is None else self._sum.double() + value

    def end(self) -> None:
        """Begin the next step: this one was taken."""
        self.last = None if self._unknown else self._sum
        self.forget()

    def forget(self) -> None:
        """Drop the numbers since the last step, whose gradients were dropped too."""
        self._sum, self._unknown = None, False

    def message(self, device: torch.device) -> torch.Tensor:
        """Return (2,) float64 for a sum over ranks: this rank's sum of the step, and 1 if it is unknown."""
        unknown = self._unknown or self._sum is None
        value = torch.zeros((), dtype=torch.float64) if unknown or self._sum is None else self._sum.double()
        return torch.stack([value.to(device), torch.tensor(float(unknown), dtype=torch.float64, device=device)])
