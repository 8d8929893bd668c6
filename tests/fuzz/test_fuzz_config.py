"""Mutated valid configurations: a resolved configuration whose numbers are sound, or a named error; soon, and in little memory."""

from __future__ import annotations

import base64
import copy
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from hf_zero.config.keys import all_keys
from hf_zero.config.resolve import analyse, resolve
from hf_zero.config.table import rows_of
from hf_zero.errors import HfZeroError
from tests.fuzz.bounded import bounded
from tests.fuzz.edits import edited, edits
from tests.fuzz.guard import given_many

SEEDS: list[dict[str, Any]] = [
    {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": math.inf,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": 5e7,
            "sub_group_size": 1e9,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/fast", "ratio": 0.5, "buffer_count": 4},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "3e-7"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 10, "total_num_steps": 100}},
    },
    {
        "train_batch_size": 16,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2},
        "optimizer": {"type": "Adagrad", "params": {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.5}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 5, "gamma": 0.5}},
        "tensorboard": {"enabled": True, "output_path": "runs"},
        "comet": {"enabled": True, "api_key": "k", "samples_log_interval": 7},
        "mine": {"a": [1, {"b": None}]},
    },
    {
        "elasticity": {"enabled": True, "version": 0.1, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "max_gpus": 100},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["a.*"], "partition_type": "row"}]}},
        "zero_optimization": {"stage": 1, "cpu_offload": True},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 100, "max_grad_norm": 1}},
        "data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"m": {"min_difficulty": 1}}}}},
        "activation_checkpointing": {"number_checkpoints": False, "profile": True},
        "aio": {"block_size": 1048576, "queue_depth": 8},
        "datastates_ckpt": {"host_cache_size": 16},
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1},
        "compression_training": {"weight_quantization": {"different_groups": {"g": {"params": {"start_bits": 8}}}}},
    },
]
COMMENTED = [
    json.dumps(SEEDS[0], indent=1).replace("\n", " // note, {\n", 2).replace("}\n", "}, # end\n", 1),
    "{ /* a\n * b */ " + json.dumps(SEEDS[1])[1:].replace("}}", "},}").replace('"mine"', '/**/ "mine"'),
]
TEXTS = [json.dumps(seed, indent=1) for seed in SEEDS] + COMMENTED
TEXTS += [base64.urlsafe_b64encode(json.dumps(seed).encode()).decode() for seed in SEEDS]
HOSTILE_TEXT = [
    *("{", "}", "[", "]", '"', ",", ":", "\\", "/*", "*/", "//", "#", "\n", " ", "\0", "\ufeff", "é", "\\u", "\\ud800", "'", "-", "+", "."),
    *("NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "null", "true", '"auto"', "9" * 400, "9" * 5000, "[" * 2000, '{"a":' * 2000),
    *('"stage": 4', '"lr": NaN,', '"x": 1, "x": 2', ", " * 3000, '\\"' * 3000, "/*" * 3000, '"k%d": 1, ' * 3000),
]
HOSTILE_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 10**9, 10**12, -(10**30), 10**400, 0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *("", "auto", "nan", "inf", "-1", "1e999", "boom", "\0", "\ud800", "x" * 5000, "9" * 5000, "true", "None", "../../etc", "é"),
    *([], {}, [[]], [None], {"": None}, [1, 2], {"a": {"b": 1}}, [0.1] * 500, {str(number): number for number in range(150)}, (1, 2)),
]
KEYS = [path for path in all_keys() if not any(mark in path for mark in ("*", "<", "[]"))]
NEW_KEYS = ["", "lr", "stage", "type", "enabled", "a.b", "zero_optimization", "x" * 5000, "\0", "é", "Params", 3, None]
# Upper bounds, where infinity is none, and the only numbers that may be negative.
UNBOUNDED = {"gradient_clipping", "optimizer.params.max_grad_norm", "optimizer.params.max_coeff"}
BELOW_ZERO = {
    *("flops_profiler.module_depth", "scheduler.params.last_batch_iteration", "scheduler.params.decay_mom_rate"),
    *("scheduler.params.last_epoch", "optimizer.params.last_epoch"),
}
resolve(SEEDS[1], match_sources=False)  # loads torch, to look classes up, before memory is watched
_folder = tempfile.TemporaryDirectory(prefix="hf_zero_fuzz_")


def check(source: Any, nbytes: int, world_size: int = 2) -> bool:
    """Whether ``source`` is a configuration; fails when it is neither one nor refused by name, or its numbers are not sound."""
    before = copy.deepcopy(source)
    with bounded(nbytes):
        try:
            analysis = analyse(source, world_size=world_size, sources={"learning_rate": 1e-3, "hidden_size": 64}, match_sources=False)
            json.dumps([row._asdict() for row in rows_of(analysis.resolved, analysis.origin, everything=True)]).encode("utf-8")
            resolved = resolve(source, world_size=world_size, sources={"learning_rate": 1e-3, "hidden_size": 64}, match_sources=False)
        except HfZeroError as error:
            assert len(str(error)) < 100_000
            str(error).encode("utf-8")
            return False
        finally:
            assert repr(source) == repr(before), "the caller's dictionary was changed"
    sound(resolved.resolved, "")
    assert resolved.batch.total == resolved.batch.micro * resolved.batch.accumulation * world_size
    return True


def sound(value: Any, path: str) -> None:
    """Every number that the engine reads is finite, not negative and of its type."""
    if isinstance(value, dict):
        for name, item in value.items():
            sound(item, f"{path}.{name}" if path else str(name))
        return
    key = all_keys().get(path)
    if key.fate != "used" if key is not None else not re.fullmatch(r"(optimizer|scheduler)\.params\.[^.]+", path):
        return  # nobody reads it, keys of the user's own in other sections included; blocks in `params` are refused when they are used
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, float):
            assert math.isfinite(item) or (path in UNBOUNDED and item == math.inf), f"{path} is {item}"
        if isinstance(item, (int, float)) and not path.startswith("elasticity"):
            assert item >= 0 or path in BELOW_ZERO, f"{path} is {item}"
            assert abs(item) < 2**63 or isinstance(item, float), f"{path} is {item}"
    if key is not None and key.type_text.startswith(("a number", "a whole number")):
        assert value is None or (isinstance(value, (int, float, list)) and not isinstance(value, bool)) or key.path.endswith("freeze_step")


def check_text(number: int, changes: list[tuple[str, int, int, bytes]], as_file: bool) -> None:
    data = edited(TEXTS[number].encode(), changes)
    if as_file:
        path = Path(_folder.name, "ds.json")
        path.write_bytes(data)
        check(path, len(data))
    else:
        check(data.decode("utf-8", "surrogateescape"), len(data))


def check_tree(number: int, changes: list[tuple[str, str, Any, Any]], as_text: bool) -> None:
    config = copy.deepcopy(SEEDS[number])
    for kind, path, value, name in changes:
        change(config, kind, path, value, name)
    nbytes = len(repr(config))
    if as_text and all(isinstance(change[3], str) for change in changes):
        check(json.dumps(config, ensure_ascii=False), nbytes)
    else:
        check(config, nbytes)


def change(config: dict[Any, Any], kind: str, path: str, value: Any, new_name: Any) -> None:
    *sections, name = path.split(".")
    block = config
    for section in sections:
        inner = block.get(section)
        if not isinstance(inner, dict):
            inner = block[section] = {}
        block = inner
    if kind == "set":
        block[name] = copy.deepcopy(value)
    elif kind == "drop":
        block.pop(name, None)
    elif kind == "rename":
        block[new_name] = block.pop(name, copy.deepcopy(value))
    else:
        block[new_name] = {name: copy.deepcopy(value)}


TEXT_CASES: dict[str, Any] = {"number": st.integers(0, len(TEXTS) - 1), "changes": edits(HOSTILE_TEXT), "as_file": st.booleans()}
VALUES = st.one_of(st.sampled_from(HOSTILE_VALUES), st.floats(), st.integers(), st.text(max_size=6))
TREE_CASES: dict[str, Any] = {
    "number": st.integers(0, len(SEEDS) - 1),
    "changes": st.lists(
        st.tuples(
            st.sampled_from(["set", "set", "set", "drop", "rename", "nest"]), st.sampled_from(KEYS), VALUES, st.sampled_from(NEW_KEYS)
        ),
        max_size=4,
    ),
    "as_text": st.booleans(),
}


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_what_is_mutated_is_valid(number: int) -> None:
    """Else the mutations below would start from errors."""
    source = TEXTS[number]
    assert check(source, len(source), world_size=2)


test_texts, test_many_texts = given_many(check_text, 100, 6000, **TEXT_CASES)
test_trees, test_many_trees = given_many(check_tree, 100, 6000, **TREE_CASES)
