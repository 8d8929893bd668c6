"""What the user wants of a plan: rules of the configuration, or the edited table of a saved plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.alone import GATHERED, SCATTERED
from hf_zero.tensor_parallel.own_plan import family as family_of
from hf_zero.tensor_parallel.plan import COLUMN, ROW, VOCABULARY, WHOLE, TpPlan, starred
from hf_zero.tensor_parallel.solve import is_linear

_FAMILY = {COLUMN: COLUMN, GATHERED: COLUMN, ROW: ROW, SCATTERED: ROW, VOCABULARY: VOCABULARY}
_ALONE = {COLUMN: GATHERED, ROW: SCATTERED, VOCABULARY: VOCABULARY}


@dataclass
class Wishes:
    """Wishes by path of linear layers.

    Attributes:
        whole: Layers that stay whole.
        families: Layers that shall be split over their outputs (``COLUMN``) or inputs (``ROW``), or whose outputs shall not be gathered
            before the loss (``VOCABULARY``).
        source: Who wishes, for the table.
    """

    whole: set[str] = field(default_factory=set)
    families: dict[str, str] = field(default_factory=dict)
    source: str = "inferred"

    def unmet(self, plan: TpPlan) -> dict[str, str]:
        """Layers that ``plan`` splits in another way than wished, with how they can be split alone."""
        found = {}
        for path, family in self.families.items():
            split = plan.modules[path].split if path in plan.modules else WHOLE
            if _FAMILY.get(split) != family:
                found[path] = _ALONE[family]
        return found


def wishes_of(section: Mapping[str, Any], base: TpPlan | Mapping[str, str] | None, module: nn.Module) -> Wishes:
    """The wishes in an edited plan, in patterns with splits, or in the configuration's ``tensor_parallel`` section."""
    linear = [path for path, child in module.named_modules() if is_linear(type(child))]
    if isinstance(base, Mapping):
        return _from_patterns(base, linear)
    if base is not None and base.edited:
        return _from_plan(base, linear)
    rules = section.get("partition_config") if isinstance(section, Mapping) else None
    if isinstance(rules, Mapping) and rules.get("layer_specs"):
        return _from_rules(rules, linear, getattr(getattr(module, "config", None), "model_type", None))
    return Wishes()


def _from_plan(base: TpPlan, linear: list[str]) -> Wishes:
    wishes = Wishes(source="edited plan")
    for path in linear:
        if path not in base.modules:
            raise ConfigError(f"the plan has no row for the linear layer {path}; add one, or make the plan anew")
        split = base.modules[path].split
        if split == WHOLE:
            wishes.whole.add(path)
        elif split in _FAMILY:
            wishes.families[path] = _FAMILY[split]
    return wishes


def _from_patterns(patterns: Mapping[str, str], linear: list[str]) -> Wishes:
    wishes = Wishes(source="patterns")
    for pattern, split in patterns.items():
        kind = WHOLE if split in (WHOLE, "replicated") else split if split == VOCABULARY else _FAMILY.get(split) or family_of(split)
        matching = [path for path in linear if fnmatchcase(path, pattern) or starred(path) == pattern]
        if not kind:
            raise ConfigError(f"plan: {pattern!r} is {split!r}; 'column', 'row', 'vocabulary' and 'whole' are allowed")
        if not matching:
            raise ConfigError(f"plan: {pattern!r} matches no linear layer of the model, such as {', '.join(linear[:3])}")
        for path in matching:
            if kind == WHOLE:
                wishes.whole.add(path)
            else:
                wishes.families[path] = kind
    return wishes


def _from_rules(rules: Mapping[str, Any], linear: list[str], model_type: str | None) -> Wishes:
    wishes = Wishes(source="partition_config")
    key = "tensor_parallel.partition_config.layer_specs"
    parsed = [_rule(f"{key}[{position}]", spec) for position, spec in enumerate(rules["layer_specs"])]
    for path in linear:
        found = next((kind for matches, kind, types in parsed if matches(path) and (not types or model_type in types)), None)
        if found == "skip" or (found is None and rules.get("use_default_specs") is False):
            wishes.whole.add(path)
        elif found is not None:
            wishes.families[path] = found
        elif rules.get("strict_mode"):
            raise ConfigError(f"{key}: no rule matches the linear layer {path} and tensor_parallel.partition_config.strict_mode is true")
    return wishes


def _rule(where: str, spec: Mapping[str, Any]) -> tuple[Callable[[str], bool], str, list[str]]:
    kind = spec.get("partition_type", COLUMN)
    if kind not in (COLUMN, ROW, VOCABULARY, "skip"):
        raise ConfigError(f"{where}.partition_type is {kind!r}; 'column', 'row', 'vocabulary' and 'skip' are allowed")
    try:
        patterns = [re.compile(pattern) for pattern in spec.get("patterns") or []]
    except re.error as error:
        raise ConfigError(f"{where}.patterns: {error.pattern!r} is no regular expression: {error}") from None
    return (lambda path: any(pattern.search(f"{path}.weight") for pattern in patterns)), kind, list(spec.get("model_types") or [])
