"""Decide which stage of a pipeline runs which calls of a model's items, so that the heaviest stage is as light as possible."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.pipeline.flow_trace import Drawn, Flow, Kept, Read, trace_flow
from hf_zero.pipeline.plan import Crossing, ItemCall, PipelinePlan
from hf_zero.system.trees import tensors_in
from hf_zero.tensor_parallel.skeleton import argument_names, example_inputs, required_arguments, skeleton


def balanced_runs(weights: Sequence[float], runs: int) -> list[range]:
    """Divide ``weights`` into contiguous runs; return the positions of each run. No run is empty, the heaviest is as light as possible, and
    among such divisions the most even one is taken.

    Dynamic programming over the prefixes, first for the heaviest run, then for the sum of squares with no run above it:
    O(runs * len(weights) ** 2).

    Args:
        weights: At least as many as ``runs``, none negative.
        runs: Number of runs, at least 1.
    """
    sums = [0, *accumulate(weights)]
    heaviest = _divide(sums, runs, max, float("inf"))
    limit = max(sums[run.stop] - sums[run.start] for run in heaviest)
    return _divide(sums, runs, lambda before, weight: before + weight**2, limit)


def _divide(sums: Sequence[float], runs: int, join: object, limit: float) -> list[range]:
    """Return the division of least cost with no run heavier than ``limit``; ``join(cost so far, weight of a run)`` gives the cost."""
    assert callable(join)
    count = len(sums) - 1
    costs = [[float("inf")] * (count + 1) for _ in range(runs + 1)]
    starts = [[0] * (count + 1) for _ in range(runs + 1)]
    costs[0][0] = 0
    for run in range(1, runs + 1):
        for stop in range(run, count + 1):
            for start in range(run - 1, stop):
                weight = sums[stop] - sums[start]
                if weight > limit or costs[run - 1][start] == float("inf"):
                    continue
                cost = join(costs[run - 1][start], weight)
                if cost < costs[run][stop]:
                    costs[run][stop], starts[run][stop] = cost, start
    found, stop = [], count
    for run in range(runs, 0, -1):
        found.append(range(starts[run][stop], stop))
        stop = starts[run][stop]
    return found[::-1]


METHODS = ("parameters", "uniform", "operations", "type:REGEX")
_LENGTHS = (16, 64, 512)


def make_plan(
    model: nn.Module,
    stages: int,
    method: str = "parameters",
    inputs: Mapping[str, Any] | None = None,
    starts: Sequence[tuple[str, int]] | None = None,
) -> PipelinePlan:
    """Return a plan that divides ``model`` over ``stages``.

    Args:
        model: Any model; values and device of its parameters do not matter, and ``zero.Init`` may hold them.
        stages: Number of stages.
        method: The quantity to balance: ``parameters`` (elements of the parameters that a stage's calls use), ``uniform`` (calls of
            blocks), ``operations`` (of matrix products), or ``type:REGEX`` (calls of modules whose class name matches the expression, upper
            and lower case alike).
        inputs: Arguments of a call that runs the model; None makes them up for transformers' models.
        starts: Path and number of the call that begins each stage except the first; None finds them.

    Raises:
        ConfigError: There are more stages than calls of blocks, the method is unknown, no call of the model is known, or the model does not
            run without the values of its parameters.
        UnsupportedError: Tensors that pass from block to block cannot cross so many borders.
    """
    copy = _bare(skeleton(model).train())
    flow = _first_flow(copy, inputs)
    if starts is not None:
        return _laid_out(flow, stages, _from_starts(flow, starts, inputs or {}))
    atoms = _atoms(flow, stages)
    weights = _weights(flow, method)
    runs = balanced_runs([sum(weights[place] for place in atom) for atom in atoms], stages)
    of_stage = [stage for stage, run in enumerate(runs) for atom in run for _ in atoms[atom]]
    return _laid_out(flow, stages, of_stage)


def replan(skeleton: nn.Module, plan: PipelinePlan, inputs: Mapping[str, Any]) -> PipelinePlan:
    """Return the plan for another kind of call (with labels, in evaluation, with other arguments); stages begin with the same calls as
    before.

    Args:
        skeleton: The model without values, in training or evaluation mode like the model that is called.
        plan: The plan by which the stages hold their parameters.
        inputs: Arguments of the call; tensors may be on the device "meta".

    Raises:
        UnsupportedError: The call does not run the first call of a stage, needs a parameter on a stage that does not hold it, or keeps a
            tensor between blocks that cannot cross a border.
    """
    flow = _first_flow(_bare(skeleton), inputs)
    firsts = [plan.calls[plan.span(stage).start] for stage in range(1, plan.stages)]
    of_stage = _from_starts(flow, [(call.path, call.nth) for call in firsts], inputs)
    found = _laid_out(flow, plan.stages, of_stage)
    for name, stage in _used(flow, of_stage):
        if stage not in plan.holders.get(name, ()):
            held = ", ".join(map(str, plan.holders.get(name, ()))) or "no stage"
            raise UnsupportedError(
                f"this call of {flow.model} ({', '.join(inputs)}) needs {name} on stage {stage} of {plan.stages}, which {held} holds. "
                "Omit the argument that leads to this call, or remove pipeline.stages"
            )
    return replace(found, holders=plan.holders)


def _from_starts(flow: Flow, starts: Sequence[tuple[str, int]], inputs: Mapping[str, Any]) -> list[int]:
    """Return the stage of each call, where the calls ``starts`` begin the stages after the first."""
    places = {(call.path, call.nth): place for place, call in enumerate(flow.calls)}
    found, stages = [places.get(start, -1) for start in starts], len(starts) + 1
    what = f"this call of {flow.model} ({', '.join(inputs)})" if inputs else flow.model
    if found != sorted(set(found)) or any(place <= 0 for place in found):
        missing = next((path for (path, _), place in zip(starts, found, strict=True) if place <= 0), "them in this order")
        raise UnsupportedError(
            f"{what} cannot run on {stages} stages: the stages begin with {', '.join(path for path, _ in starts)}, and the model does not "
            f"call {missing} here"
        )
    of_stage = [sum(start <= place for start in found) for place in range(len(flow.calls))]
    for constraint in _constraints(flow):
        if of_stage[constraint.first] != of_stage[constraint.last]:
            raise UnsupportedError(f"{what} cannot run on {stages} stages: {constraint.reason}")
    return of_stage


def _bare(copy: nn.Module) -> nn.Module:
    for module in copy.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    return copy


def _first_flow(copy: nn.Module, inputs: Mapping[str, Any] | None) -> Flow:
    """Return the flow of the first call that runs.

    A library may have replaced ``forward`` by a function that calls the former one, which a copy of the model does not have: TRL's does
    so where its own loss is not asked for. So the forwards of the classes are tried too.
    """
    error: Exception | None = None
    for call in _calls(copy, inputs):
        if "use_cache" in argument_names(copy):
            call = {"use_cache": False, **call}
        for put in ({module: module.__dict__["forward"] for module in copy.modules() if "forward" in module.__dict__}, {}):
            try:
                with _forwards(copy, put):
                    flow = trace_flow(copy, call)
            except Exception as raised:  # the model's own errors, of any kind
                error = error or raised
                continue
            if any(item.block for item in flow.calls):
                return flow
            error = error or ConfigError("it calls none of its repeated blocks")
    raise ConfigError(
        f"{type(copy).__name__} does not run on tensors without values ({type(error).__name__}: {error}), so tensors between its blocks "
        f"are unknown and it cannot be divided into stages. {_remedy(copy, inputs)}"
    ) from error


def _remedy(copy: nn.Module, inputs: Mapping[str, Any] | None) -> str:
    """Return advice for the message: pass a call, or give arguments without a known value a default."""
    needed = [name for name in required_arguments(copy) if inputs is None and name not in example_inputs(copy)]
    if not needed:
        return (
            f"hf_zero calls it with {', '.join(example_inputs(copy) if inputs is None else inputs)} of two samples. Give forward a branch "
            "that runs for such a call, write the layers as a PipelineModule, or leave pipeline.stages out"
        )
    defaults = ", ".join(f"{name}=None" for name in needed)
    return (
        f"{type(copy).__name__}.forward requires {', '.join(needed)}, and hf_zero does not know which values to pass. "
        f"Give the parameter a default ({defaults}) with which forward returns its logits without a loss, as "
        "transformers' models do"
    )


@contextmanager
def _forwards(copy: nn.Module, put: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Give modules in ``put`` these forwards, and all other modules the forward of their class, inside the context."""
    present = {module: module.__dict__.pop("forward") for module in copy.modules() if "forward" in module.__dict__}
    for module, forward in put.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in put:
            module.__dict__.pop("forward", None)
        for module, forward in present.items():
            module.__dict__["forward"] = forward


def _calls(copy: nn.Module, inputs: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield arguments of calls to try: first with values, so that decisions are the real ones, then without, which more models accept."""
    if inputs is None:
        for values in (True, False):
            for length in _LENGTHS:
                yield example_inputs(copy, length, values)
        return
    yield inputs
    if any(tensor.device.type != "meta" for _, tensor in tensors_in(inputs)):
        yield tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), dict(inputs))


@dataclass(frozen=True)
class _Constraint:
    """A range of calls, ``first`` to ``last``, that one stage must run, and the reason."""

    first: int
    last: int
    reason: str


def _constraints(flow: Flow) -> Iterator[_Constraint]:
    drawn: dict[Drawn, list[int]] = {}
    for reader, sources in flow.readers():
        for source in sources:
            if isinstance(source, Kept) and source.call != reader:
                yield _Constraint(source.call, reader, _kept(flow, source, reader, sources))
            elif isinstance(source, Drawn):
                drawn.setdefault(source, []).append(reader)
    for first, last in flow.hidden:
        inside = range(first, last + 1)
        readers = [reader for reader, needs in flow.readers() if any(isinstance(one, Crossing) and one.call in inside for one in needs)]
        yield _Constraint(
            first,
            max([last, *readers]),
            f"{flow.calls[first]} is called inside an autograd function of the model, through which no gradient reaches another stage",
        )
    for source, readers in drawn.items():
        yield _Constraint(
            min(readers),
            max(readers),
            f"{source.place} draws random numbers ({source.how}) that both {flow.calls[min(readers)]} and "
            f"{flow.calls[max(readers)]} need, and every stage would draw its own",
        )


def _kept(flow: Flow, source: Kept, reader: int, sources: object) -> str:
    other = "what the model returns" if sources is flow.result else str(flow.calls[reader])
    return f"{flow.calls[source.call]} keeps a tensor (made by {source.how}) that it does not return, and {other} reads it"


def _atoms(flow: Flow, stages: int) -> list[range]:
    """Return ranges of calls that no border may divide, each with one block or more; at least ``stages`` ranges.

    Raises:
        ConfigError: The model has fewer calls of blocks than ``stages``.
        UnsupportedError: Constraints leave fewer ranges than ``stages``.
    """
    blocks = _block_calls(flow)
    if stages > len(blocks):
        kinds = ", ".join(f"{count} of {kind}" for kind, count in Counter(flow.calls[place].kind for place in blocks).items())
        raise ConfigError(
            f"a pipeline of {stages} stages does not fit {flow.model}: it has {len(blocks)} calls of blocks ({kinds}), and every stage "
            f"needs one. At most {len(blocks)} stages fit"
        )
    constraints = list(_constraints(flow))
    cuts = [place for place in blocks[1:] if not any(one.first < place <= one.last for one in constraints)]
    if stages > len(cuts) + 1:
        widest = sorted(constraints, key=lambda one: one.first - one.last)
        reasons = "; ".join(dict.fromkeys(one.reason for one in widest[:2]))
        fits = f"at most {len(cuts) + 1} stages fit" if cuts else "it cannot be divided"
        raise UnsupportedError(f"a pipeline of {stages} stages does not fit {flow.model}: {fits}, because {reasons}")
    return [range(start, stop) for start, stop in zip([0, *cuts], [*cuts, len(flow.calls)], strict=True)]


def _block_calls(flow: Flow) -> list[int]:
    """Return the positions of the calls of blocks; only of classes that are called more than once, if there are any."""
    often = Counter(call.kind for call in flow.calls if call.block)
    repeated = {kind for kind, count in often.items() if count > 1} or set(often)
    return [place for place, call in enumerate(flow.calls) if call.block and call.kind in repeated]


def _weights(flow: Flow, method: str) -> list[int]:
    """Return the weight of each call."""
    kind, _, pattern = method.partition(":")
    if method == "uniform":
        blocks = set(_block_calls(flow))
        return [int(place in blocks) for place in range(len(flow.calls))]
    if method == "parameters":
        return [sum(flow.parameters[name] for name in call.parameters) for call in flow.calls]
    if method == "operations":
        return [call.operations for call in flow.calls]
    if kind.lower() != "type" or not pattern:
        raise ConfigError(f"partition_method is {method!r}; allowed are {', '.join(METHODS)}")
    try:
        weights = [int(re.search(pattern, call.kind, re.IGNORECASE) is not None) for call in flow.calls]
    except re.error as error:
        raise ConfigError(f"partition_method is {method!r}, and {pattern!r} is no regular expression: {error}") from None
    if not any(weights):
        kinds = ", ".join(dict.fromkeys(call.kind for call in flow.calls))
        raise ConfigError(f"partition_method is {method!r}, and no class that {flow.model} calls matches: {kinds}")
    return weights


def _used(flow: Flow, of_stage: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield pairs of a parameter's name and a stage that reads it."""
    for place, sources in flow.readers():
        stage = of_stage[place]
        yield from ((source.parameter, stage) for source in sources if isinstance(source, Read))
        yield from ((name, stage) for name in flow.calls[place].parameters)


def _laid_out(flow: Flow, stages: int, of_stage: Sequence[int]) -> PipelinePlan:
    """Return the plan in which stage ``of_stage[i]`` runs call ``i``."""
    wanted: dict[Crossing, int] = {}  # crossing -> the last stage that needs it
    for place, sources in flow.readers():
        for source in sources:
            if isinstance(source, Crossing):
                wanted[source] = max(wanted.get(source, 0), of_stage[place])
    order = sorted(wanted, key=lambda crossing: (crossing.call, crossing.leaf))
    borders = tuple(
        tuple(crossing for crossing in order if of_stage[crossing.call] <= border < wanted[crossing]) for border in range(stages - 1)
    )
    calls = tuple(ItemCall(call.path, call.nth, stage) for call, stage in zip(flow.calls, of_stage, strict=True))
    changed = tuple(sorted(flow.changed, key=lambda crossing: (crossing.call, crossing.leaf)))
    return PipelinePlan(stages, calls, borders, _holders(flow, of_stage), changed)


def _holders(flow: Flow, of_stage: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter; a parameter that no call reads stays with the one before it in the model."""
    used: dict[str, set[int]] = {name: set() for name in flow.parameters}
    for name, stage in _used(flow, of_stage):
        used[name].add(stage)
    beside, holders = next((min(stages) for stages in used.values() if stages), 0), {}
    for name, stages in used.items():
        holders[name] = tuple(sorted(stages)) or (beside,)
        beside = holders[name][-1]
    return holders
