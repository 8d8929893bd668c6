"""Check in each step that ranks which hold layers together had the same loss, and equal gradients for parameters that each holds whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import Topology
from hf_zero.core.step.step_sum import StepSum
from hf_zero.core.units.unit import Unit
from hf_zero.memory.copies import Arriving
from hf_zero.system.planning import has_values

_NAMES = (
    "losses",
    "inputs of divided layers, by their norms",
    "gradients for the parameters that each of them holds whole, by the sums of squares",
)
# Ranks compute whole tensors alike from the same inputs, so numbers differ only where a kernel adds in any order.
_CLOSE_IN_32_BITS, _CLOSE_IN_16_BITS = (1e-5, 1e-7), (5e-4, 1e-5)  # relative and absolute difference that is allowed


class EqualCopies:
    """Comparison of losses and gradients between the ranks that hold layers together.

    Tensor parallelism divides layers by a trace of the model's forward. Code that the trace has not run may use a tensor of which each rank
    has a part: a branch for another argument, a loss from activations that a layer keeps in an attribute. Then the loss depends on the
    rank, or the tensors that enter divided layers do (their outputs are joined and then the same on all ranks), or each rank trains its
    copies of the whole parameters by another gradient. These numbers travel in the message of the gradient norm, and each rank
    compares them before its next vote, so no rank waits for them.

    Attributes:
        size: Number of ranks of the norm's message; 0 compares nothing.
        loss: Loss of the coming step.
        inputs: Norms of the whole tensors that enter divided layers in the coming step.

    Args:
        axis: The ranks of the norm's message; None compares nothing.
        layers: The ranks among these that hold each layer together with this rank.
        close: Largest relative and absolute difference.
    """

    def __init__(
        self, axis: Topology | None = None, layers: Topology | None = None, close: tuple[float, float] = _CLOSE_IN_32_BITS
    ) -> None:
        self.size, self._place = (axis.world, axis.rank) if axis is not None else (0, 0)
        self.loss, self.inputs = StepSum(), StepSum()
        self._ranks = layers.ranks if layers is not None else ()
        self._places = [axis.ranks.index(rank) for rank in self._ranks] if axis is not None else []
        self._close = close
        self._found: Arriving | None = None

    @property
    def count(self) -> int:
        """Return the number of ranks with equal copies of a layer's whole parameters; 0 in a pipeline, whose stages have copies too."""
        return self.size if len(self._places) == self.size else 0

    def compare(self, loss: StepSum, inputs: StepSum) -> None:
        """Use ``loss`` and ``inputs`` from now on as the numbers of the coming step."""
        self.loss, self.inputs = loss, inputs
        inputs.wanted = self.size > 0

    def end(self) -> None:
        """Begin the next step: this one was taken."""
        self.loss.end()
        self.inputs.end()

    def forget(self) -> None:
        """Drop the numbers since the last step, whose gradients were dropped too."""
        self.loss.forget()
        self.inputs.forget()

    def message(self, squares: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Return the numbers of this rank for a sum over ranks; local.

        Args:
            squares: 0-dim float64, the sum of squares over the gradients that the ranks of a layer hold alike; None without any.
            device: Device of the result.

        Returns:
            (3 * size,) float64: for each rank of the axis its loss, then for each the norms of its inputs, then the sum of squares;
            NaN for numbers that are not known.
        """
        numbers = torch.zeros(3, self.size, dtype=torch.float64, device=device)
        for row, step_sum in enumerate((self.loss, self.inputs)):
            number, unknown = step_sum.message(device)
            numbers[row, self._place] = torch.where(unknown > 0, torch.nan, number)
        if squares is not None:
            numbers[2, self._place] = squares
        return numbers.reshape(-1)

    def note(self, sums: torch.Tensor) -> None:
        """Keep the sum of ``message`` over the ranks of the axis, and over the ranks of its shards, for ``refusal``; local."""
        if has_values(sums):
            self._found = Arriving(sums.view(3, self.size))

    def refusal(self) -> str:
        """Return an error if the loss or the gradients of the last step differed; "" otherwise, or if they were not finite. Local."""
        rows, self._found = self._found.read() if self._found is not None else [], None
        rows = [[row[place] for place in self._places] for row in rows]
        name, numbers = next((entry for entry in zip(_NAMES, rows, strict=False) if self._differ(entry[1])), ("", []))
        if not name:
            return ""
        found = f"different {name} ({' and '.join(f'{number:.8g}' for number in numbers)})"
        return (
            f"in the last step, the ranks {', '.join(map(str, self._ranks))}, which hold layers together "
            f"(tensor_parallel.autotp_size), had {found}. Either their samples or their random numbers differed, and must be the same; or "
            "the loss used a tensor of which each rank has a part: activations inside a divided layer, in a branch of the forward that did "
            "not run when the plan was made, or kept for a loss outside of the forward. Then name the layers whose outputs it uses in "
            "tensor_parallel.partition_config.layer_specs with partition_type 'skip', so that each rank holds them whole, or give "
            "tp_model_init(model, tp_size, inputs={...}) arguments that run this branch"
        )

    def _differ(self, numbers: Sequence[float]) -> bool:
        """Return whether finite numbers of the ranks are not close to each other."""
        if not numbers or not all(map(math.isfinite, numbers)):
            return False
        relative, absolute = self._close
        return max(numbers) - min(numbers) > max(relative * max(map(abs, numbers)), absolute)


def equal_copies(topology: Topology, model: Collectives | None, experts: Collectives | None, units: Sequence[Unit]) -> EqualCopies:
    """Return the comparison for an engine; it compares nothing where ranks hold no layers together, or hold experts apart.

    Args:
        topology: Axes of the engine's units.
        model: Network of the model axis, whose message has the norm.
        experts: Network of the ranks that hold all experts together.
        units: Units of the model.
    """
    layers = topology.layers.model
    if layers is None or layers.world == 1 or model is None or experts is not None:
        return EqualCopies()
    in_32_bits = all(unit.layout.dtype == torch.float32 for unit in units)
    return EqualCopies(model.topology, layers, _CLOSE_IN_32_BITS if in_32_bits else _CLOSE_IN_16_BITS)
