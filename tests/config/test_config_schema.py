"""The schema against the list of DeepSpeed's keys: none missing, none extra, same types, defaults and spellings, a fate for each."""

from __future__ import annotations

import csv
import json
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hf_zero.config.keys import adapter_of, all_keys, default_of, nested_of, spellings_of
from hf_zero.config.resolve import resolve
from hf_zero.config.schema.fields import Section, is_section_class
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.config.table import reference_page
from tests.support.rows import each

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
with (ROOT / "tests/data/config_keys.csv").open(encoding="utf-8") as _file:
    ROWS = {row["path"]: row for row in csv.DictReader(_file)}

# type in the key list -> (values that must fit, values that must not)
SAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    "int": ([1, "1", 1.0, "1e0"], ["one", 1.5, [1], True]),
    "bool": ([True, False, "true", "False", 1, 0], ["perhaps", 2, [True]]),
    "float": ([1, 1.0, "1e0"], ["one", [1.0], True]),
    "number": ([1, 1.0], ["one"]),
    "float 0-1": ([0, 0.5, "1"], [1.5, -0.5, "half"]),
    "int 0-3": ([0, 3, "2"], [4, -1, "two"]),
    "list[int]": ([[1, "2"]], [1, ["x"]]),
    "list[float]": ([[0.9, "0.999"]], [0.9, ["x"]]),
    "list[str]": ([["a"], []], ["a", [1]]),
    "list": ([[1, "a"]], ["a", 1]),
    "float|list": ([0.1, [0.1, 0.2]], ["x", {}]),
    "none|cpu|nvme": (["none", "CPU", "nvme"], ["gpu", 1]),
    "path": (["/data"], [1]),
    "str|int": (["auto", 3], [[], {}]),
    "int|str": (["auto", 3], [[], {}]),
    "float|str": (["auto", 0.5], [[], {}]),
    "list[str]|str": (["*", ["a"]], [1, [1]]),
    "auto|list[str]": (["auto", ["a"], []], ["wo", 1, [1]]),
    "str|null": (["w3"], [1]),
    "tuple": ([("a",)], []),
    "object": ([object()], []),
    "any": ([1, "x"], []),
    "null": ([None], []),
}


def locate(path: str) -> tuple[type[Section], str]:
    """The section class and field name behind a path of the key list."""
    section: type[Section] = ZeroConfig
    steps = path.replace("[]", ".[]").split(".")
    name = steps[0]
    for step in steps[1:]:
        if step == "[]" or step.startswith("<"):
            continue
        nested = nested_of(section, name)
        assert nested is not None, f"{path}: {name} is no section"
        section, name = nested.section, step
    return section, name


PLAIN = [path for path in ROWS if not path.endswith("*") and not all_keys()[path].is_section]


def test_no_key_is_missing() -> None:
    assert set(ROWS) - set(all_keys()) == set()


OWN_KEYS = {
    "hf_zero",
    "hf_zero.checkpoint_url",
    "hf_zero.context_parallel_size",
    "hf_zero.context_parallel_strategy",
    "hf_zero.expert_load",
    "hf_zero.expert_load_each",
    "hf_zero.gather_for_generation",
    "hf_zero.hang_report_s",
    "hf_zero.loss_spike_factor",
    "hf_zero.offload_overlap",
    "hf_zero.param_shard_size",
    "hf_zero.peak_tflops",
    "hf_zero.pickle_client_state",
    "hf_zero.preemption_save_dir",
    "hf_zero.preemption_signal",
    "hf_zero.snapshot_folder",
    "hf_zero.replicas",
    "hf_zero.snapshot_steps",
    "hf_zero.spike_action",
    "hf_zero.spike_factor",
    "hf_zero.show_gradients",
    "hf_zero.step_metrics",
    "hf_zero.trace_folder",
    "hf_zero.trace_step",
    "pipeline.micro_batches",
    "pipeline.partition_method",
    "pipeline.schedule",
    "pipeline.stages_per_rank",
}  # what DeepSpeed does not have

OTHER_RELEASES = {"compile.enabled", "compile.disable", "compile.backend", "compile.kwargs"} | {
    "trackio",
    "trackio.enabled",
    "trackio.project",
    "bf16.loss_scale",
    "bf16.initial_scale_power",
    "bf16.loss_scale_window",
    "bf16.hysteresis",
    "bf16.min_loss_scale",
    "optimizer.adam_w_mode",
}  # of DeepSpeed, not of the one that the list is of


def test_no_key_is_extra() -> None:
    parents = {path.rsplit(".", depth)[0] for path in ROWS for depth in range(1, 8)}
    extra = {path for path in all_keys() if path not in ROWS and path not in parents}
    assert extra == OWN_KEYS | OTHER_RELEASES


def test_the_list_is_whole() -> None:
    assert len(ROWS) == 586


def test_default_is_the_listed_one() -> None:
    def check(path: str) -> None:
        section, name = locate(path)
        default = default_of(section.model_fields[name])
        assert (None if default in ({}, []) else default) == (lambda value: None if value in ({}, []) else value)(
            json.loads(ROWS[path]["default"])
        )

    each([path for path in ROWS if not path.endswith("*")], check)


def test_type_is_the_listed_one() -> None:
    def check(path: str) -> None:
        section, name = locate(path)
        adapter, kind = adapter_of(section, name), ROWS[path]["type"]
        if kind == "str":  # free texts take any text; choices take one of theirs, dtypes the usual names
            enum = adapter.json_schema().get("enum") or next(
                (o["enum"] for o in adapter.json_schema().get("anyOf", []) if "enum" in o), ["x"]
            )
            fitting, unfit = [enum[0]], [["x"], {"a": 1}]
        elif kind == "dict":
            fitting, unfit = [{"a": 1}], ["x", 1]
        else:
            fitting, unfit = SAMPLES[kind]
        if path.startswith("zero_optimization.leaf_module."):  # one text is a list of one
            unfit = [value for value in unfit if not isinstance(value, str)]
        for value in fitting:
            adapter.validate_python(value)
        for value in unfit:
            with pytest.raises(ValidationError):
                adapter.validate_python(value)

    each(PLAIN, check)


def test_other_spellings_are_known() -> None:
    def check(path: str) -> None:
        section, name = locate(path)
        for alias in ROWS[path]["aliases"].split(";"):
            last = alias.rpartition(".")[2]
            assert spellings_of(section)[last] == name

    each([path for path, row in ROWS.items() if row["aliases"]], check)


def test_every_key_has_a_fate_and_says_what_it_means() -> None:
    def check(path: str) -> None:
        key = all_keys()[path]
        assert key.fate in ("used", "mapped", "accepted", "refused")
        assert key.text.strip()
        assert key.effect.strip()
        if key.fate == "refused":
            assert ": " in key.effect or "use " in key.effect or key.switch in key.effect, "a refusal says what to do instead"

    each(list(all_keys()), check)


def test_defaults_ask_for_nothing() -> None:
    defaults = ZeroConfig().model_dump(exclude_none=True)
    del defaults["zero_optimization"]["stage3_gather_fp16_weights_on_model_save"]  # the second name of a key that is there
    resolved = resolve(defaults)
    assert resolved.warnings == []
    assert resolved.config.model_dump(exclude={"zero_optimization": {"overlap_comm"}}) == ZeroConfig(
        train_batch_size=1, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1
    ).model_dump(exclude={"zero_optimization": {"overlap_comm"}})


def test_sections_are_immutable() -> None:
    with pytest.raises(ValidationError):
        ZeroConfig().zero_optimization.stage = 3  # type: ignore[misc]


def test_reference_page_is_current() -> None:
    written = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert written == reference_page(), "run `python -m hf_zero.config.table --write docs/config.md`"


class _AliasOf310(types.GenericAlias):
    """``X[int]`` as Python 3.10 has it: an instance of ``type`` that is no class; older pydantic raises when asked for its bases."""

    __class__ = type  # type: ignore[assignment]


def test_a_list_of_something_is_no_section_in_python_3_10_either() -> None:
    for origin in (list, ZeroConfig):
        alias = _AliasOf310(origin, (int,))
        assert isinstance(alias, type) and not is_section_class(alias)
    assert is_section_class(ZeroConfig)


def test_one_leaf_module_needs_no_list() -> None:
    for name in ("classes", "names", "name_suffixes"):
        zero = ZeroConfig(zero_optimization={"stage": 3, "leaf_module": {name: "Block"}}).zero_optimization
        assert getattr(zero.leaf_module, name) == ["Block"]
    with pytest.raises(ValidationError):
        ZeroConfig(zero_optimization={"leaf_module": {"classes": 3}})
