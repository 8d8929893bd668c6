"""The forward of a model that is divided over stages: scripts call it on every rank of the pipeline, with the same arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.link import Link
from hf_zero.core.schedule.forward_hooks import as_written
from hf_zero.core.units.divided import has_hooks_of_scripts
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.observe import log_rank0, warn_once
from hf_zero.pipeline import micro_batches
from hf_zero.pipeline.model_stages import Border, ModelStage
from hf_zero.pipeline.own_stages import OwnStages, give_back
from hf_zero.pipeline.passes import Attached, BorderTypes, Passes
from hf_zero.pipeline.pending import PendingTensor, ResultShapes
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.pipeline.schedules import Scheduler
from hf_zero.pipeline.trial import (
    Trial,
    closeness_for,
    matching_weights,
    persistent_names,
    unchanged,
    uses_other_samples,
    with_uneven_weights,
)
from hf_zero.system.trees import map_tensors, tensors_in
from hf_zero.tensor_parallel import same_data

_NOT_KEPT = ("output_hidden_states", "output_attentions")
_COUNT = "num_items_in_batch"  # its value differs in every batch but changes no operation


@dataclass(frozen=True)
class _Kind:
    """Calls with arguments of one kind: the plan, how the losses of parts add up (None: one part only), the types at borders."""

    plan: PipelinePlan
    weighs: str | None
    types: BorderTypes


@dataclass(frozen=True)
class Batch:
    """The calls of one optimizer step: their kind, the arguments of each, and the context of each forward."""

    kind: _Kind
    given: Sequence[Mapping[str, Any]]
    around: Callable[[], AbstractContextManager[Any]]


class PipelinedForward:
    """Replacement of ``model.forward``.

    Attributes:
        begin_backward: Function that is called with the number of parts before gradients reach parameters; the engine sets it.
        parts: Number of parts of the last batch.
        together: The ranks that hold the model: each rank of the pipeline with the ranks that share its layers.

    Args:
        own: This rank's stages.
        pipe: The ranks of the pipeline.
        together: See the attribute.
        wanted: Number of parts of a batch; None chooses a divisor of the batch.
        schedule: Name of the schedule of ``train``.
        plan_for: Function that makes the plan for a call from its arguments.
        beside: Ranks that train on other samples and whose experts compute together with this rank's, so that all run the same number of
            parts at the same time; None where each computes alone.
    """

    def __init__(
        self,
        own: OwnStages,
        pipe: Collectives,
        together: Collectives,
        wanted: int | None,
        schedule: str,
        plan_for: Callable[[Mapping[str, Any]], PipelinePlan],
        beside: Collectives | None = None,
    ) -> None:
        self.begin_backward: Callable[[int], None] = lambda parts: None
        self.parts = 1
        self.together = together
        self._own = own
        self._pipe = pipe
        self._link = Link(pipe)
        self._wanted = wanted
        self._scheduler = Scheduler(own.placement, pipe, schedule)
        self._borders: dict[Any, Border] = {}
        self._plan_for = plan_for
        self._beside = beside
        self._kinds: dict[Any, _Kind] = {}
        self._engines = 0
        self._original = own.model.forward
        self._signature = self.__signature__ = inspect.signature(self._original)  # libraries look at the model's arguments
        self._source = own.placement.rank_of(own.placement.stages - 1)
        self._last = self._source == own.rank
        self._shapes = ResultShapes(pipe, self._source)
        self._named: list[tuple[str, nn.Parameter]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedForward:
        raise StateError(
            f"{type(self._own.model).__name__} was copied while pipeline.stages divides it: each rank has the layers of its stages alone. "
            "Copy the model before initialize, keep averages of weights with hf_zero's averages, or copy what engine.save_16bit_model wrote"
        )

    def attach(self) -> None:
        """Count another engine that runs the model; ``remove`` is called when it is destroyed."""
        self._engines += 1

    def remove(self) -> None:
        """Restore the model's own forwards when no engine is left."""
        self._engines -= 1
        if not self._engines and self._own.model.__dict__.get("forward") is self:
            self._own.remove()
            give_back(self._own.model, self._original)

    @property
    def whole(self) -> bool:
        """Return whether this rank temporarily holds the parameters of all stages and runs the whole model itself."""
        return self._own.whole

    @whole.setter
    def whole(self, whole: bool) -> None:
        self._own.whole = whole

    @torch.no_grad()
    def send_to_all(self, tensor: torch.Tensor, rank: int, what: str) -> None:
        """Give ``tensor`` the values that it has on one rank of the pipeline; collective over the pipeline."""
        values = tensor.detach().to(self._own.device).contiguous()
        self._pipe.broadcast(values, rank, what)
        if self._own.rank != rank:
            tensor.copy_(values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result, on every rank; collective over the pipeline.

        The loss has its value on every rank. Other tensors are fetched from the last stage when they are read, at once without gradients.
        """
        if self.whole:
            return self._original(*args, **kwargs)
        given = self._arguments(args, kwargs)
        rows = self._common(micro_batches.rows_of(given))
        count = micro_batches.count_for(rows, self._wanted, self._pipe.world)
        kind = self._kind_of(given, count)
        self.parts = count if kind.weighs is not None else 1
        parts = micro_batches.split(given, self.parts)
        passes = Passes(self._own, kind.plan, self._link, self.begin_backward, kind.types)
        results = passes.forward(self._original, parts)
        weights = micro_batches.weights_of(parts, kind.weighs or "sum")
        if torch.is_grad_enabled():
            self._warn_of_hooks()
            return self._for_training(given, passes, results, weights)
        return self._everywhere(given, micro_batches.merge(results, weights) if self._last else None)

    def prepare(self, calls: Sequence[Mapping[str, Any]], around: Callable[[], AbstractContextManager[Any]]) -> Batch:
        """Prepare several calls of the model for ``train``; collective.

        Args:
            calls: Arguments of each call; all of one kind, with tensors of any sizes.
            around: Context of each forward.

        Raises:
            UnsupportedError: The calls are of several kinds.
        """
        same_data.look(self._own.model, calls[0])
        given = [self._arguments((), kwargs) for kwargs in calls]
        with around():
            first, *others = [self._kind_of(arguments, 1) for arguments in given]
            if any(kind is not first for kind in others):
                raise UnsupportedError(
                    "pipeline: the micro-batches of one train_batch differ in the names or types of their arguments, or in arguments that "
                    "are no tensors, so other modules may run for each. Give all the same, or train with forward, backward and step"
                )
            if not first.types.known:  # a schedule must know the types at the borders in advance
                with trying(self._own.model):
                    self._once(first.plan, given[0], first.types)
        return Batch(first, given, around)

    def train(self, batch: Batch, scale: float) -> torch.Tensor:
        """Run forward and backward of a batch in the order of the schedule; return the mean of its losses, on every rank. Collective.

        Args:
            batch: The result of ``prepare``.
            scale: Factor of each loss before its backward.
        """
        own, losses = self._own, list[torch.Tensor]()
        rest = self._original, batch.given, batch.kind.types, batch.around, self._borders, losses
        works = {index: ModelStage(own, index, batch.kind.plan, *rest) for index in own.placement.stages_of(own.rank)}
        self._scheduler.train(works, len(batch.given), scale)
        mean = torch.stack(losses).float().mean() if self._last else torch.zeros((), device=self._own.device)
        self._pipe.broadcast(mean, self._source, "loss")
        return mean

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind_partial(*args, **kwargs)
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise UnsupportedError("pipeline: call the model with keyword arguments")
            else:
                given[name] = value
        for name in _NOT_KEPT:
            if given.get(name):
                raise UnsupportedError(
                    f"pipeline: {name}=True needs values from all layers, and each stage has only its own layers. Leave it out, or "
                    "leave pipeline.stages out"
                )
        takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in self._signature.parameters.values())
        if "use_cache" in self._signature.parameters or (takes_any and getattr(self._own.model, "config", None) is not None):
            given["use_cache"] = False
        return given

    def _common(self, rows: int) -> int:
        """Return the greatest common divisor of the batch rows of all ranks that compute beside this one; collective over these ranks."""
        return rows if self._beside is None else math.gcd(*self._beside.gather_objects(rows, "rows of a batch"))

    # -- kinds of calls -------------------------------------------------------------------------------------------------

    def _kind_of(self, given: Mapping[str, Any], count: int) -> _Kind:
        shapes = tuple(sorted((name, value.dim(), value.dtype) for name, value in given.items() if isinstance(value, torch.Tensor)))
        others = tuple(
            sorted((name, repr(value)) for name, value in given.items() if not isinstance(value, torch.Tensor) and name != _COUNT)
        )
        device = self._own.device.type
        autocast = torch.is_autocast_enabled(device)
        key = (repr((shapes, others, autocast and torch.get_autocast_dtype(device))), self._own.model.training, count > 1)
        if self._is_new(key):
            self._own.templates.follow(self._own.model)
            plan = self._plan_for(micro_batches.split(given, count)[0])
            types = BorderTypes(autocast)
            self._kinds[key] = _Kind(plan, self._find_weights(plan, given, count, types) if count > 1 else "sum", types)
        return self._kinds[key]

    def _is_new(self, key: Any) -> bool:
        """Return whether a kind of call is new; where ranks compute side by side, whether it is new on any, since finding a kind runs the
        model.
        """
        new = key not in self._kinds
        return new if self._beside is None else self._beside.any_rank(new, "a new kind of batch")

    def _find_weights(self, plan: PipelinePlan, given: Mapping[str, Any], count: int, types: BorderTypes) -> str | None:
        """Return how the losses of parts add up, tried with this batch and without dropout; None where no way is right, see
        [Note: losses of parts].
        """
        found = None
        if not self._changes_state(plan, given, types):
            with trying(self._own.model):
                given, whole = self._whole_trial(plan, given, count, types)
                parts = [self._trial(plan, part, types) for part in micro_batches.split(given, count)]
            if self._last and all(micro_batches.mergeable(part.result, micro_batches.rows_of(given) // count) for part in parts):
                ways, close = micro_batches.possible_weights(given), closeness_for(self._own.model, types.sent)
                with torch.no_grad():
                    found = matching_weights(whole, parts, micro_batches.split(given, count), ways, close)
        found = self._pipe.broadcast_object(found, self._source, "how losses of parts add up")
        if self._beside is not None and self._beside.any_rank(found is None, "how losses of parts add up"):
            found = None  # ranks side by side run the same number of parts
        if found is None:
            log_rank0(
                "pipeline: the output of %s for a batch cannot be computed from the outputs for parts of the batch; each batch "
                "runs through the %d stages undivided, so stages wait for each other",
                type(self._own.model).__name__,
                self._pipe.world,
            )
        return found

    def _changes_state(self, plan: PipelinePlan, given: Mapping[str, Any], types: BorderTypes) -> bool:
        """Return whether forwards of training compute with other samples' statistics, or change buffers (averages, spectral norms), so that
        a part would change them as a batch; the same answer on every rank.
        """
        model = self._own.model
        if uses_other_samples(model):
            return True
        if not model.training or not any(map(persistent_names, model.modules())):
            return False
        with unchanged(model) as changed, torch.no_grad(), as_written(model):
            self._once(plan, given, types)
        return self._agreed_on(bool(changed), "buffers that a forward changes")

    def _agreed_on(self, flag: bool, what: str) -> bool:
        """Return whether ``flag`` is True on any rank that must run the same number of parts; collective over these ranks."""
        found = self._pipe.any_rank(flag, what)
        return found if self._beside is None else self._beside.any_rank(found, what)

    def _whole_trial(self, plan: PipelinePlan, given: Mapping[str, Any], count: int, types: BorderTypes) -> tuple[Mapping[str, Any], Trial]:
        """Return the arguments of the trial, and the trial of the whole batch with them.

        A model that does not know the labels of the trial raises an error on the last stage alone; all ranks then take the labels as given.
        """
        changed, tried = with_uneven_weights(self._own.model, given, count), None
        if changed is not given:
            with suppress(Exception):
                tried = self._trial(plan, changed, types)
            if self._agreed_on(tried is None, "labels of the trial"):
                changed, tried = given, None
        return changed, tried if tried is not None else self._trial(plan, changed, types)

    def _trial(self, plan: PipelinePlan, part: Mapping[str, Any], types: BorderTypes) -> Trial:
        probes = None if torch.is_inference_mode_enabled() else list[torch.Tensor]()
        return Trial.of(self._once(plan, part, types, probes), probes or ())

    def _once(self, plan: PipelinePlan, part: Mapping[str, Any], types: BorderTypes, probes: list[torch.Tensor] | None = None) -> Any:
        return Passes(self._own, plan, self._link, self.begin_backward, types).forward(self._original, [part], probes)[0]

    # -- results on every stage -----------------------------------------------------------------------------------------

    def _everywhere(self, given: Mapping[str, Any], result: Any) -> Any:
        """Return the result of the last stage, on every rank."""
        template, _ = self._shapes.agree(given, result)
        values = iter([tensor for _, tensor in tensors_in(result)])
        return map_tensors(template, lambda meta: self._broadcast(next(values) if self._last else meta))

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the last stage, on every rank; other stages pass a tensor of its shape."""
        value = tensor.detach().contiguous() if self._last else torch.empty(tensor.shape, dtype=tensor.dtype, device=self._own.device)
        self._pipe.broadcast(value, self._source, "result")
        return value

    def _warn_of_hooks(self) -> None:
        """Warn of hooks on gradients of parameters, which run once for each micro-batch; local."""
        if self.parts == 1:
            return
        self._named = self._named or list(self._own.model.named_parameters())  # no parameter can be added to a divided model
        if (name := next((name for name, param in self._named if has_hooks_of_scripts(param)), None)) is not None:
            warn_once(
                f"{name}: its hook (register_hook, register_post_accumulate_grad_hook) runs for each of the {self.parts} micro-batches "
                'of the pipeline, with the gradient of that part: a norm or mean there is not that of the batch. Set "pipeline": '
                '{"micro_batches": 1}, or change gradients after the backward with hf_zero.utils.safe_set_full_grad'
            )

    def _for_training(self, given: Mapping[str, Any], passes: Passes, results: Sequence[Any], weights: Any) -> Any:
        """Return the result with a graph: the loss at once, other tensors as ``PendingTensor``, fetched when they are used."""
        by_part, token = passes.joined(results)
        merged = None
        if self._last:
            outer = []
            for result, tensors in zip(results, by_part, strict=True):
                places = iter(range(len(list(tensors_in(result)))))

                def take(tensor: torch.Tensor, tensors: dict[int, torch.Tensor] = tensors, places: Any = places) -> torch.Tensor:
                    return tensors.get(next(places), tensor)

                outer.append(map_tensors(result, take))
            merged = micro_batches.merge(outer, weights)
        loss = micro_batches.loss_of(merged)
        flat = [tensor for _, tensor in tensors_in(merged)]
        place = next((index for index, tensor in enumerate(flat) if tensor is loss), None)
        template, place = self._shapes.agree(given, merged, place)
        counted = iter(range(len(list(tensors_in(template)))))

        def give(meta: torch.Tensor) -> torch.Tensor:
            index = next(counted)
            own = flat[index] if self._last else None
            if index == place:
                return self._attached(token, meta, own)
            source = token.grad_fn if meta.is_floating_point() else None
            return PendingTensor(meta, self._own.device, lambda: self._attached(token, meta, own), source)

        return map_tensors(template, give)

    def _attached(self, token: torch.Tensor, meta: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        value = self._broadcast(own if own is not None else meta)
        if own is not None:
            return own
        return Attached.apply(token, value) if value.is_floating_point() else value  # type: ignore[no-untyped-call,no-any-return]


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Keep ``model`` in evaluation mode and uncompiled inside the context: a trial of a few sizes would make graphs that no step uses."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), as_written(model):
            yield
    finally:
        for module in training:  # a script may have put some modules into evaluation mode
            module.training = True


def pipelined(model: nn.Module) -> PipelinedForward | None:
    """Return the object that replaces the forward of ``model``; None where the model is not divided over stages."""
    found = model.__dict__.get("forward")
    return found if isinstance(found, PipelinedForward) else None
