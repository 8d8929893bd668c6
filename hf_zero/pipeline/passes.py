"""Run the forward of a batch through all stages, and its backward; the parts of the batch follow each other.

[Note: two passes] A script calls the model, makes a loss of the result, and calls ``backward``. So all parts run forward in the first
call and backward in the second, as in GPipe (arXiv 1811.06965). The bubble is the bubble of 1F1B, (stages - 1) / (parts + stages - 1),
and a stage keeps the activations of one call of the script, as any model does. Where the script leaves both to the engine
(``train_batch``) the schedule can be another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hf_zero.comm.link import Link
from hf_zero.core.schedule.torch_internals import will_run
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.pipeline.own_stages import OwnStages, Run
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.system.trees import tensors_in

_TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_LABEL = "types of activations"


class BorderTypes:
    """The types of the tensors of each border, for calls of one kind.

    [Note: types under autocast] A stage that does not run a module finds the shape of its result with a copy without values, where autocast
    has no effect. So the stage that has the tensors sends their types, as numbers, ahead of the first part of each kind.

    Attributes:
        sent: Calls of this kind run under autocast; otherwise no types are sent.
    """

    def __init__(self, sent: bool) -> None:
        self.sent = sent
        self._known: dict[int, list[torch.dtype]] = {}  # border -> types

    @property
    def known(self) -> bool:
        """Return whether the stages already know the types; the same on every rank."""
        return not self.sent or bool(self._known)

    def of(self, border: int, metas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``metas`` with the types of the tensors that crossed ``border``."""
        dtypes = self._known.get(border, [meta.dtype for meta in metas])
        return [torch.empty(meta.shape, dtype=dtype, device="meta") for meta, dtype in zip(metas, dtypes, strict=True)]

    def send(self, border: int, tensors: Sequence[torch.Tensor], link: Link, target: int) -> None:
        """Send the types of ``tensors`` ahead of the tensors themselves, once per border."""
        if not self.sent or border in self._known:
            return
        self._known[border] = [tensor.dtype for tensor in tensors]
        if tensors:
            numbers = torch.tensor([_TYPES.index(tensor.dtype) for tensor in tensors], device=tensors[0].device)
            link.send([numbers], target, _LABEL)

    def receive(self, border: int, metas: Sequence[torch.Tensor], link: Link, source: int) -> list[torch.Tensor]:
        """Return ``metas`` with the types in which rank ``source`` sends the tensors."""
        if not (self.sent and metas):
            return list(metas)
        if border not in self._known:
            numbers = link.receive([torch.empty(len(metas), dtype=torch.int64, device="meta")], source, _LABEL)[0]
            self._known[border] = [_TYPES[number] for number in numbers.tolist()]
        return self.of(border, metas)


class Passes:
    """One call of the model: forward of all its parts, and later their backward, once.

    Attributes:
        ends_here: This rank runs the last stage.

    Args:
        own: This rank's stages.
        plan: Plan for calls of this kind.
        link: Sends and receives between the ranks of the pipeline.
        begin_backward: Function that is called with the number of parts before the first gradient reaches a parameter.
        types: Element types at the borders.
    """

    def __init__(self, own: OwnStages, plan: PipelinePlan, link: Link, begin_backward: Callable[[int], None], types: BorderTypes) -> None:
        self._types = types
        self._own = own
        self._plan = plan
        self._link = link
        self._begin_backward = begin_backward
        self._indices = own.placement.stages_of(own.rank)
        self._runs: dict[tuple[int, int], Run] = {}  # by stage and part
        self._ends: list[list[torch.Tensor]] = []  # per part, the differentiable tensors of the result
        self._here: dict[tuple[int, int], list[torch.Tensor]] = {}  # tensors between two stages of this rank, by target stage and part
        self.ends_here = own.placement.rank_of(plan.stages - 1) == own.rank

    # -- forward ------------------------------------------------------------------------------------------------------------

    def forward(
        self, forward: Callable[..., Any], parts: Sequence[Mapping[str, Any]], probes: list[torch.Tensor] | None = None
    ) -> list[Any]:
        """Run every part; return the result of each part on the rank of the last stage, None for each part elsewhere.

        Args:
            forward: The model's own forward.
            parts: Arguments of each part.
            probes: List for the results of the last stage's items, from which the model's result then has a graph.
        """
        grad, results = torch.is_grad_enabled(), []
        for index in self._indices:
            for place, part in enumerate(parts):
                last = probes if index == self._plan.stages - 1 else None
                run = self._own.run(self._plan, index, partial(self._incoming, (index, place), grad), forward, part, last)
                self._pass_on((index + 1, place), run.sent)
                if grad:
                    self._runs[index, place] = run
                if index == self._indices[-1]:
                    results.append(run.result)
        self._link.settle("activations to the next stage")
        return results

    def _incoming(self, at: tuple[int, int], grad: bool, metas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        source = self._own.placement.rank_of(at[0] - 1)
        if source == self._own.rank:
            waiting = self._here[at]
            found = [waiting.pop(0).detach() for _ in metas]
        else:
            metas = self._types.receive(at[0] - 1, metas, self._link, source)
            found = self._link.receive(metas, source, "activations of the stage before")
        return [tensor.requires_grad_(grad and tensor.is_floating_point()) for tensor in found]

    def _pass_on(self, to: tuple[int, int], tensors: list[torch.Tensor]) -> None:
        if to[0] == self._plan.stages:
            return
        target = self._own.placement.rank_of(to[0])
        if target == self._own.rank:
            self._here[to] = list(tensors)
        else:
            self._types.send(to[0] - 1, tensors, self._link, target)
            self._link.send(tensors, target, "activations to the next stage")

    def joined(self, results: Sequence[Any]) -> tuple[list[dict[int, torch.Tensor]], torch.Tensor]:
        """Return the tensors that a script may differentiate: per part, those of its result by position; and a token through which the
        script's backward reaches this node.

        Ranks without the last stage get only the token.
        """
        wanted = [
            [(place, tensor) for place, (_, tensor) in enumerate(tensors_in(result)) if tensor.requires_grad] if self.ends_here else []
            for result in results
        ]
        self._ends = [[tensor for _, tensor in part] for part in wanted]
        anchor = torch.zeros((), device=self._own.device, requires_grad=True)
        token, *outer = _Outer.apply(anchor, self, [tensor for part in self._ends for tensor in part])  # type: ignore[no-untyped-call]
        found = iter(outer)
        return [{place: next(found) for place, _ in part} for part in wanted], token

    # -- backward -----------------------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the backward of every part, the last one first.

        Args:
            gradients: Gradients of the tensors that ``joined`` returned, in order.

        Raises:
            StateError: The backward has already run.
            UnsupportedError: On every rank, if the loss of a rank uses tensors that a script has kept from the layers of one stage.
        """
        if not self._runs:
            raise StateError(
                "a second backward through the same forward of a pipeline is not supported: call the model again (retain_graph keeps no "
                "tensors of other stages)"
            )
        self._refuse_kept()
        runs, ends, given = self._runs, self._ends, iter(gradients)
        by_part = [[next(given) for _ in part] for part in ends]
        self._runs, self._ends = {}, []
        self._begin_backward(len(runs))
        for index in reversed(self._indices):
            for place in reversed(range(len(by_part))):
                self._backward_part((index, place), runs.pop((index, place)), ends[place], by_part[place])
        self._link.settle("gradients to the stage before")

    def _refuse_kept(self) -> None:
        """Refuse a loss that leads into the graph of a stage directly: other ranks have no such summand, nor its gradient; collective."""
        nodes = [node for run in self._runs.values() for node in (*run.nodes, *map(_node, run.received)) if node is not None]
        here, axis = any(map(will_run, nodes)), self._link.axis
        if axis.any_rank(here, "kept tensors in the loss"):
            ranks = [rank for rank, kept in enumerate(axis.gather_objects(here, "ranks with kept tensors")) if kept]
            raise UnsupportedError(
                f"pipeline: the loss of stage rank(s) {', '.join(map(str, ranks))} uses tensors that a hook or an attribute has kept from "
                "inside of the model, and the other stages have no such tensors. Add such a summand to the loss inside the model's "
                "forward, behind its layers, or leave pipeline.stages out"
            )

    def _backward_part(self, at: tuple[int, int], run: Run, ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        index, place = at
        if index == self._plan.stages - 1:
            pairs = [(tensor, grad) for tensor, grad in zip(ends, gradients, strict=True) if grad is not None]
        else:
            floating = [tensor for tensor in run.sent if tensor.is_floating_point()]
            pairs = list(zip(floating, self._incoming_gradients((index + 1, place), floating), strict=True))
        pairs = [(tensor, grad) for tensor, grad in pairs if tensor.requires_grad]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        if index > 0:
            back = []
            for tensor in run.received:
                if tensor.is_floating_point():
                    back.append(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
                    tensor.grad = None
            self._pass_back(at, back)

    def _incoming_gradients(self, of: tuple[int, int], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        source = self._own.placement.rank_of(of[0])
        return self._here.pop(of) if source == self._own.rank else self._link.receive(like, source, "gradients of the next stage")

    def _pass_back(self, of: tuple[int, int], tensors: list[torch.Tensor]) -> None:
        target = self._own.placement.rank_of(of[0] - 1)
        if target == self._own.rank:
            self._here[of] = tensors
        else:
            self._link.send(tensors, target, "gradients to the stage before")


def _node(leaf: torch.Tensor) -> Any:
    """Return the node that adds to ``leaf.grad``; None for a tensor without gradients."""
    return torch.autograd.graph.get_gradient_edge(leaf).node if leaf.requires_grad else None


class _Outer(torch.autograd.Function):
    """Node that joins the graph of a script to the passes of the pipeline."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, passes: Passes, tensors: Sequence[torch.Tensor]) -> Any:
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        # Scripts scale a loss in place, so they get a copy of the loss that the passes differentiate.
        return (anchor.detach().clone(), *(tensor.detach().clone() if tensor.dim() == 0 else tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, token: Any, *gradients: Any) -> Any:
        ctx.passes.backward(gradients)
        return None, None, None


class Attached(torch.autograd.Function):
    """Values of the last stage, on another rank; their backward reaches this rank's passes through the token."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()  # scripts scale a loss in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.new_zeros((), dtype=torch.float32), None
