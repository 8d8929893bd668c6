"""Properties of the reader over generated configurations."""

from __future__ import annotations

import copy
import json
import string
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_zero.config.checks import ONLY_OF
from hf_zero.config.keys import adapter_of, all_keys, nested_of, spellings_of
from hf_zero.config.read import read_config
from hf_zero.config.resolve import resolve
from hf_zero.config.schema.fields import Section
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.errors import ConfigError
from tests.support.drawn import drawn

PATHS = [path for path, key in all_keys().items() if not any(mark in path for mark in ("*", "<", "[]"))]
OF_ONE_TYPE = {f"optimizer.params.{name}" for name in ONLY_OF}  # refused beside any other optimizer
# Refused at stages, or without other keys.
WITH_OTHERS = (
    *(f"zero_optimization.{name}" for name in ("zero_quantized_", "zeropp_loco_param.", "zero_hpz_partition_size", "mics_shard_size")),
    "hf_zero.param_shard_size",
    "zero_optimization.allgather_bucket_size",
)
HARMLESS = [
    path
    for path in PATHS
    if all_keys()[path].fate in ("used", "accepted")
    and not (all_keys()[path].is_section or path in OF_ONE_TYPE or path.startswith(WITH_OTHERS))
]
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def section_of(steps: list[str]) -> type[Section]:
    section: type[Section] = ZeroConfig
    for step in steps:
        nested = nested_of(section, step)
        assert nested is not None
        section = nested.section
    return section


def put(config: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value


@st.composite
def one_typo(draw: st.DrawFn, word: str) -> str:
    """`word` with one character inserted, dropped, replaced or swapped with its neighbour."""
    at = draw(st.integers(0, len(word) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase + "_1"))
    kind = draw(st.sampled_from(["insert", "drop", "replace", "swap"]))
    if kind == "insert":
        return word[:at] + letter + word[at:]
    if kind == "drop":
        return word[:at] + word[at + 1 :]
    if kind == "replace":
        return word[:at] + letter + word[at + 1 :]
    return word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]


@drawn(100, 300)
@given(st.data())
def test_a_typo_at_any_level_is_caught(data: st.DataObject) -> None:
    """At the top level and in free sections, where unlike keys are allowed, names of one to three letters are out of reach."""
    steps = data.draw(st.sampled_from(PATHS)).split(".")
    level = data.draw(st.integers(0, len(steps) - 1))
    section = section_of(steps[:level])
    typo = data.draw(one_typo(steps[level]))
    assume(typo not in spellings_of(section))
    if section is ZeroConfig or (section.free_keys and steps[0] not in ("optimizer", "scheduler")):
        assume(len(steps[level]) > 3 and any(letter.isalnum() for letter in typo))
    config: dict[str, Any] = {}
    if steps[0] in ("optimizer", "scheduler") and level > 0:
        config[steps[0]] = {"type": {"optimizer": "Adagrad", "scheduler": "StepLR"}[steps[0]]}
    put(config, ".".join([*steps[:level], typo, *steps[level + 1 :]]), 1)
    with pytest.raises(ConfigError) as error:
        resolve(config)
    wrong = ".".join([*steps[:level], typo])
    assert f"`{wrong}` is unknown" in str(error.value)


@drawn(40, 100)
@given(st.text(min_size=1, max_size=20), st.sampled_from(["zero_optimization", "fp16", "tensorboard", "data_types"]))
def test_no_unknown_key_passes_inside_a_section(key: str, section: str) -> None:
    assume(key not in spellings_of(section_of([section])))
    with pytest.raises(ConfigError):
        resolve({section: {key: 1}})


@st.composite
def values_of(draw: st.DrawFn, path: str) -> Any:
    """A value that the key takes, in one of the forms people write."""
    if path == "optimizer.params.betas":  # two numbers below 1, which no JSON schema says
        return draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2))
    *sections, name = path.split(".")
    schema = adapter_of(section_of(sections), name).json_schema()
    option = draw(st.sampled_from(schema.get("anyOf", [schema])))
    if "enum" in option:
        return draw(st.sampled_from(option["enum"]))
    if "const" in option:
        return option["const"]
    kind = option.get("type")
    if kind == "boolean":
        return draw(st.sampled_from([True, False, "true", "False", 1, 0]))
    if kind in ("integer", "number"):
        low, high = option.get("minimum", option.get("ge", 1)), option.get("maximum", option.get("le", 10**6))
        number = draw(st.integers(max(int(low), 1), int(high)) if high >= 1 else st.just(low))
        return draw(st.sampled_from([number, str(number), float(number)]))
    if kind == "array":
        inner = option.get("items", {}).get("type")
        return draw(st.lists(st.text(max_size=5) if inner == "string" else st.floats(0, 1), max_size=3))
    return draw(st.text(min_size=1, max_size=8)) if kind == "string" else None


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A valid configuration: some used and accepted keys, some of them "auto", some null."""
    config: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(HARMLESS), max_size=12, unique=True)):
        if path in BATCH_KEYS or path.startswith(("bf16.bf16_", "elasticity.")):
            continue
        put(config, path, draw(st.one_of(values_of(path), st.just("auto"), st.none())))
    for name, kind in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if name in config:
            config[name]["type"] = kind
    if config.get("fp16", {}).get("enabled") not in (None, False, "False", 0, "auto"):
        config.get("bf16", {}).pop("enabled", None)
    for block in ("offload_optimizer", "offload_param"):
        if config.get("zero_optimization", {}).get(block, {}).get("device") == "nvme":
            config["zero_optimization"][block]["nvme_path"] = "/fast"
    if draw(st.booleans()):
        config["train_micro_batch_size_per_gpu"] = draw(st.integers(1, 9))
        config["gradient_accumulation_steps"] = draw(st.sampled_from([1, 2, "3", "auto"]))
    return config


@drawn(50, 150)
@given(configs(), st.integers(1, 4))
def test_resolving_again_changes_nothing(config: dict[str, Any], world_size: int) -> None:
    before = copy.deepcopy(config)
    first = resolve(config, world_size=world_size)
    again = resolve(first.resolved, world_size=world_size)
    assert again.config == first.config
    assert again.resolved == first.resolved
    assert again.batch == first.batch
    assert config == before == first.raw


@drawn(25, 50)
@given(configs())
def test_every_form_reads_the_same(config: dict[str, Any]) -> None:
    assert read_config(json.dumps(config)) == read_config(config)


@drawn(40, 100)
@given(configs())
def test_no_auto_is_left(config: dict[str, Any]) -> None:
    resolved = resolve(config, sources={"hidden_size": 8, "learning_rate": 1e-3}, match_sources=False)
    left = [row.key for row in resolved.table(everything=True) if row.value == '"auto"' and all_keys()[row.key].default != "auto"]
    texts = [row.key for row in resolved.table() if row.key in left and row.source.startswith("file")]
    assert left == texts == []
