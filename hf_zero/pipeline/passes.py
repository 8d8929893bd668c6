"""The forward of a batch through all stages, and its backward: each part of the batch follows the one before.

[Note: two passes] A script calls the model, makes a loss of what it returns, and calls ``backward``. So all parts go forward in the first
call and backward in the second, as in GPipe (arXiv 1811.06965): the bubble is that of 1F1B, (stages - 1) / (parts + stages - 1), and a
stage keeps the activations of one call of the script, as any model does. Where the script leaves both to the engine (``train_batch``)
the schedule can be another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.comm.link import Link
from hf_zero.errors import StateError
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.pipeline.stage import Run, Stage
from hf_zero.tensor_parallel.call_arguments import tensors_in


class Passes:
    """One call of the model: forward of all its parts, and later their backward, once.

    Args:
        stage: This rank's.
        plan: For calls of this kind.
        link: Between the stages.
        begin_backward: Called with the number of parts before the first gradient reaches a parameter.
    """

    def __init__(self, stage: Stage, plan: PipelinePlan, link: Link, begin_backward: Callable[[int], None]) -> None:
        self._stage = stage
        self._plan = plan
        self._link = link
        self._begin_backward = begin_backward
        self._runs: list[Run] = []
        self._last = stage.index == plan.stages - 1

    def forward(self, forward: Callable[..., Any], parts: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Runs every part; returns the results of the parts on the last stage, None for each elsewhere."""
        index = self._stage.index
        grad = torch.is_grad_enabled()

        def receive(metas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            found = self._link.receive(metas, index - 1, "activations of the stage before")
            return [tensor.requires_grad_(grad and tensor.is_floating_point()) for tensor in found]

        results = []
        for part in parts:
            run = self._stage.run(self._plan, receive, forward, part)
            if not self._last:
                self._link.send(run.sent, index + 1, "activations to the next stage")
            results.append(run.result)
            if grad:
                self._runs.append(run)
        self._link.settle("activations to the next stage")
        return results

    def joined(self, results: Sequence[Any]) -> tuple[list[dict[int, torch.Tensor]], torch.Tensor]:
        """What a script may differentiate: per part, the tensors of its result by position; and a token from which backward comes here.

        On stages before the last the token alone.
        """
        wanted = [
            [(place, tensor) for place, (_, tensor) in enumerate(tensors_in(result)) if tensor.requires_grad] if self._last else []
            for result in results
        ]
        self._ends = [[tensor for _, tensor in part] for part in wanted]
        anchor = torch.zeros((), device=self._stage.device, requires_grad=True)
        token, *outer = _Outer.apply(anchor, self, [tensor for part in self._ends for tensor in part])  # type: ignore[no-untyped-call]
        found = iter(outer)
        return [{place: next(found) for place, _ in part} for part in wanted], token

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward of every part, the last one first.

        Args:
            gradients: Of what ``joined`` gave, in order; on the last stage.

        Raises:
            StateError: There was one already.
        """
        if not self._runs:
            raise StateError(
                "a second backward through the same forward of a pipeline: call the model again (retain_graph does not keep what the other "
                "stages need)"
            )
        runs, self._runs = self._runs, []
        self._begin_backward(len(runs))
        given = iter(gradients)
        by_part = [[next(given) for _ in part] for part in self._ends] if self._last else [[] for _ in runs]
        for place in reversed(range(len(runs))):
            self._backward_part(runs[place], self._ends[place] if self._last else [], by_part[place])
            runs[place] = Run.__new__(Run)  # lets its graph go
        self._ends = []
        self._link.settle("gradients to the stage before")

    def _backward_part(self, run: Run, ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        index = self._stage.index
        if not self._last:
            floating = [tensor for tensor in run.sent if tensor.is_floating_point()]
            received = self._link.receive(floating, index + 1, "gradients of the next stage")
            pairs = [(tensor, grad) for tensor, grad in zip(floating, received, strict=True) if tensor.requires_grad]
        else:
            pairs = [(tensor, grad) for tensor, grad in zip(ends, gradients, strict=True) if grad is not None]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        if index > 0:
            back = []
            for tensor in run.received:
                if tensor.is_floating_point():
                    back.append(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
                    tensor.grad = None
            self._link.send(back, index - 1, "gradients to the stage before")


class _Outer(torch.autograd.Function):
    """Where the graph of a script ends and the passes begin."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, passes: Passes, tensors: Sequence[torch.Tensor]) -> Any:
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        return (anchor.detach().clone(), *(tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, token: Any, *gradients: Any) -> Any:
        ctx.passes.backward(gradients)
        return None, None, None


class Attached(torch.autograd.Function):
    """Values of the last stage on another one: a backward through them comes to the passes of this stage."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.new_zeros((), dtype=torch.float32), None
