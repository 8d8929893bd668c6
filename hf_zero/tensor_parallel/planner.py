"""Make the plan for a model from three sources, in this order: the user's overrides, the model's own plan, the data flow of its code."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.infer import Findings, infer, unread, write_plan
from hf_zero.tensor_parallel.local_split import READ_ELSEWHERE
from hf_zero.tensor_parallel.overrides import SOURCE, Overrides, named_layers, note_source, own_styles, plan_named_layers, preferences
from hf_zero.tensor_parallel.plan import WHOLE, TpPlan
from hf_zero.tensor_parallel.skeleton import argument_names, example_inputs, labelled, padded, skeleton
from hf_zero.tensor_parallel.solve import is_linear
from hf_zero.tensor_parallel.symbolic_dims import local_size
from hf_zero.tensor_parallel.trace import Inputs, have_values

_USABLE = range(2, 65)  # numbers of ranks that messages may suggest
_LENGTHS = (16, 64, 512)


class UnknownFlowError(ConfigError):
    """Error raised if the model cannot be traced and no layer is named, so no plan can be made."""


def make_plan(model: nn.Module, ranks: int, inputs: Inputs | None = None, overrides: Overrides | None = None) -> TpPlan:
    """Return a plan that splits ``model`` over ``ranks``.

    Args:
        model: Any model; values and device of its parameters do not matter.
        ranks: Size of a tensor-parallel group.
        inputs: Arguments of a call that runs all of the model; None makes them up for transformers' models.
        overrides: Splits that the user requests. A layer that the model's data flow splits differently is then split by itself. In a model
            that cannot be traced, only the layers they name are split, each by itself.

    Raises:
        ConfigError: No part of the model can be split over so many ranks, or an override cannot be met.
        UnknownFlowError: The model cannot be traced and no layer is named.
    """
    overrides = overrides or Overrides()
    copy = skeleton(model).train()
    for module in copy.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    forced: dict[str, str] = {}
    try:
        plan = write_plan(_infer(copy, ranks, inputs, overrides.whole, forced), copy, ranks, overrides.source)
    except _Untraceable as error:
        named = _named(model, overrides)
        if named is not None:
            return plan_named_layers(model, ranks, named, str(error))
        raise UnknownFlowError(f"{error}. {_remedy(copy, ranks)}") from error.__cause__
    styles = own_styles(model)
    preferred = {path: how for path, how in preferences(plan, styles).items() if path not in {*overrides.whole, *overrides.families}}
    if preferred:
        other = write_plan(_infer(copy, ranks, inputs, overrides.whole, preferred), copy, ranks, overrides.source)
        if all(other.modules[path].split == how for path, how in preferred.items()):
            plan, forced = other, preferred
    # Splitting a layer by itself can change the splits of its neighbours, so check their overrides again.
    while any(path not in forced for path in overrides.unmet(plan)):
        forced.update(overrides.unmet(plan))
        plan = write_plan(_infer(copy, ranks, inputs, overrides.whole, forced), copy, ranks, overrides.source)
    _require(plan, overrides, copy, ranks)
    for path in (*overrides.whole, *overrides.families):
        if path in plan.modules:
            plan.modules[path].source = overrides.source
    note_source(plan, styles)
    _note_undivided(plan, copy, ranks)
    if ranks > 1 and not plan.parameters:
        sizes = sorted({size for param in model.parameters() if param.dim() > 1 for size in getattr(param, "ds_shape", param.shape)})
        raise ConfigError(
            f"tensor_parallel.autotp_size is {ranks}, and nothing of {type(model).__name__} divides by it: its dimensions are {sizes}"
        )
    return plan


def _named(model: nn.Module, overrides: Overrides) -> Overrides | None:
    """Return the known splits of a model that cannot be traced: the user's overrides, or else the model's own plan; None without any."""
    linear = [path for path, module in model.named_modules() if is_linear(type(module))]
    if overrides.families or (linear and overrides.whole.issuperset(linear)):
        return overrides
    own = {path: how for path, how in named_layers(model).items() if path not in overrides.whole}
    return Overrides(overrides.whole, own, SOURCE) if own else None


def _note_undivided(plan: TpPlan, model: nn.Module, ranks: int) -> None:
    """Note in the plan which linear layers do not divide by ``ranks``, and which numbers of ranks divide them."""
    whole = [path for path, entry in plan.modules.items() if entry.split == WHOLE]
    weights = {path: tuple(model.get_parameter(f"{path}.weight").shape) for path in whole if is_linear(type(model.get_submodule(path)))}
    odd = {path: shape for path, shape in weights.items() if all(size % ranks for size in shape)}
    if odd:
        usable = [number for number in _USABLE if all(any(size % number == 0 for size in shape) for shape in odd.values())]
        path, shape = next(iter(odd.items()))
        plan.notes.append(
            f"{len(odd)} linear layers do not divide by {ranks} and stay whole on every rank, such as {path} {shape}; "
            + (f"usable numbers of ranks are {usable}" if usable else "no number of ranks divides them all")
        )


def _require(plan: TpPlan, overrides: Overrides, model: nn.Module, ranks: int) -> None:
    for path in overrides.unmet(plan):
        reason, kind = plan.modules[path].reason, overrides.families[path]
        if reason.startswith(READ_ELSEWHERE):
            raise ConfigError(
                f"{path} cannot be split by {kind}: {reason}, outside of it. Remove it from {overrides.source}: it then stays "
                "whole on every rank"
            )
        weight = dict(model.named_parameters(remove_duplicate=False))[f"{path}.weight"]
        sizes = [number for number in _USABLE if all(size % number == 0 for size in weight.shape)]
        raise ConfigError(
            f"{path} cannot be split by {kind} over {ranks} ranks: its weight is {tuple(weight.shape)} "
            f"({reason}); usable numbers of ranks are {sizes}"
        )


class _Untraceable(Exception):
    """Error raised if the model does not run without values, or no call that runs it is known."""


def _remedy(model: nn.Module, ranks: int) -> str:
    linear = [path for path, module in model.named_modules() if is_linear(type(module))]
    call = f"tp_model_init(model, tp_size={ranks}, inputs={{...}}) before initialize, with the tensors that its forward takes"
    if not linear:
        return f"Make a call that runs it known: {call}"
    shown = ", ".join(linear[:3]) + (", ..." if len(linear) > 3 else "")
    return (
        f"Either make a call that runs it known: {call}; or name layers to split, each by itself ({shown}), in "
        "tensor_parallel.partition_config.layer_specs, as patterns with partition_type 'column' or 'row'; or give tp_model_init a saved "
        "plan (plan=TpPlan.load(file))"
    )


def _infer(copy: nn.Module, ranks: int, inputs: Inputs | None, kept: set[str], forced: dict[str, str]) -> Findings:
    """Return the findings from calls of the model, with a padded row where that may change the split.

    [Note: padded rows] Where no row is padded, many models pass their key/value heads to the attention unchanged. With padding they repeat
    the heads, by a number that the code reads nowhere else and that changes where several ranks hold the same heads. In that case a model
    that takes a mask is also called with a padded row.
    """
    found = _infer_unpadded(copy, ranks, inputs, kept, forced)
    if not _shares_heads(found) or not {"input_ids", "attention_mask"} <= set(argument_names(copy)):
        return found
    for tokens, length in product((True, False), _LENGTHS):
        try:
            other = infer(copy, padded(example_inputs(copy, length, values=tokens)), ranks, kept, forced, repeats=True)
        except Exception:  # the model may raise any error; then nothing is learned
            continue
        if _splits(other) != _splits(found):
            return other
        for path, values in other.attributes.items():
            found.attributes[path] = {**values, **found.attributes.get(path, {})}
        break
    return found


def _shares_heads(findings: Findings) -> bool:
    """Return whether an attention has another ratio of query heads to key heads on a rank than in the whole model."""
    for op in findings.graph.ops():
        if op.name == "scaled_dot_product_attention" and all(len(value.dims) > 3 for value in op.inputs[:2]):
            query, key = (value.dims[-3] for value in op.inputs[:2])
            parts = findings.solution.parts
            if local_size(query, parts) * key.size != local_size(key, parts) * query.size:
                return True
    return False


def _splits(findings: Findings) -> dict[str, str | None]:
    """Return the state (split, whole or partial) of each parameter, by name."""
    return {name: findings.solution.states.get(value) for name, value in findings.graph.parameters.items()}


def _infer_unpadded(copy: nn.Module, ranks: int, inputs: Inputs | None, kept: set[str], forced: dict[str, str]) -> Findings:
    """Return the findings of the first call that runs; if it leaves parameters unused (experts), compare with a call that has tokens."""
    error: Exception | None = None
    partly: Findings | None = None
    try:
        for chosen in _calls(copy, inputs):
            if partly is not None and not have_values(chosen):
                continue
            try:
                found = infer(copy, chosen, ranks, kept, forced)
            except Exception as raised:  # the model may raise any error
                error = error or raised
                continue
            if partly is not None:
                return min(partly, found, key=lambda findings: len(unread(findings.graph)))
            if not unread(found.graph) or have_values(chosen):
                return found
            partly = found
    except ConfigError as unknown:
        raise _Untraceable(str(unknown)) from None
    if partly is not None:
        return partly
    raise _Untraceable(f"{type(copy).__name__} does not run on tensors without values ({type(error).__name__}: {error})") from error


def _calls(copy: nn.Module, inputs: Inputs | None) -> Iterator[Inputs]:
    """Yield calls to try, cheapest first: some models need long rows, some need the values of tokens, some cannot build their cache."""
    if inputs is not None:
        yield {name: torch.empty_like(tensor, device="meta") for name, tensor in inputs.items()}
        if have_values(inputs):
            yield {name: tensor.cpu() for name, tensor in inputs.items()}
        return
    for length in _LENGTHS:
        yield example_inputs(copy, length)
    for module in copy.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
    for length in _LENGTHS:
        yield example_inputs(copy, length, values=True)
    for values in (False, True):  # for models that return a loss and no logits
        yield from (labelled(example_inputs(copy, length, values)) for length in _LENGTHS if "labels" in argument_names(copy))
