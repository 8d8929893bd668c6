"""Find out how a model can be split: trace, solve, run dry, until all three agree; and write the result as a plan in plain data.

[Note: how a plan is found]

1. ``trace``: the model runs once on the meta device; each operation records how dimensions of its tensors relate ([Note: symbolic dims]).
2. ``solve``: dims that no operation needs complete are split. Read forward, the trace shows which tensors are then split, whole or partial
   ([Note: states]); read backward, it shows where gradients must be summed. A choice without a consistent reading is dropped, with the
   reason.
3. ``dry_run``: one rank's part runs without values; operations and shapes must agree. Integers of the model's code that hold the size of
   a split dim (``tracked_ints``) are set to the size of the rank's part.
4. Large linear layers that no split dim passes are split on their own, with one more collective each; so are embedding and head.
5. ``apply``: parameters are cut in place, and collectives are hooks on modules, which keep their classes and names.

A model whose code reads values runs once more with tokens: results that depend on no parameter are then computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import nn

from hf_zero.errors import StateError
from hf_zero.tensor_parallel.dry_run import DryRun, dry_run
from hf_zero.tensor_parallel.graph import PARAMETER, Graph, Op, Value
from hf_zero.tensor_parallel.local_split import LocalSplit, split_locally
from hf_zero.tensor_parallel.plan import (
    COLUMN,
    GATHERED,
    INNER,
    ROW,
    SCATTERED,
    VOCABULARY,
    WHOLE,
    Boundary,
    ModulePlan,
    Ranges,
    SplitParameter,
    TpPlan,
    ranges_of,
)
from hf_zero.tensor_parallel.skeleton import skeleton
from hf_zero.tensor_parallel.solve import COPY, GATHER, GATHER_BOTH, LOGITS, NORM, REDUCE, SLICE, SPLIT, Solution, is_linear, solve
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, block, indices, leaves
from hf_zero.tensor_parallel.trace import Inputs, trace

_MOST_ROUNDS = 12


@dataclass
class Findings:
    """All findings about how a model can be split.

    Attributes:
        graph: The trace, or None where the model could not be traced.
        solution: Splits along the data flow.
        attributes: Integer attributes to change, by module path and name.
        local_splits: Layers split by themselves, by path.
        reasons: Why linear layers stay whole, by path.
    """

    graph: Graph
    solution: Solution
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    local_splits: dict[str, LocalSplit] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def infer(
    model: nn.Module,
    inputs: Inputs,
    ranks: int,
    keep_whole: Set[str] = frozenset(),
    forced: Mapping[str, str] | None = None,
    repeats: bool = False,
) -> Findings:
    """Find how ``model`` can be split over ``ranks``.

    Args:
        model: The model; only its shapes and code are used.
        inputs: Arguments of a call that runs all of the model, on the device "meta" or on the host.
        ranks: Number of ranks.
        keep_whole: Linear layers that the user wants whole.
        forced: Linear layers to split by themselves, with the kind of split.
        repeats: See ``solve``.

    Raises:
        Exception: The model's own error when it runs on tensors without values.
    """
    copy = skeleton(model)
    graph = trace(copy, inputs)
    norms = _blocking_norms(graph, copy)
    if norms:
        graph = trace(copy, inputs, norms)
    forced = dict(forced or {})
    for name, value in graph.parameters.items():
        layer = name.rpartition(".")[0]
        if layer in keep_whole or layer in forced:
            for dim in value.dims:
                block(dim, "split by itself as the plan says" if layer in forced else "kept whole by the plan")
    for value in unread(graph):
        for dim in value.dims:
            block(dim, "not used in the traced forward")
    for op in graph.ops():
        if op.name in _PRODUCTS and any(0 in value.shape for value in op.outputs):
            # Values choose the rows, and made-up values chose none, so the users of the product are unknown.
            for dim in (dim for value in op.inputs for dim in value.dims):
                block(dim, "multiplies rows that values choose")
    solution, outcome = solve(graph, ranks, repeats), DryRun()
    for attempt in range(_MOST_ROUNDS):
        outcome = dry_run(copy, inputs, graph, solution, ranks)
        if not outcome.failures:
            break
        for dims, reason in outcome.failures:
            for dim in dims if attempt < _MOST_ROUNDS - 2 else solution.split:
                block(dim, reason)
        solution = solve(graph, ranks, repeats)
    local_splits, reasons = split_locally(graph, solution, copy, ranks, keep_whole, forced)
    return Findings(graph, solution, outcome.attributes, local_splits, reasons)


def unread(graph: Graph) -> list[Value]:
    """Return the parameters that no operation reads."""
    read = {value for op in graph.ops() for value in op.inputs}
    return [value for value in graph.parameters.values() if value not in read]


def _blocking_norms(graph: Graph, model: nn.Module) -> frozenset[str]:
    """Return the norms between several linear layers of one module that keep a dimension of one of them whole, such as query and key norms
    over all heads.
    """
    modules = dict(model.named_modules())
    makers = {value: op for op in graph.ops() for value in op.outputs}
    found = set()
    for call in graph.calls:
        parent = modules.get(call.path.rpartition(".")[0])
        module = modules[call.path]
        own = [name for name, _ in module.named_parameters()]
        if parent is None or not own or any(True for _ in module.children()) or is_linear(type(module)):
            continue
        linears = [child for child in parent.children() if is_linear(type(child))]
        sources = [value for value in call.inputs.values() if value.floating]
        outputs = list(call.outputs.values())
        if len(linears) < 2 or len(sources) != 1 or len(outputs) != 1 or sources[0].shape != outputs[0].shape:
            continue
        if any(param.dim() != 1 for param in module.parameters()):
            continue
        last = sources[0].dims[-1]
        if last.size == 1 or not any(leaf.blocked for leaf in leaves(last)):
            continue
        # Only between layers of one module: a norm of the residual stream is left alone.
        if _made_inside(makers, sources[0], call.path.rpartition(".")[0]):
            found.add(call.path)
    return frozenset(found)


def _made_inside(makers: Mapping[Value, Op], value: Value, home: str) -> bool:
    """Return whether ``value`` is computed element-wise from products of module ``home`` and its layers alone."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        op = makers.get(value)
        if value in seen or not value.needs_grad or value.origin == PARAMETER:
            continue
        seen.add(value)
        if op is None:
            return False
        if op.name in _PRODUCTS:
            if home not in (op.place, op.place.rpartition(".")[0]):
                return False
            continue
        if op.name in _WHOLE_TENSOR:
            return False
        waiting.extend(op.inputs)
    return True


_PRODUCTS = ("linear", "addmm", "mm", "bmm", "baddbmm", "scaled_dot_product_attention", "convolution")
_WHOLE_TENSOR = ("embedding", "native_layer_norm", "mean", "sum", "norm", "_fused_rms_norm")


def write_plan(findings: Findings, model: nn.Module, ranks: int, source: str) -> TpPlan:
    """Return the plan for ``model`` that follows from ``findings``."""
    writer = _Writer(findings, model, ranks)
    plan = TpPlan(ranks, source)
    writer.together(plan)
    writer.split_locally(plan)
    plan.summed = [name for name in plan.summed if name not in plan.parameters]
    writer.rows_of_table(plan)
    return plan


def add_local_split(plan: TpPlan, module: nn.Module, layer: LocalSplit, names: Mapping[int, str], ranks: int) -> None:
    """Add ``module``, which ``layer`` splits by itself, to ``plan``; ``names`` maps the ids of parameters to their names."""
    conv1d = type(module).__name__ == "Conv1D"
    weight = module.weight
    dim = int((layer.how == SCATTERED) != conv1d)
    width = layer.size // ranks
    ranges: Ranges = [[(rank * width, (rank + 1) * width)] for rank in range(ranks)]
    plan.parameters[names[id(weight)]] = SplitParameter(list(weight.shape), dim, ranges)  # type: ignore[arg-type]
    if conv1d and dim == 1:
        plan.attributes.setdefault(layer.path, {})["nf"] = width  # Conv1D reads the width of its result from this attribute
    bias = getattr(module, "bias", None)
    head = layer.how == VOCABULARY and is_linear(type(module))
    if bias is not None and (head or layer.how == GATHERED):
        plan.parameters[names[id(bias)]] = SplitParameter([layer.size], 0, ranges)
    boundaries = plan.borders.setdefault(layer.path, [])
    if layer.how == GATHERED:
        if not layer.partial:
            boundaries.append(Boundary("in", "", COPY))
        boundaries.append(Boundary("out", "", GATHER_BOTH if layer.partial else GATHER, -1, ranges, layer.size))
    elif head:
        boundaries.append(Boundary("in", "", COPY))
        boundaries.append(Boundary("out", "", LOGITS, -1, ranges, layer.size))
    elif layer.how == SCATTERED:
        boundaries.append(Boundary("in", "", SLICE, -1, ranges, layer.size))
        boundaries.append(Boundary("out", "", REDUCE))
        plan.rows.append(layer.path)
    else:
        boundaries.append(Boundary("in", layer.key, "vocabulary both" if layer.partial else "vocabulary", 0, ranges, layer.size))


class _Writer:
    def __init__(self, findings: Findings, model: nn.Module, ranks: int) -> None:
        self.findings = findings
        self.solution = findings.solution
        self.modules = dict(model.named_modules())
        self.ranks = ranks
        self.names = {id(param): name for name, param in model.named_parameters()}

    def divide(self, dims: Sequence[SymbolicDim]) -> tuple[int, Ranges] | None:
        """Return the position of the dimension among ``dims`` that is split, and each rank's ranges of it; None if none is split."""
        for axis, dim in enumerate(dims):
            if any(leaf in self.solution.parts for leaf in leaves(dim)):
                return axis, [ranges_of(indices(dim, self.solution.shares(rank))) for rank in range(self.ranks)]
        return None

    def together(self, plan: TpPlan) -> None:
        """Write the splits along the model's data flow."""
        graph, solution = self.findings.graph, self.solution
        for name, value in graph.parameters.items():
            if solution.states.get(value) == SPLIT:
                plan.parameters[name] = self._parameter(value)
        for name in sorted(solution.sliced_buffers):
            plan.buffers[name] = self._parameter(graph.buffers[name])
        plan.summed = sorted(solution.summed)
        plan.rows = sorted(solution.rows)
        plan.attributes = {path: dict(found) for path, found in sorted(self.findings.attributes.items())}
        for path, found in solution.conversions.items():
            for item in sorted(found, key=lambda item: (item.side, item.key, item.kind)):
                boundary = Boundary(item.side, item.key, item.kind)
                if item.kind in (SLICE, NORM):
                    divided = self.divide(item.dims)
                    if divided is None:
                        continue
                    boundary.dim, boundary.ranges = divided[0] - len(item.dims), divided[1]
                    boundary.full = item.dims[divided[0]].size
                plan.borders.setdefault(path, []).append(boundary)
        plan.random = sorted(path for path, kinds in solution.random_calls.items() if kinds == {True})
        for path, kinds in solution.random_calls.items():
            if len(kinds) == 2:
                plan.notes.append(f"{path}: draws random numbers for split and for whole tensors; the ranks draw the same for both")

    def _parameter(self, value: Value) -> SplitParameter:
        divided = self.divide(value.dims)
        if divided is None:
            raise StateError(f"tensor parallelism: {value.name} was found to be split, but none of its dimensions is split")
        return SplitParameter(list(value.shape), *divided)

    def split_locally(self, plan: TpPlan) -> None:
        """Write the layers that are split by themselves."""
        for path, layer in self.findings.local_splits.items():
            add_local_split(plan, self.modules[path], layer, self.names, self.ranks)

    def rows_of_table(self, plan: TpPlan) -> None:
        """Write the row of each linear, embedding or otherwise divided module: its split and the reason."""
        owners: dict[str, str] = {}
        for path, module in self.modules.items():
            for name, param in module.named_parameters(recurse=False):
                full = self.names[id(param)]
                if full in plan.parameters or (name == "weight" and is_linear(type(module))):
                    owners.setdefault(path, full if full in plan.parameters else "")
        for path, name in owners.items():
            plan.modules[path] = self._row(plan, path, name)

    def _row(self, plan: TpPlan, path: str, name: str) -> ModulePlan:
        if path in self.findings.local_splits:
            layer = self.findings.local_splits[path]
            head = "the loss is computed from each rank's part of the logits"
            table = "the tokens are whole on every rank"
            by_rows = head if is_linear(type(self.modules[path])) else table
            why = by_rows if layer.how == VOCABULARY else self._why_local(path)
            return ModulePlan(layer.how, why)
        module = self.modules[path]
        if not is_linear(type(module)) or not name:
            if name:
                return ModulePlan(INNER, f"{name.rpartition('.')[2]} has a value for each part of a split dimension")
            return ModulePlan(WHOLE, self.findings.reasons.get(path, "its output is needed whole"))
        entry = plan.parameters[name]
        weight_in = 0 if type(module).__name__ == "Conv1D" else 1
        if entry.dim == weight_in:
            return ModulePlan(ROW, "sums over a split dimension")
        fused = "" if len(entry.ranges[0]) == 1 else f", {len(entry.ranges[0])} ranges each"
        return ModulePlan(COLUMN, f"its outputs are worked on part by part{fused}")

    def _why_local(self, path: str) -> str:
        module = self.modules[path]
        outputs = self.findings.graph.parameters[self.names[id(module.weight)]].dims[int(type(module).__name__ == "Conv1D")]
        reasons = list(dict.fromkeys(leaf.blocked for leaf in leaves(outputs) if leaf.blocked))
        return reasons[0] if reasons else "nothing splits with it"
