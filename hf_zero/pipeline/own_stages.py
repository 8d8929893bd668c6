"""The stages of one rank of a pipeline: the model's own forward, without the calls of other stages' modules.

[Note: one forward for all stages] Every rank runs the model's Python code from its beginning. A call of an item ([Note: items]) of an
earlier stage returns a placeholder of the right shape, or the received tensors where they cross the border; calls of this stage's items
run; the first call of a later stage's item ends the forward here. So masks, position tables and all other computations between blocks
need no list of names, and the last stage ends with the model's own loss.

[Note: hooks on items] An item's hooks (of a script, of tensor parallelism) run on its own stage alone, around its forward: a tensor crosses
the border as the hooks leave it. So whole calls are replaced, not forwards; backward hooks are part of a call. The forward is replaced,
too, for models that call it by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.marks import is_elsewhere
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.pipeline.plan import Crossing, PipelinePlan, Placement
from hf_zero.pipeline.templates import Templates
from hf_zero.system.trees import map_tensors, tensors_in

Receive = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class _StageIsOver(BaseException):
    """Signal that ends a forward; a ``BaseException``, so that no model catches it."""


class OwnStages:
    """The stages of a divided model that this rank runs.

    Attributes:
        model: The whole model; parameters that other ranks hold are empty.
        placement: The rank that runs each stage.
        rank: This rank's number in the pipeline.
        whole: The parameters of all stages are on this rank for a while: modules run unchanged.

    Args:
        model: See the attribute.
        placement: See the attribute.
        rank: See the attribute.
        paths: Dotted names of the items.
        divided: Those of which some rank lacks parameters: they refuse calls by themselves, on every rank alike.
        templates: Results of items without values.
        device: Device of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        rank: int,
        paths: Sequence[str],
        divided: Collection[str],
        templates: Templates,
        device: torch.device,
    ) -> None:
        self.model = model
        self.placement = placement
        self.rank = rank
        self.whole = False
        self.templates = templates
        self.device = device
        self._run: Run | None = None
        self._elsewhere: tuple[PipelinePlan, list[dict[str, Any]]] | None = None  # attributes of the modules that others run
        self._originals: dict[str, Callable[..., Any]] = {}
        self._divided = frozenset(divided)
        for path in paths:
            module = model.get_submodule(path)
            for key, hook in list(module._forward_pre_hooks.items()):
                if hook is refuse:  # left by an engine that was destroyed
                    del module._forward_pre_hooks[key]
            self._originals[path] = module.forward
            module.__dict__["_call_impl"] = self._replaced(path, module._call_impl)  # [Note: hooks on items]
            module.forward = self._replaced(path, module.forward)

    def _replaced(self, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function in the place of ``original``: a call of the item ``path``, or the forward inside it."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is not None:
                return run.call(path, original, args, kwargs)
            if path in self._divided and not self.whole and not torch._C._current_graph_task_id() >= 0:
                refuse(self.model.get_submodule(path))
            return original(*args, **kwargs)

        return call

    def remove(self) -> None:
        """Restore the forwards of modules; modules of other stages refuse calls from then on."""
        for path, original in self._originals.items():
            module = self.model.get_submodule(path)
            module.__dict__.pop("_call_impl", None)
            give_back(module, original)
            if _is_other(module):
                module.register_forward_pre_hook(refuse, prepend=True)
        self._originals.clear()

    def run(
        self,
        plan: PipelinePlan,
        index: int,
        receive: Receive,
        forward: Callable[..., Any],
        kwargs: Mapping[str, Any],
        probes: list[torch.Tensor] | None = None,
    ) -> Run:
        """Run one forward of one stage.

        Args:
            plan: Plan for calls with arguments of this kind.
            index: The stage to run; one of this rank's.
            receive: Function that returns the tensors of the border before this stage, in order.
            forward: The model's own forward.
            kwargs: Arguments of the whole model.
            probes: List for the results of the stage's items: the glue between them then makes graphs, which begin at these results.

        Raises:
            UnsupportedError: The model calls its modules in another order than ``plan`` has.
        """
        if self._run is not None:
            raise StateError("pipeline: a forward of the model inside a forward of the model")
        self._recompute_own_alone(plan)
        self._run = run = Run(self, plan, index, receive, probes=probes)
        try:
            with suppress(_StageIsOver), nullcontext() if probes is None else torch.enable_grad():
                run.result = forward(**kwargs)
        finally:
            self._run = None
        run.check()
        return run

    def look(self, plan: PipelinePlan, index: int, receive: Receive, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        """Run a forward of any stage up to its first call, to find the shapes of the stage's input."""
        self._run = Run(self, plan, index, receive, only_before=True)
        try:
            with suppress(_StageIsOver):
                forward(**kwargs)
        finally:
            self._run = None

    def _recompute_own_alone(self, plan: PipelinePlan) -> None:
        """Switch off activation checkpointing in items of other stages, whose calls compute nothing here."""
        if self._elsewhere is None or self._elsewhere[0] is not plan:
            own = {call.path for call in plan.calls if self.placement.rank_of(call.stage) == self.rank}
            self._elsewhere = plan, [vars(self.model.get_submodule(path)) for path in self._originals if path not in own]
        for settings in self._elsewhere[1]:
            if settings.get("gradient_checkpointing"):
                settings["gradient_checkpointing"] = False


class Run:
    """One forward of one stage.

    Attributes:
        received: Tensors that crossed the border before this stage.
        result: The model's own result, on the last stage.
        nodes: Nodes of the graph at the results of this stage's items; a tensor kept from an item leads to one of them.
    """

    def __init__(
        self,
        own: OwnStages,
        plan: PipelinePlan,
        index: int,
        receive: Receive,
        only_before: bool = False,
        probes: list[torch.Tensor] | None = None,
    ) -> None:
        self._probes = probes
        self.received: list[torch.Tensor] = []
        self.result: Any = None
        self.nodes: list[Any] = []
        self._results: list[torch.Tensor] = []  # of this stage's items
        self._own = own
        self._index = index
        self._limit = index if only_before else index + 1  # the stage whose first call ends the forward
        self._plan = plan
        self._receive = receive
        self._place = 0
        self._values: dict[Crossing, torch.Tensor] = {}
        self._incoming = plan.crossings_by_call[index - 1]  # index -1 for the first stage is the empty entry
        self._outgoing = plan.crossings_by_call[index]
        self._changed = plan.changed_by_call
        self._grad = torch.is_grad_enabled()
        self._inside = False  # an item is running: calls inside it are not items

    @property
    def sent(self) -> list[torch.Tensor]:
        """Return the tensors that cross the border behind this stage, in order."""
        last = self._index == self._plan.stages - 1
        return [] if last else [self._values[crossing] for crossing in self._plan.crossings[self._index]]

    def call(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one call of an item of this stage, or return a replacement of the result of an earlier stage's call."""
        if self._inside:
            return original(*args, **kwargs)
        place, calls = self._place, self._plan.calls
        if place >= len(calls) or calls[place].path != path:
            expected = calls[place].path if place < len(calls) else "its end"
            raise UnsupportedError(
                f"pipeline: the model called {path}, but {expected} was expected: the order of its modules depends on data or on "
                "random numbers (layer dropout), which a pipeline does not support. Switch that off, or leave pipeline.stages out"
            )
        stage = calls[place].stage
        if stage >= self._limit:
            raise _StageIsOver
        self._place += 1
        own = stage == self._index
        result = self._run(original, args, kwargs) if own else self._placeholder_outputs(path, place, args, kwargs)
        if own and self._grad:
            self._results += [tensor for _, tensor in tensors_in(result)]  # a graph of torch.compile cannot read ``grad_fn``
        if place in self._outgoing:
            if self._grad and not torch.is_grad_enabled():
                self._refuse_reentrant(path)
            tensors = [tensor for _, tensor in tensors_in(result)]
            for crossing in self._outgoing[place]:
                self._values[crossing] = tensors[crossing.leaf]
        return self._copied(result, self._changed[place]) if place in self._changed else result

    def _refuse_reentrant(self, path: str) -> None:
        """Refuse reentrant checkpointing, through which no gradient could cross the border; a model that switches gradients off may run."""
        if getattr(self._own.model.get_submodule(path), "gradient_checkpointing", False):
            raise UnsupportedError(
                f"pipeline: {path} is checkpointed with use_reentrant=True, where no gradient would come back to it over a border. Set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )

    def _run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._inside = True
        try:
            if self._probes is None:
                return original(*args, **kwargs)
            with torch.no_grad():
                result = original(*args, **kwargs)
            return map_tensors(result, self._probed)
        finally:
            self._inside = False

    def _probed(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._probes is not None
        if not tensor.is_floating_point():
            return tensor
        self._probes.append(tensor.detach().requires_grad_())
        return self._probes[-1].clone()  # glue may change it in place

    @staticmethod
    def _copied(result: Any, leaves: set[int]) -> Any:
        counted = iter(range(len(list(tensors_in(result)))))
        return map_tensors(result, lambda tensor: tensor.clone() if next(counted) in leaves else tensor)

    def _placeholder_outputs(self, path: str, place: int, args: Any, kwargs: Any) -> Any:
        """Return a replacement of the result of an earlier stage's call: received tensors and placeholders."""
        templates, device = self._own.templates, self._own.device
        if place not in self._incoming:
            return templates.outputs_for(path, args, kwargs, device)
        template = templates.result(path, args, kwargs)
        metas = [tensor for _, tensor in tensors_in(template)]
        leaves = [crossing.leaf for crossing in self._incoming[place]]
        arrived = dict(zip(leaves, self._receive([metas[leaf] for leaf in leaves]), strict=True))
        self.received += arrived.values()
        counted = iter(range(len(metas)))

        def fill(meta: torch.Tensor) -> torch.Tensor:
            leaf = next(counted)
            return arrived[leaf] if leaf in arrived else templates.placeholder(meta, device)

        return map_tensors(template, fill)

    def check(self) -> None:
        """Complete ``nodes``, and refuse a forward that ended before it had called this stage's items.

        The last stage need not call all of its items: a loss that reads the head's weight directly never calls the head.
        """
        self.nodes, self._results = [tensor.grad_fn for tensor in self._results if tensor.grad_fn is not None], []
        span = self._plan.span(self._index)
        if self._place < (span.stop if self._index < self._plan.stages - 1 else span.start + 1):
            raise UnsupportedError(
                f"pipeline: the model's forward ended before it called {self._plan.calls[self._place].path}: its modules do not run in the "
                "order that was found without values. Leave pipeline.stages out for this model"
            )


def give_back(module: nn.Module, original: Callable[..., Any]) -> None:
    """Restore the forward ``original`` of ``module``: of the class, or one that another library had set."""
    if getattr(original, "__func__", None) is type(module).forward and getattr(original, "__self__", None) is module:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = original


def _is_other(module: nn.Module) -> bool:
    return any(is_elsewhere(param) for param in module.parameters())


def refuse(module: nn.Module, *_: Any) -> None:
    """Refuse a call, as the forward pre-hook of a module that another stage holds.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"{type(module).__name__} was called alone, or without an engine, but only one stage of the pipeline has it. Call the whole "
        "model, prepared by an engine, on every rank; or bring all weights together with engine.save_16bit_model"
    )
