"""Read given plans: rules of the configuration, the edited table of a saved plan, or the model's own ``tp_plan``.

[Note: the model's own plan] Such plans map patterns to styles ("model.layers.*.mlp.down_proj": "rowwise"). Many name layers that cannot be
split in that style, or omit a norm whose gradient has to be summed; following them would give silently wrong results. So a line of such a
plan only chooses between exact ways to split. The data flow decides which layers are split together, and the table shows where the model's
plan differs.

A model that cannot be traced is split only at linear layers that the user names, each by itself between whole tensors: without a trace
nothing is known about the tensors between layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.observe import warn_once
from hf_zero.tensor_parallel.infer import add_local_split
from hf_zero.tensor_parallel.local_split import LocalSplit
from hf_zero.tensor_parallel.plan import COLUMN, GATHERED, ROW, SCATTERED, VOCABULARY, WHOLE, ModulePlan, TpPlan, starred
from hf_zero.tensor_parallel.solve import is_linear

SOURCE = "tp_plan"
_BY_STYLE = {COLUMN: GATHERED, ROW: SCATTERED}


def own_styles(model: nn.Module) -> dict[str, str]:
    """Return the styles of the model's own plan, by path with stars for numbers; empty where it has no plan."""
    for name in ("tp_plan", "_tp_plan"):
        found = getattr(model, name, None)
        if isinstance(found, Mapping) and found:
            return {str(pattern): str(style) for pattern, style in found.items()}
    return {}


def named_layers(model: nn.Module) -> dict[str, str]:
    """Return the linear layers that the model's plan, or its configuration's, names, with the split; patterns match like file
    names.
    """
    styles = own_styles(model) or getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    linear = [path for path, module in model.named_modules() if is_linear(type(module))]
    found = {path: next((family_of(style) for pattern, style in styles.items() if fnmatchcase(path, pattern)), "") for path in linear}
    return {path: how for path, how in found.items() if how}


def family_of(style: str) -> str:
    """Return the split that a style means for a linear or embedding layer; empty for styles of other modules."""
    if style.startswith("embedding"):
        return VOCABULARY if "rowwise" in style else ""
    return COLUMN if "colwise" in style else ROW if "rowwise" in style else ""


def preferences(plan: TpPlan, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the layers that ``plan`` splits by themselves, but differently from the model's own plan, with the split of the model's
    plan.
    """
    found = {}
    for path, entry in plan.modules.items():
        wanted = _BY_STYLE.get(family_of(styles.get(starred(path), "")))
        if wanted is not None and entry.split in _BY_STYLE.values() and entry.split != wanted:
            found[path] = wanted
    return found


def note_source(plan: TpPlan, styles: Mapping[str, str]) -> None:
    """Mark the rows of ``plan``'s table that agree with the model's own plan, and note that plan's style in rows that differ."""
    for path, entry in plan.modules.items():
        style = styles.get(starred(path))
        if style is None or entry.source != "inferred":
            continue
        if _agree(entry, style):
            entry.source = SOURCE
        elif family_of(style):
            entry.reason += f"; {SOURCE} says {style}"
    if any(entry.source == SOURCE for entry in plan.modules.values()) and plan.source == "inferred":
        plan.source = SOURCE


def _agree(entry: ModulePlan, style: str) -> bool:
    gathered = "gather" in style or style.endswith("_rep")
    return entry.split == {
        COLUMN: GATHERED if gathered else COLUMN,
        ROW: SCATTERED if "split_input" in style else ROW,
        VOCABULARY: VOCABULARY,
    }.get(family_of(style))


_FAMILY = {COLUMN: COLUMN, GATHERED: COLUMN, ROW: ROW, SCATTERED: ROW, VOCABULARY: VOCABULARY}
HEADS = ("lm_head", "embed_out")  # usual names of the layer that makes logits
_LOCAL = {COLUMN: GATHERED, ROW: SCATTERED, VOCABULARY: VOCABULARY}


@dataclass
class Overrides:
    """Splits that the user has requested, by path of linear layers.

    Attributes:
        whole: Layers that stay whole.
        families: Layers to split over their outputs (``COLUMN``) or inputs (``ROW``), or whose outputs are not gathered before the loss
            (``VOCABULARY``).
        source: Origin of the overrides, for the table.
    """

    whole: set[str] = field(default_factory=set)
    families: dict[str, str] = field(default_factory=dict)
    source: str = "inferred"

    def keeping(self, paths: Collection[str]) -> Overrides:
        """Return these overrides with the modules at ``paths`` kept whole, against the user's wish, because ranks hold different experts
        there.
        """
        return replace(self, whole={*self.whole, *paths}, families={path: how for path, how in self.families.items() if path not in paths})

    def unmet(self, plan: TpPlan) -> dict[str, str]:
        """Return the layers that ``plan`` does not split as the user asks, with the split by itself that would."""
        found = {}
        for path, family in self.families.items():
            split = plan.modules[path].split if path in plan.modules else WHOLE
            if _FAMILY.get(split) != family:
                found[path] = _LOCAL[family]
        return found


def overrides_of(section: Mapping[str, Any], base: TpPlan | Mapping[str, str] | None, module: nn.Module) -> Overrides:
    """Return the overrides from an edited plan, from patterns with splits, or from the configuration's ``tensor_parallel`` section."""
    linear = [path for path, child in module.named_modules() if is_linear(type(child))]
    if isinstance(base, Mapping):
        return _from_patterns(base, linear)
    if base is not None and base.edited:
        return _from_plan(base, linear)
    rules = section.get("partition_config")
    overrides = Overrides()
    if isinstance(rules, Mapping) and rules.get("layer_specs"):
        overrides = _from_rules(rules, linear, getattr(getattr(module, "config", None), "model_type", None))
    if section.get("vocab_parallel_lm_head"):
        _ask_for_parts_of_logits(overrides, linear, (rules or {}).get("lm_head_patterns") or HEADS)
    return overrides


def _ask_for_parts_of_logits(overrides: Overrides, linear: list[str], names: Iterable[str]) -> None:
    heads = [path for path in linear if path.rpartition(".")[2] in names]
    if not heads:
        raise ConfigError(
            f"tensor_parallel.vocab_parallel_lm_head is true, and no linear layer is named {' or '.join(names)}; name the head in "
            'tensor_parallel.partition_config.layer_specs with "partition_type": "vocabulary"'
        )
    overrides.whole.difference_update(heads)
    overrides.families.update(dict.fromkeys(heads, VOCABULARY))
    if overrides.source == "inferred":
        overrides.source = "vocab_parallel_lm_head"


def _from_plan(base: TpPlan, linear: list[str]) -> Overrides:
    overrides = Overrides(source="edited plan")
    for path in linear:
        if path not in base.modules:
            raise ConfigError(f"the plan has no row for the linear layer {path}; add one, or make the plan anew")
        split = base.modules[path].split
        if split == WHOLE:
            overrides.whole.add(path)
        elif split in _FAMILY:
            overrides.families[path] = _FAMILY[split]
    return overrides


def _from_patterns(patterns: Mapping[str, str], linear: list[str]) -> Overrides:
    overrides = Overrides(source="patterns")
    for pattern, split in patterns.items():
        kind = WHOLE if split in (WHOLE, "replicated") else split if split == VOCABULARY else _FAMILY.get(split) or family_of(split)
        matching = [path for path in linear if fnmatchcase(path, pattern) or starred(path) == pattern]
        if not kind:
            raise ConfigError(f"plan: {pattern!r} is {split!r}; 'column', 'row', 'vocabulary' and 'whole' are allowed")
        if not matching:
            raise ConfigError(f"plan: {pattern!r} matches no linear layer of the model, such as {', '.join(linear[:3])}")
        for path in matching:
            if kind == WHOLE:
                overrides.whole.add(path)
            else:
                overrides.families[path] = kind
    return overrides


def _from_rules(rules: Mapping[str, Any], linear: list[str], model_type: str | None) -> Overrides:
    overrides = Overrides(source="partition_config")
    key = "tensor_parallel.partition_config.layer_specs"
    parsed = [_rule(f"{key}[{position}]", spec) for position, spec in enumerate(rules["layer_specs"])]
    meant = [(matches, kind) for matches, kind, types in parsed if not types or str(model_type).lower() in types]
    for position, (matches, kind, types) in enumerate(parsed):
        if kind != "skip" and not any(map(matches, linear)) and (not types or str(model_type).lower() in types):
            warn_once(f"{key}[{position}]: its patterns match no linear layer of the model, such as {', '.join(linear[:3])}")
    for path in linear:
        found = next((kind for matches, kind in meant if matches(path)), None)
        if found == "skip" or (found is None and rules.get("use_default_specs") is False):
            overrides.whole.add(path)
        elif found is not None:
            overrides.families[path] = found
        elif rules.get("strict_mode"):
            raise ConfigError(f"{key}: no rule matches the linear layer {path} and tensor_parallel.partition_config.strict_mode is true")
    return overrides


def _rule(where: str, spec: Mapping[str, Any]) -> tuple[Callable[[str], bool], str, list[str]]:
    given = spec.get("partition_type", COLUMN)
    kind = str(given).lower()
    if kind not in (COLUMN, ROW, VOCABULARY, "skip"):
        raise ConfigError(f"{where}.partition_type is {given!r}; 'column', 'row', 'vocabulary' and 'skip' are allowed")
    try:
        patterns = [re.compile(pattern) for pattern in spec.get("patterns") or []]
    except re.error as error:
        raise ConfigError(f"{where}.patterns: {error.pattern!r} is no regular expression: {error}") from None
    types = [str(name).lower() for name in spec.get("model_types") or []]
    return (lambda path: any(pattern.search(f"{path}.weight") or pattern.search(path) for pattern in patterns)), kind, types


_HOW = {COLUMN: GATHERED, ROW: SCATTERED, VOCABULARY: VOCABULARY}


def plan_named_layers(model: nn.Module, ranks: int, overrides: Overrides, untraceable: str) -> TpPlan:
    """Plan to split the layers that ``overrides`` names, each by itself, over ``ranks``.

    Args:
        model: Any model; only shapes are read.
        ranks: Size of a tensor-parallel group.
        overrides: The layers, with the kind of split.
        untraceable: Why the model could not be traced, for the plan's notes.

    Raises:
        ConfigError: A layer does not divide by ``ranks``, shares its weight with another module, or is no plain linear layer.
    """
    plan = TpPlan(ranks, overrides.source, notes=[f"split layer by layer: {untraceable}"])
    modules = dict(model.named_modules())
    names = {id(param): name for name, param in model.named_parameters()}
    owners: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(param), []).append(name.rpartition(".")[0])
    for path, module in modules.items():
        if not is_linear(type(module)):
            continue
        family = overrides.families.get(path)
        if family is None:
            reason = "kept whole by the plan" if path in overrides.whole else "not named, and the model cannot be traced"
            plan.modules[path] = ModulePlan(WHOLE, reason, overrides.source if path in overrides.whole else "inferred")
            continue
        _require_plain(path, module, owners[id(module.weight)])
        outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)  # type: ignore[arg-type]
        size = inputs if family == ROW else outputs
        if size % ranks:
            usable = [number for number in range(2, 65) if size % number == 0]
            side = "inputs" if family == ROW else "outputs"
            raise ConfigError(
                f"{path} cannot be split by {family} over {ranks} ranks: it has {size} {side}; usable numbers of ranks are {usable}"
            )
        layer = LocalSplit(path, _HOW[family], int(size))
        add_local_split(plan, module, layer, names, ranks)
        plan.modules[path] = ModulePlan(layer.how, "named, and the model cannot be traced", overrides.source)
    return plan


def _require_plain(path: str, module: nn.Module, owners: list[str]) -> None:
    if len(owners) > 1:
        others = ", ".join(owner for owner in owners if owner != path)
        raise ConfigError(f"{path} cannot be split by its name: it shares its weight with {others}; leave it whole (partition_type skip)")
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        raise ConfigError(
            f"{path} cannot be split by its name: {type(module).__name__} computes more than a linear layer; leave it whole "
            "(partition_type skip)"
        )
