"""Split a model in place according to a plan, with hooks that run the plan's collectives at the boundaries of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.comm.topology import Topology
from hf_zero.core.schedule.torch_internals import give_number
from hf_zero.core.step.step_sum import StepSum
from hf_zero.core.units.divided import mark_partial
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, Wholes, mark_tp_shard, mark_whole_reader, tp_shard_of
from hf_zero.core.units.parts import mark_join
from hf_zero.core.units.registration import unregister
from hf_zero.core.units.unit import find_unit, full_shape
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.system.trees import argument_names, convert_arguments, convert_inside, tensors_in
from hf_zero.tensor_parallel import functions
from hf_zero.tensor_parallel.functions import ModelGroup, Part
from hf_zero.tensor_parallel.logits import VocabularyLogits
from hf_zero.tensor_parallel.plan import COLUMN, GATHERED, INNER, ROW, SCATTERED, VOCABULARY, Boundary, SplitParameter, TpPlan, starred
from hf_zero.tensor_parallel.same_data import own_random
from hf_zero.tensor_parallel.solve import COPY, GATHER, GATHER_BOTH, LOGITS, NORM, REDUCE, REDUCE_BOTH, SLICE
from hf_zero.tensor_parallel.tracked_ints import set_attribute

_Convert = Callable[[torch.Tensor], torch.Tensor]
_HOOK = -1  # number of these hooks on every module
_BY_THEMSELVES = (GATHERED, SCATTERED, VOCABULARY)  # splits of layers whose input and output are whole
_PLAN, _GROUP = "_hf_zero_tp_plan", "_hf_zero_tp_group"


class BoundaryCollectives:
    """Collectives at the inputs and outputs of one module of a split model.

    Attributes:
        path: Path of the module in the model.
    """

    def __init__(self, module: nn.Module, path: str, plan: TpPlan, group: ModelGroup) -> None:
        self.path = path
        self.group = group
        self._names = argument_names(module)
        self._inputs: dict[str, list[_Convert]] = {}
        self._outputs: dict[str, list[_Convert]] = {}
        self._delays_bias = path in plan.rows and getattr(module, "bias", None) is not None
        self._draws = path in plan.random
        self._bias: list[Any] = []
        self._random: list[Any] = []
        self._masks: list[torch.Tensor] = []
        self._own: dict[str, Part] = {}
        self._running = 0  # number of forwards of the module that are running
        for boundary in plan.borders.get(path, ()):
            self._add(boundary)
        self._only_copies = all(boundary.kind == COPY for boundary in plan.borders.get(path, ()) if boundary.side == "in")
        give_number(module.register_forward_pre_hook(self.before, with_kwargs=True), _HOOK)
        give_number(module.register_forward_hook(self.after, with_kwargs=True, always_call=True), _HOOK)

    def __str__(self) -> str:
        return self.path

    def _add(self, boundary: Boundary) -> None:
        group, label, kind = self.group, self, boundary.kind
        part = Part(boundary.dim, boundary.ranges, boundary.full) if boundary.ranges else None
        inputs = self._inputs.setdefault(boundary.key, []) if boundary.side == "in" else []
        outputs = self._outputs.setdefault(boundary.key, []) if boundary.side == "out" else []
        if kind == COPY:
            inputs.append(lambda tensor: functions.copy(group.note_input(tensor), group, label))
        elif kind in (REDUCE, REDUCE_BOTH):
            outputs.append(lambda tensor: functions.reduce(tensor, group, label, kind == REDUCE_BOTH))
        elif part is None:
            raise ValueError(f"plan: border {kind!r} of {self.path} has no ranges")
        elif kind == SLICE:
            inputs.append(lambda tensor: functions.take(group.note_input(tensor), group, part, label))
        elif kind in (GATHER, GATHER_BOTH):
            outputs.append(lambda tensor: functions.gather(tensor, group, part, label, kind == GATHER_BOTH))
        elif kind == LOGITS:
            outputs.append(lambda tensor: VocabularyLogits(tensor, group, part, self.path))
        elif kind == NORM:
            inputs.append(lambda tensor: functions.gather(tensor, group, part, label, both=True))
            self._outputs.setdefault("", []).append(lambda tensor: functions.take(tensor, group, part, label, partial=True))
        elif kind in ("vocabulary", "vocabulary both"):
            inputs.append(lambda ids: self._local_ids(ids, part))
            self._outputs.setdefault("", []).append(lambda rows: self._sum_rows(rows, kind.endswith("both")))
        else:
            raise ValueError(f"plan: unknown border {kind!r} of {self.path}")

    def _local_ids(self, ids: torch.Tensor, part: Part) -> torch.Tensor:
        start, stop = part.ranges[self.group.rank][0]
        elsewhere = (ids < start) | (ids >= stop)
        self._masks.append(elsewhere)
        return (ids - start).masked_fill(elsewhere, 0)

    def _sum_rows(self, rows: torch.Tensor, both: bool) -> torch.Tensor:
        elsewhere = self._masks.pop()
        return functions.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.group, self, both)

    def read_whole(self, module: nn.Module, own: Mapping[str, SplitParameter]) -> None:
        """Give code that reads the parameters ``own`` (names in ``module``) outside the module's forward the whole parameters.

        [Note: whole reads] Losses that never make the logits multiply with ``lm_head.weight`` instead of calling ``lm_head``, often only
        when labels are given, which the trace does not see. All other operands of the product are whole. So the gradient of the weight is
        whole on every rank, and each rank takes its part of it.
        """
        self._own = {name: Part(entry.dim, entry.ranges, entry.shape[entry.dim]) for name, entry in own.items()}
        mark_whole_reader(module, self._whole)

    def _whole(self, name: str, part: torch.Tensor, kept: Wholes) -> torch.Tensor | None:
        if self._running or name not in self._own:
            return None
        key = (id(part), torch.is_grad_enabled())
        if key not in kept:
            kept[key] = whole = functions.gather(part, self.group, self._own[name], f"{self.path}.{name}")
            # Libraries look on the whole parameter, too, for the attributes they have set (such as DeepSpeed's ds_status).
            whole.__dict__.update({known: value for known, value in vars(part).items() if not known.startswith("_")})
        return kept[key]

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Convert arguments, remove a bias that is added after the sum, and give this rank its own random numbers."""
        self._running += 1
        if self._delays_bias:
            bias = module._parameters["bias"]
            self._bias.append(bias)
            # A linear layer runs without a bias; Conv1D's fused product needs one.
            module._parameters["bias"] = None if isinstance(module, nn.Linear) else torch.zeros_like(bias)  # type: ignore[assignment,arg-type]
        if self._draws and module.training:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self._random.append(own_random(self.group.rank, tensors[0].device if tensors else torch.device("cpu")))
        if not self._inputs:
            return None
        done: dict[tuple[int, int], torch.Tensor] = {}  # one tensor passed as query, key and value is converted once

        def once(tensor: torch.Tensor, work: list[_Convert]) -> torch.Tensor:
            key = (id(tensor), len(work)) if self._only_copies else (len(done), -1)
            if key not in done:
                done[key] = _apply(tensor, work)
            return done[key]

        return convert_arguments(args, kwargs, self._names, self._inputs, once)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Undo the changes of ``before``, and convert results."""
        self._running -= 1
        if self._random:
            self._random.pop()()
        bias = None
        if self._delays_bias:
            bias = self._bias.pop()
            module._parameters["bias"] = bias
        if output is None:
            return None
        for key, work in self._outputs.items():
            output = convert_inside(output, key, work, _apply)
        return output if bias is None else output + bias


def _apply(tensor: torch.Tensor, work: list[_Convert]) -> torch.Tensor:
    for convert in work:
        tensor = convert(tensor)
    return tensor


def plan_of(model: nn.Module) -> TpPlan | None:
    """Return the plan that ``model`` was split with; None for a whole model."""
    found = getattr(model, _PLAN, None)
    return found if isinstance(found, TpPlan) else None


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks of the default group that hold ``model`` together, this rank included; empty for a whole model."""
    group = getattr(model, _GROUP, None)
    return group.global_ranks if isinstance(group, ModelGroup) else ()


def inputs_of(model: nn.Module) -> StepSum:
    """Return the sum to which divided layers of ``model``, or of a model inside it, add; an unused one without divided layers."""
    groups = (getattr(module, _GROUP, None) for module in model.modules())
    return next((group.inputs for group in groups if isinstance(group, ModelGroup)), StepSum())


def apply_plan(model: nn.Module, plan: TpPlan, group: ModelGroup) -> nn.Module:
    """Keep this rank's part of every parameter of ``model`` and install the collectives; in place.

    Raises:
        ConfigError: The plan is for another number of ranks or another model, or the model is already split.
    """
    if plan.ranks != group.world:
        raise ConfigError(
            f"the plan is for {plan.ranks} ranks, tensor_parallel.autotp_size is {group.world}; make a plan for {group.world}"
        )
    if plan_of(model) is not None:
        raise ConfigError("the model is split already")
    params, buffers, modules = dict(model.named_parameters()), dict(model.named_buffers()), dict(model.named_modules())
    _check_fits(plan, params, modules)
    for name, entry in plan.parameters.items():
        if tp_shard_of(params[name]) is None:
            cut_parameter(params[name], entry, group.rank)
    for name, entry in plan.buffers.items():
        buffers[name].data = _part(entry).take(buffers[name].data, group.rank).clone()
    for path, changes in plan.attributes.items():
        for name, value in changes.items():
            set_attribute(modules[path], name, value)
    _set_features(plan, modules, group.rank)
    _sum_gradients(plan, params, group)
    _join_for_losses(plan, params, modules, group)
    divided = {id(params[name]): entry for name, entry in plan.parameters.items()}
    for path in dict.fromkeys((*plan.borders, *plan.rows, *plan.random)):
        boundary = BoundaryCollectives(modules[path], path, plan, group)
        # Only heads and tables. Libraries read the types of layers in lists (PEFT, in every forward), which would gather these layers.
        if path in plan.modules and plan.modules[path].split in _BY_THEMSELVES and starred(path) == path:
            own = {name: divided[id(param)] for name, param in modules[path]._parameters.items() if id(param) in divided}
            boundary.read_whole(modules[path], own)
    _refuse_attentions_of_parts(model, group.world)
    setattr(model, _PLAN, plan)
    setattr(model, _GROUP, group)
    return model


def mark_buffers(model: nn.Module, topology: Topology) -> dict[str, TpShard]:
    """Mark the buffers of ``model`` of which this rank holds a part, and return the parts by the buffers' names; local.

    They are marked whenever a caller needs it, because a forward, or ``model.to``, replaces a buffer by another tensor.

    Args:
        model: A model that may be split, or contain a split one.
        topology: The engine's axes.
    """
    found: dict[str, TpShard] = {}
    axis = topology.layers.model
    if axis is None:
        return found
    for path, module in model.named_modules():
        plan = plan_of(module)
        for name, entry in plan.buffers.items() if plan is not None else ():
            part, buffer = tp_shard(entry, axis.rank), module.get_buffer(name)
            mark_tp_shard(buffer, part)
            found[f"{path}.{name}" if path else name] = part
    return found


def _refuse_attentions_of_parts(model: nn.Module, ranks: int) -> None:
    """Make forwards of ``model`` raise an error if the result has attention probabilities of some heads only.

    Args:
        model: A model that ``ranks`` ranks have divided.
        ranks: Their number.
    """
    config: Any = getattr(model, "config", None)
    parts = {heads // ranks for heads in _numbers_of_heads(config) if heads % ranks == 0}
    if not parts:
        return

    def check(_module: nn.Module, _args: Any, kwargs: Any, output: Any) -> None:
        wanted = kwargs.get("output_attentions") or getattr(config, "output_attentions", False)
        for tensor in _attentions(output) if wanted else ():
            if tensor.dim() == 4 and (part := tensor.shape[1]) in parts:
                raise UnsupportedError(
                    f"tensor parallelism: output_attentions=True returns the probabilities of {part} of {part * ranks} heads on each "
                    f"of {ranks} ranks. Leave it out, or compute attentions with the whole model (engine.save_16bit_model writes it)"
                )

    model.register_forward_hook(check, with_kwargs=True)


def _numbers_of_heads(config: Any) -> set[int]:
    """Return the numbers of attention heads of the layers that a configuration describes; empty if it has none."""
    try:
        found = [getattr(config, "num_attention_heads", None)]
    except RuntimeError:  # of transformers: the layers differ, and each has a configuration of its own
        layers = config.per_layer_config
        found = [getattr(one, "num_attention_heads", None) for one in (layers.values() if isinstance(layers, Mapping) else layers)]
    return {heads for heads in found if isinstance(heads, int)}


def _attentions(output: Any) -> Iterator[torch.Tensor]:
    """Yield the attention probabilities in a model's result; all its tensors if it has no names."""
    named = {key: value for key, value in output.items() if "attentions" in str(key)} if isinstance(output, Mapping) else output
    yield from (tensor for _, tensor in tensors_in(named))


def _check_fits(plan: TpPlan, params: dict[str, nn.Parameter], modules: dict[str, nn.Module]) -> None:
    missing = [name for name in plan.parameters if name not in params] + [path for path in plan.borders if path not in modules]
    if missing:
        raise ConfigError(f"the plan is for another model: it names {missing[0]}, which the model does not have")
    for name, entry in plan.parameters.items():
        cut = tp_shard_of(params[name])
        shape = tuple(cut.full_shape if cut is not None else full_shape(params[name]))
        if shape != tuple(entry.shape):
            raise ConfigError(f"the plan is for another model: {name} has shape {shape}, the plan says {tuple(entry.shape)}")


def _part(entry: SplitParameter) -> Part:
    return Part(entry.dim, entry.ranges, entry.shape[entry.dim])


def cut_parameter(param: nn.Parameter, entry: SplitParameter, rank: int) -> None:
    """Replace the values of ``param`` by the part of ``rank``, and mark the part; collective for parameters of ``zero.Init``."""
    owner = find_unit(param)
    if owner is None:
        values = _part(entry).take(param.data, rank)
        # A placeholder ([Note: held stages]) has strides of 0 and stays expanded.
        param.data = values.clone(memory_format=torch.contiguous_format) if any(values.stride()) else values
    else:  # sharded by zero.Init over all ranks
        with owner[0].unsharded():
            part = _part(entry).take(param.detach(), rank).clone(memory_format=torch.contiguous_format)
        unregister(param)
        param.data = part
    mark_tp_shard(param, tp_shard(entry, rank))


def tp_shard(entry: SplitParameter, rank: int) -> TpShard:
    """Return the part of ``rank`` as the mark that the engine reads from a parameter."""
    ranges = tuple(Range(start, stop) for start, stop in entry.ranges[rank])
    counts = _part(entry).holders(rank, torch.device("cpu"))
    copies = []
    if counts is not None:
        runs, lengths = torch.unique_consecutive(counts, return_counts=True)
        stops = lengths.cumsum(0).tolist()
        copies = [(Range(stop - length, stop), count) for count, length, stop in zip(runs.tolist(), lengths.tolist(), stops, strict=True)]
    return TpShard(torch.Size(entry.shape), entry.dim, ranges, tuple(copy for copy in copies if copy[1] > 1))


def _set_features(plan: TpPlan, modules: dict[str, nn.Module], rank: int) -> None:
    """Set ``in_features``, ``out_features`` and ``padding_idx`` to the values of this rank's weight."""
    for path, entry in plan.modules.items():
        module = modules[path]
        if isinstance(module, nn.Linear) and tp_shard_of(module.weight) is not None:
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding) and entry.split == VOCABULARY and module.padding_idx is not None:
            width = module.weight.shape[0]
            padding = module.padding_idx - rank * width
            module.padding_idx = padding if 0 <= padding < width else None  # type: ignore[assignment]


def _join_for_losses(plan: TpPlan, params: dict[str, nn.Parameter], modules: dict[str, nn.Module], group: ModelGroup) -> None:
    """Let a loss read the whole of each divided parameter, and count the gradient of a copy once where gradients are summed; mark modules
    whose hooks see parts.
    """
    for name, entry in plan.parameters.items():
        mark_join(params[name], partial(functions.gather, group=group, part=_part(entry), label=f"whole {name}"), name)
    for path, row in plan.modules.items():
        if row.split in (COLUMN, ROW, INNER):
            side = "inputs" if row.split == ROW else "outputs"
            mark_partial(modules[path], f"{path} is split over {plan.ranks} ranks, so hooks on it see this rank's part of its {side}")
    for name in plan.summed:
        mark_join(params[name], partial(functions.of_first, group=group), name)


def _sum_gradients(plan: TpPlan, params: dict[str, nn.Parameter], group: ModelGroup) -> None:
    for name in plan.summed:
        if params[name].requires_grad:
            params[name].register_hook(_summing(group, name))
    for name, entry in plan.parameters.items():
        if params[name].requires_grad and (add := _summing_shared(group, name, entry)) is not None:
            params[name].register_hook(add)


def _summing(group: ModelGroup, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda grad: functions.reduce(grad, group, name)  # differentiable, [Note: derivatives of collectives]


def _summing_shared(group: ModelGroup, name: str, entry: SplitParameter) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a hook that sums the gradients of indices that several ranks hold; None where each index has one holder."""
    part = _part(entry)
    device = torch.device("cpu")
    holders = [part.holders(rank, device) for rank in range(group.world)]
    if holders[group.rank] is None:
        return None
    everyones = [mine[count > 1] for mine, count in zip(part.indices(device), holders, strict=True) if count is not None]
    union = torch.cat(everyones).unique()
    local = (holders[group.rank] > 1).nonzero().flatten()  # type: ignore[operator,union-attr]
    places = torch.searchsorted(union, everyones[group.rank])

    def add(grad: torch.Tensor) -> torch.Tensor:
        here, there = local.to(grad.device), places.to(grad.device)
        shape = list(grad.shape)
        shape[entry.dim] = union.numel()
        summands = grad.new_zeros(shape).index_copy_(entry.dim, there, grad.index_select(entry.dim, here))
        total = functions.reduce(summands, group, name)
        return grad.clone().index_copy_(entry.dim, here, total.index_select(entry.dim, there))

    return add
