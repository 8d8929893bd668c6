"""Split linear and embedding layers by themselves, between whole inputs and whole outputs.

A layer whose neighbours cannot be split with it can still be split by itself. A linear layer is split over its outputs, which are then
gathered, or over its inputs, which are cut first and whose products are summed. An embedding is split over its vocabulary: each rank
looks up the rows it holds, and the results are summed. The result is always exact, at the cost of one more collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import nn

from hf_zero.tensor_parallel.graph import Graph, Op, Value
from hf_zero.tensor_parallel.plan import GATHERED, SCATTERED, VOCABULARY
from hf_zero.tensor_parallel.solve import WHOLE, Solution, is_linear

# Operations of plain linear and embedding layers. A layer that does more (counts positions, quantises) cannot be split from outside.
_PLAIN = {
    "linear", "addmm", "mm", "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "add", "embedding", "mul", "_to_copy",
    "clone", "detach",
}  # fmt: skip

READ_ELSEWHERE = "its weight is read by"

# Layers smaller than this fraction of the largest are not worth a collective of their own (routers, gates of single heads).
_WORTH = 1 / 16

# The same for layers on whose outputs every rank works with its own heads: key and value of fewer heads than ranks.
_WORTH_SHARED = 1 / 4


@dataclass(frozen=True)
class LocalSplit:
    """One layer split by itself.

    Attributes:
        path: Path of the module.
        how: Kind of split: ``GATHERED``, ``SCATTERED`` or ``VOCABULARY``.
        size: Size of the dimension that is divided.
        partial: The gradient of its output is partial, and the gradient of its input may be partial, too.
        key: For an embedding, the argument that holds the indices.
    """

    path: str
    how: str
    size: int
    partial: bool = False
    key: str = ""


def split_locally(
    graph: Graph, solution: Solution, model: nn.Module, ranks: int, keep_whole: Set[str], forced: Mapping[str, str]
) -> tuple[dict[str, LocalSplit], dict[str, str]]:
    """Return the layers to split by themselves, and the reason for each linear layer that stays whole.

    Args:
        graph: Trace of the model.
        solution: Splits that are already chosen.
        model: The traced skeleton.
        ranks: Number of ranks.
        keep_whole: Linear layers that the user wants whole.
        forced: Linear layers that the user wants split, with the kind of split.
    """
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        leaf = not any(True for _ in module.children())
        if leaf and isinstance(weight, nn.Parameter) and (is_linear(type(module)) or isinstance(module, nn.Embedding)):
            owners.setdefault(id(weight), []).append(path)
    values = {id(param): graph.parameters[name] for name, param in model.named_parameters()}
    uses = _uses(graph)
    modules = dict(model.named_modules())
    largest = max((modules[paths[0]].weight.numel() for paths in owners.values() if is_linear(type(modules[paths[0]]))), default=0)  # type: ignore[union-attr,operator]
    found: dict[str, LocalSplit] = {}
    reasons: dict[str, str] = {}
    for weight_id, paths in owners.items():
        value = values[weight_id]
        if solution.states.get(value, WHOLE) != WHOLE:
            continue
        linear = [path for path in paths if is_linear(type(modules[path]))]
        override = next((forced[path] for path in paths if path in forced), None)
        reason, layers = _judge(value, paths, modules, uses.get(value, []), solution, ranks, override, graph)
        if any(path in keep_whole for path in paths):
            reason, layers = "kept whole by the plan", []
        elif override is None and layers and layers[0].partial and value.shape[0] * value.shape[1] < largest * _WORTH_SHARED:
            reason, layers = "held by every rank: all of them work on its output with their own part", []
        elif override is None and value.shape[0] * value.shape[1] < largest * _WORTH:
            reason, layers = "too small to be worth a collective of its own", []
        for path in linear:
            if not layers:
                reasons[path] = reason
        if not linear and not _is_input_table(paths, modules, largest):
            continue
        found.update({layer.path: layer for layer in layers})
    return found, reasons


def _is_input_table(paths: list[str], modules: dict[str, nn.Module], largest: int) -> bool:
    return all(modules[path].weight.numel() >= largest for path in paths)  # type: ignore[union-attr,operator]


def _uses(graph: Graph) -> dict[Value, list[Op]]:
    found: dict[Value, list[Op]] = {}
    for op in graph.ops():
        for value in op.inputs:
            found.setdefault(value, []).append(op)
    return found


def _judge(
    value: Value,
    paths: list[str],
    modules: dict[str, nn.Module],
    uses: list[Op],
    solution: Solution,
    ranks: int,
    override: str | None,
    graph: Graph,
) -> tuple[str, list[LocalSplit]]:
    """Return the reason why the weight stays whole, or an empty text and the splits of its layers."""
    if not uses:
        return "not used in the traced forward", []
    foreign = [op for op in uses if _reads(op, value) not in ("linear", "embedding") or op.place not in paths]
    foreign += [op for op in uses if _touches_split(op, solution)]
    foreign += [op for op in _inside(graph, set(paths)) if op.name not in _PLAIN]
    if foreign:
        return f"{READ_ELSEWHERE} {foreign[0].name} in {foreign[0].place or type(modules['']).__name__}", []
    partial = any(output in solution.partial_gradients for op in uses for output in op.outputs)
    kinds = {type(modules[path]).__name__ == "Conv1D" for path in paths}
    if len(kinds) > 1:
        return "tied between layers of different layouts", []
    conv1d = kinds == {True}
    outputs, inputs = (value.shape[1], value.shape[0]) if conv1d else (value.shape[0], value.shape[1])
    if override == VOCABULARY and partial:
        return "its gradient is a partial sum", []
    if outputs % ranks == 0 and override != SCATTERED:
        tables = [path for path in paths if not is_linear(type(modules[path]))]
        how = {path: VOCABULARY if path in tables or override == VOCABULARY else GATHERED for path in paths}
        keys = {path: _index_keys(uses, path) for path in tables}
        if any(len(found) > 1 for found in keys.values()):
            return "its indices come in several arguments", []
        return "", [LocalSplit(path, how[path], outputs, partial, next(iter(keys.get(path) or [""]))) for path in paths]
    if inputs % ranks == 0 and override != GATHERED and not partial and len(paths) == 1 and is_linear(type(modules[paths[0]])):
        return "", [LocalSplit(paths[0], SCATTERED, inputs)]
    if inputs % ranks == 0 and len(paths) > 1:
        return f"{outputs} outputs do not divide by {ranks}, and a tied weight is split over outputs only", []
    return f"{outputs} outputs and {inputs} inputs do not divide by {ranks}", []


def _index_keys(uses: list[Op], path: str) -> set[str]:
    return {key for op in uses if op.place == path for key, entered in op.stack[-1].inputs.items() if entered is op.inputs[1]}


def _inside(graph: Graph, paths: Set[str]) -> list[Op]:
    return [op for op in graph.ops() if op.place in paths]


def _reads(op: Op, value: Value) -> str:
    if op.name == "embedding" and op.inputs[0] is value and op.inputs[1] in op.stack[-1].inputs.values():
        return "embedding"
    position = {"linear": 1, "addmm": 2, "mm": 1, "t": 0, "permute": 0}.get(op.name)
    return "linear" if position is not None and len(op.inputs) > position and op.inputs[position] is value else f"other {op.name}"


def _touches_split(op: Op, solution: Solution) -> bool:
    return any(solution.states.get(value, WHOLE) != WHOLE for value in (*op.inputs, *op.outputs))
