"""What the user wants of a plan: rules of the configuration, or the edited table of a saved plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.observe import warn_once
from hf_zero.tensor_parallel.model_plan import family as family_of
from hf_zero.tensor_parallel.plan import COLUMN, GATHERED, ROW, SCATTERED, VOCABULARY, WHOLE, TpPlan, starred
from hf_zero.tensor_parallel.solve import is_linear

_FAMILY = {COLUMN: COLUMN, GATHERED: COLUMN, ROW: ROW, SCATTERED: ROW, VOCABULARY: VOCABULARY}
HEADS = ("lm_head", "embed_out")  # what models call the layer that makes logits
_LOCAL = {COLUMN: GATHERED, ROW: SCATTERED, VOCABULARY: VOCABULARY}


@dataclass
class Overrides:
    """Overrides by path of linear layers.

    Attributes:
        whole: Layers that stay whole.
        families: Layers that shall be split over their outputs (``COLUMN``) or inputs (``ROW``), or whose outputs shall not be gathered
            before the loss (``VOCABULARY``).
        source: Who overrides, for the table.
    """

    whole: set[str] = field(default_factory=set)
    families: dict[str, str] = field(default_factory=dict)
    source: str = "inferred"

    def keeping(self, paths: Collection[str]) -> Overrides:
        """These, with the modules at ``paths`` whole whatever the user says of them: other ranks have other experts."""
        return replace(self, whole={*self.whole, *paths}, families={path: how for path, how in self.families.items() if path not in paths})

    def unmet(self, plan: TpPlan) -> dict[str, str]:
        """Layers that ``plan`` splits in another way than the user wants, with how they can be split by themselves."""
        found = {}
        for path, family in self.families.items():
            split = plan.modules[path].split if path in plan.modules else WHOLE
            if _FAMILY.get(split) != family:
                found[path] = _LOCAL[family]
        return found


def overrides_of(section: Mapping[str, Any], base: TpPlan | Mapping[str, str] | None, module: nn.Module) -> Overrides:
    """The overrides in an edited plan, in patterns with splits, or in the configuration's ``tensor_parallel`` section."""
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
