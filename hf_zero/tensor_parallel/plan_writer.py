"""Write the findings about a model as a plan in plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from hf_zero.errors import StateError
from hf_zero.tensor_parallel.graph import Value
from hf_zero.tensor_parallel.infer import Findings
from hf_zero.tensor_parallel.local_split import LocalSplit
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
from hf_zero.tensor_parallel.solve import COPY, GATHER, GATHER_BOTH, LOGITS, NORM, REDUCE, SLICE, SPLIT, is_linear
from hf_zero.tensor_parallel.symbolic_dims import SymbolicDim, indices, leaves


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
            raise StateError(f"tensor parallelism: {value.name} was found to be split, and none of its dimensions is")
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
