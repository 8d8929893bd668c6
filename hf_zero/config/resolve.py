"""Resolve any configuration source to a `ResolvedConfig`: no "auto" left, batch sizes solved, the origin of every value recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hf_zero.config.auto import AUTO_RULES, checked_sources
from hf_zero.config.batch import ACCUMULATION, MICRO, TOTAL, Batch, solve
from hf_zero.config.checks import check_refusals, check_values
from hf_zero.config.elastic import take_elastic_batch
from hf_zero.config.keys import adapter_of, default_of, extra_of, nested_of, type_text
from hf_zero.config.problems import Problems, show
from hf_zero.config.read import read_config
from hf_zero.config.schema.fields import Section
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.config.spelling import Speller, without_unit
from hf_zero.config.table import NOT_ALLOWED, Row, rows_of, without_effect
from hf_zero.errors import ConfigError
from hf_zero.system.secrets import MASK

STRICT_VARIABLE = "HF_ZERO_STRICT"


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration that an engine can be built from.

    Attributes:
        config: The typed configuration; no "auto" is left in it.
        origin: Dotted key -> origin of its value: "file", "file (<old spelling>)", "default", "default (...)", "auto <- <source>" or
            "derived <- ...". Keys that are not listed have their default.
        raw: The dictionary as the user gave it.
        resolved: The same configuration as plain nested dictionaries with canonical names, without defaults.
        batch: The batch identity.
        warnings: Findings that do not stop a run, one sentence each.
    """

    config: ZeroConfig
    origin: dict[str, str]
    raw: dict[str, Any]
    resolved: dict[str, Any]
    batch: Batch
    warnings: list[str]

    def table(self, everything: bool = False) -> list[Row]:
        """Return rows (key, value, origin, fate, effect) of the keys that were set or derived, or of all keys."""
        return rows_of(self.resolved, self.origin, everything=everything)

    def without_effect(self) -> list[str]:
        """Return the keys of the file that request another value than the default and have no effect here."""
        return without_effect(self.resolved, self.origin)


@dataclass
class Analysis:
    """All findings about a configuration, valid or not. `explain` prints them, `resolve` raises its problems."""

    raw: dict[str, Any]
    resolved: dict[str, Any]
    origin: dict[str, str]
    batch: Batch
    problems: Problems
    config: ZeroConfig | None


def resolve(
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int = 1,
    sources: Mapping[str, Any] | None = None,
    strict: bool = False,
    match_sources: bool = True,
) -> ResolvedConfig:
    """Read a configuration, fill in the values that it leaves open, and check it.

    Args:
        source: Path, mapping, JSON text or base64 text (see `read_config`).
        world_size: Number of data-parallel ranks, for the batch identity. If it is 1, `sources["world_size"]` is used instead.
        sources: Values that replace "auto" (`hf_zero.config.auto.SOURCE_NAMES`). A key without a value in the file or a source takes its
            default.
        strict: Count warnings as errors; also enabled by HF_ZERO_STRICT=1.
        match_sources: Report values of the file that differ from their source, like the Trainer. If false, the file silently takes
            precedence, as in accelerate.

    Raises:
        RefusedKeyError: The configuration requests a feature that is not provided. It is a ConfigError and an UnsupportedError.
        ConfigError: Any other fault. The message always has every finding.
    """
    analysis = analyse(source, world_size=world_size, sources=sources, strict=strict, match_sources=match_sources)
    analysis.problems.raise_all()
    if analysis.config is None:  # unreachable: values that do not fit the schema are reported as problems
        raise ConfigError("The configuration does not fit the schema")
    return ResolvedConfig(
        config=analysis.config,
        origin=analysis.origin,
        raw=analysis.raw,
        resolved=analysis.resolved,
        batch=analysis.batch,
        warnings=analysis.problems.warnings,
    )


def analyse(
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int = 1,
    sources: Mapping[str, Any] | None = None,
    strict: bool = False,
    match_sources: bool = True,
) -> Analysis:
    """Analyse a configuration like `resolve`, but collect its faults instead of raising them; same arguments.

    Raises:
        ConfigError: The source cannot be read at all, or `sources` has an unknown name.
    """
    problems = Problems(strict=strict or strict_by_environment())
    given = checked_sources(sources or {})
    if world_size == 1:
        world_size = int(given.get("world_size") or 1)
    raw = read_config(source)
    speller = Speller(problems)
    data, origin = speller.canonical(raw), speller.origin
    _fill_block(data, ZeroConfig, "", given, origin)
    _fill_from_optimizer(data, origin)
    data = _typed(data, ZeroConfig, "", problems, origin)
    batch = _solve_batch(data, world_size, origin, problems)
    if match_sources:
        _check_matches(data, given, batch, origin, problems)
    check_refusals(data, ZeroConfig, "", problems)
    _settle_overlap(data, origin)
    check_values(data, problems)
    config = None if problems.errors else _build(data, problems)
    return Analysis(raw=raw, resolved=data, origin=origin, batch=batch, problems=problems, config=config)


def strict_by_environment() -> bool:
    """Return whether HF_ZERO_STRICT makes warnings errors."""
    return os.environ.get(STRICT_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


# ----------------------------------------------------------------------------------------------------------------- auto


def _fill_block(data: dict[str, Any], section: type[Section], path: str, sources: dict[str, Any], origin: dict[str, str]) -> None:
    """Replace every "auto" below `path` by the value of its source, or drop it so that the default applies."""
    for name in list(data):
        here = f"{path}.{name}" if path else name
        value = data[name]
        nested = nested_of(section, name) if name in section.model_fields else None
        if isinstance(value, str) and value == "auto":
            if name in section.model_fields and extra_of(section.model_fields[name]).get("auto_is_value"):
                continue
            rule = AUTO_RULES.get(here)
            filled = rule.value(sources) if rule else None
            if rule is None or filled is None:
                del data[name]
                origin[here] = f"default (auto: {rule.label()} not given)" if rule else "default (auto)"
            else:
                data[name], origin[here] = filled, f"auto <- {rule.label()}"
        elif nested and nested.kind == "one" and isinstance(value, dict):
            _fill_block(value, nested.section, here, sources, origin)


def _fill_from_optimizer(data: dict[str, Any], origin: dict[str, str]) -> None:
    """Fill `warmup_max_lr: "auto"` with the rate of the optimizer section, if no source has given a learning rate."""
    key = "scheduler.params.warmup_max_lr"
    if not origin.get(key, "").startswith("default (auto"):
        return
    optimizer = data.get("optimizer") or {}
    rate = (optimizer.get("params") or {}).get("lr") if isinstance(optimizer, dict) else None
    if rate is not None:
        data["scheduler"]["params"]["warmup_max_lr"] = rate
        origin[key] = "auto <- optimizer.params.lr"


# ---------------------------------------------------------------------------------------------------------------- types


def _typed(data: dict[str, Any], section: type[Section], path: str, problems: Problems, origin: dict[str, str]) -> dict[str, Any]:
    """Return the block with every value converted to its type; report values that do not fit, and leave them out."""
    typed: dict[str, Any] = {}
    for name, value in data.items():
        here = f"{path}.{name}" if path else name
        if name not in section.model_fields:
            typed[name] = value
            continue
        nested = nested_of(section, name)
        if nested and nested.kind == "one":
            typed[name] = _typed(value, nested.section, here, problems, origin)
        elif nested and nested.kind == "list":
            typed[name] = [_typed(item or {}, nested.section, f"{here}[{i}]", problems, origin) for i, item in enumerate(value)]
        elif nested:
            typed[name] = {key: _typed(item or {}, nested.section, f"{here}.{key}", problems, origin) for key, item in value.items()}
        elif not _store_typed(typed, section, name, value, here, problems):
            origin[here] = NOT_ALLOWED
    return typed


def _store_typed(typed: dict[str, Any], section: type[Section], name: str, value: Any, here: str, problems: Problems) -> bool:
    """Store ``value`` with its type in ``typed``; return False, and report an error, if it does not fit."""
    try:
        converted = adapter_of(section, name).validate_python(value)
    except ValidationError:
        default = default_of(section.model_fields[name])
        found = MASK if extra_of(section.model_fields[name]).get("secret") else show(value)
        allowed, number = type_text(section, name), without_unit(value)
        if number is not None and "number" in allowed:
            elements = "elements" in (section.model_fields[name].description or "").lower()
            allowed += " without a unit: it counts elements, not bytes" if elements else f" without a unit, such as {number}"
        problems.error(here, f"is {found}; allowed: {allowed} (default {show(default)})")
        return False
    if converted is not None:
        typed[name] = converted
    return True


def _build(data: dict[str, Any], problems: Problems) -> ZeroConfig | None:
    try:
        return ZeroConfig.model_validate(data)
    except ValidationError as failure:
        for error in failure.errors():
            problems.error(".".join(str(step) for step in error["loc"]), error["msg"])
        return None


# --------------------------------------------------------------------------------------------------- batch and mismatches


def _solve_batch(data: dict[str, Any], world_size: int, origin: dict[str, str], problems: Problems) -> Batch:
    take_elastic_batch(data, world_size, origin, problems)
    batch = solve(data.get(TOTAL), data.get(MICRO), data.get(ACCUMULATION), world_size, problems)
    known = [key for key in (TOTAL, MICRO, ACCUMULATION) if key in data]
    for key, value in ((TOTAL, batch.total), (MICRO, batch.micro), (ACCUMULATION, batch.accumulation)):
        if key in data:
            continue
        data[key] = value
        others = [name for name in known if name != key]
        defaulted = key != TOTAL and not (key == MICRO and TOTAL in known) and not (key == ACCUMULATION and len(known) == 2)
        if not defaulted:
            origin[key] = "derived <- " + " and ".join([*(others or [MICRO]), "data-parallel size"])
        elif not origin.get(key, "").startswith("default (auto"):
            origin[key] = "default"
    return batch


def _check_matches(data: dict[str, Any], sources: dict[str, Any], batch: Batch, origin: dict[str, str], problems: Problems) -> None:
    """Report every value of the configuration file that contradicts the training arguments, as Trainer does."""
    for key, rule in AUTO_RULES.items():
        if not rule.must_match or not origin.get(key, "").startswith("file"):
            continue
        expected, found = rule.value(sources), _lookup(data, key)
        if expected is not None and found is not None and not _equal(found, expected):
            problems.mismatch(key, found, rule.label(), expected)
    micro, accumulation = (AUTO_RULES[key].value(sources) for key in (MICRO, ACCUMULATION))
    if origin.get(TOTAL, "").startswith("file") and micro and accumulation:
        expected = micro * accumulation * batch.world_size
        if expected != batch.total:
            problems.mismatch(TOTAL, batch.total, f"{TOTAL} (calculated)", expected)


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(found, list) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(_equal(one, two) for one, two in zip(found, expected, strict=True))
    return bool(found == expected)


def _lookup(data: dict[str, Any], key: str) -> Any:
    """Return the value at a dotted key; None when it is absent."""
    value: Any = data
    for step in key.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _settle_overlap(data: dict[str, Any], origin: dict[str, str]) -> None:
    """Set `overlap_comm` to true unless the file gives it: overlapping changes no number here, at any stage."""
    zero = data.setdefault("zero_optimization", {})
    if isinstance(zero, dict) and "overlap_comm" not in zero:
        zero["overlap_comm"] = True
        origin["zero_optimization.overlap_comm"] = "default"


__all__ = ["Analysis", "ResolvedConfig", "analyse", "resolve", "strict_by_environment"]
