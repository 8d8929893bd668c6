"""Configurations that are damaged, endless or hold numbers that would change training silently: a named error, and soon."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config.keys import all_keys
from hf_zero.config.problems import nearest
from hf_zero.config.read import read_config
from hf_zero.config.resolve import resolve
from hf_zero.errors import ConfigError
from tests.fuzz.bounded import bounded_time
from tests.support.rows import each

pytestmark = pytest.mark.quick

MEGABYTE = 2**20
# Texts on which a pattern that tries again at every character needs time with the square of the length.
SLOW = {
    "unclosed quote": '{"a": "' + '\\"' * (MEGABYTE // 2),
    "unclosed quote of letters": '{"a": "' + "x" * MEGABYTE,
    "many quotes": '{"a ' * (MEGABYTE // 4),
    "backslashes": '{"a": "' + "\\" * (MEGABYTE + 1),
    "unclosed comments": '{"a": ' + "/*" * (MEGABYTE // 2),
    "one unclosed comment": '{"a": /' + "*" * MEGABYTE,
    "slashes": "{" + "/" * MEGABYTE,
    "commas": "{" + ", " * (MEGABYTE // 2),
    "blanks after a comma": "{," + " " * MEGABYTE,
    "lines of comments": "{" + "#\n" * (MEGABYTE // 2),
}


@pytest.mark.parametrize("case", SLOW)
def test_reading_takes_time_with_the_length(case: str) -> None:
    """Half a second is usual, time with the square of a megabyte is hours."""
    with bounded_time(), pytest.raises(ConfigError, match="is not JSON"):
        read_config(SLOW[case])


def test_comments_and_strings_are_told_apart() -> None:
    text = '{"a": "/* no */ // no # no \\" ,}", /**/ "b": [1, /* , */ 2, ], /***/ "c": "\\\\", # "open\n "d": 1 /* x */ , }'
    assert read_config(text) == {"a": '/* no */ // no # no " ,}', "b": [1, 2], "c": "\\", "d": 1}
    for text in ('{"a": 1 /*/ }', '{"a": 1 } /*', '{"a": "\\', '{"a": "b\\"}'):
        with pytest.raises(ConfigError, match="is not JSON"):
            read_config(text)


def test_blocks_inside_blocks_end(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for text in ('{"a":' * 200_000, '{"a":' + "[" * 5000 + "]" * 5000 + "}"):
        file.write_text(text)
        for source in (text, file):
            with pytest.raises(ConfigError, match="nested more than 64 deep"):
                read_config(source)
    endless: dict[str, Any] = {}
    endless["a"] = [endless]
    with pytest.raises(ConfigError, match="nested more than 64 deep"):
        resolve(endless)


def test_numbers_of_thousands_of_digits() -> None:
    with pytest.raises(ConfigError, match="a number with thousands of digits"):
        read_config('{"train_batch_size": ' + "9" * 5000 + "}")
    for value in (10**5000, "9" * 5000, 10**400, 2**63):
        with pytest.raises(ConfigError, match="`train_batch_size` is"):
            resolve({"train_batch_size": value})
        with pytest.raises(ConfigError, match="`optimizer.params.lr` is" if value != 2**63 else "`gradient_clippin`"):
            resolve({"optimizer": {"type": "Adam", "params": {"lr": value}}, "gradient_clippin": value})


def test_files_without_end_and_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is larger than 16,777,216 bytes"):
        read_config("/dev/zero")
    with pytest.raises(ConfigError, match="neither an existing file"):
        read_config("a\0b")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(Path("a\0b"))


def test_half_characters_are_refused() -> None:
    """They could be neither printed nor written."""
    for text in ('{"wandb": {"project": "\\ud800"}}', '{"\\udfff": 1}'):
        with pytest.raises(ConfigError, match="incomplete Unicode character"):
            read_config(text)


def test_a_text_that_is_no_config_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as error:
        read_config("eyJjb21ldCI6IHsiYXBpX2tleSI6ICJhYmMifX0" * 10 + "*")  # pragma: allowlist secret
    assert "(391 characters)" in str(error.value) and len(str(error.value)) < 200


def test_unknown_keys_without_end() -> None:
    with bounded_time():
        with pytest.raises(ConfigError, match="More than 100 keys are unknown"):
            resolve({f"my_key_{number}": number for number in range(20_000)})
        assert nearest("x_" * MEGABYTE, ["overlap_comm"]) is None


def test_elastic_batches_are_found_soon() -> None:
    section = {"enabled": True, "version": 0.1, "max_train_batch_size": 10**9, "max_gpus": 10**6, "micro_batch_sizes": [7, 11]}
    with bounded_time():
        assert resolve({"elasticity": section}).batch.total <= 10**9
    for key, value in (("max_train_batch_size", 10**12), ("max_gpus", 10**12), ("micro_batch_sizes", list(range(1, 100)))):
        with pytest.raises(ConfigError, match=f"elasticity.{key} is"):
            resolve({"elasticity": {**section, key: value}})


# ------------------------------------------------------------------------------------------ numbers that change training

NUMBERS = {
    path: key
    for path, key in all_keys().items()
    if key.fate == "used" and "number" in key.type_text and not any(mark in path for mark in ("*", "<", "[]")) and "elasticity" not in path
}
TAKES_LISTS = [path for path, key in NUMBERS.items() if "list" in key.type_text]
BELOW_ZERO = {
    "flops_profiler.module_depth": -1,
    "flops_profiler.profile_step": -1,
    "scheduler.params.decay_mom_rate": -1e300,
    "scheduler.params.last_batch_iteration": -1,
    "zero_optimization.mics_shard_size": -1,
}
UNBOUNDED = {"gradient_clipping", "optimizer.params.max_grad_norm", "optimizer.params.max_coeff", "steps_per_print"}
TYPES = {"optimizer": "AdamW", "scheduler": "OneCycle"}
NO_NUMBERS = ["boom", "nan", "", "1e", "0x10", True, {"a": 1}, math.nan, [math.nan], ["boom"], [True], "-inf", -math.inf]


def config_with(path: str, value: Any) -> dict[str, Any]:
    config: dict[str, Any] = {}
    *sections, name = path.split(".")
    block = config
    for section in sections:
        block = block.setdefault(section, {})
    block[name] = value
    for section, kind in TYPES.items():
        if section in config:
            config[section]["type"] = kind
    return config


def test_all_rates_and_counts_are_looked_at() -> None:
    assert {"optimizer.params.lr", "scheduler.params.warmup_num_steps", "fp16.loss_scale", "gradient_clipping"} <= NUMBERS.keys()
    assert len(NUMBERS) > 60


def test_what_is_no_number_is_refused() -> None:
    def check(path: str) -> None:
        for value in NO_NUMBERS if path not in UNBOUNDED else [item for item in NO_NUMBERS if item not in ("-inf", -math.inf)]:
            if path == "optimizer.params.freeze_step" and value in ("auto", "stable"):
                continue
            with pytest.raises(ConfigError) as error:
                resolve(json.loads(json.dumps(config_with(path, value))))
            assert path in str(error.value), f"{path} took {value!r}"

    each(NUMBERS, check)


def test_numbers_are_finite_and_not_negative() -> None:
    def check(path: str) -> None:
        lowest = BELOW_ZERO.get(path, 0)
        wrong = [math.inf, "1e999"] if path not in UNBOUNDED else []
        for value in [*wrong, *([lowest - 1, str(lowest - 1)] if lowest > -1e300 else [])]:
            with pytest.raises(ConfigError) as error:
                resolve(config_with(path, value))
            assert path in str(error.value), f"{path} took {value!r}"

    each(NUMBERS, check)


@pytest.mark.parametrize("value", [math.inf, "Infinity", 1])
@pytest.mark.parametrize("path", sorted(UNBOUNDED - {"steps_per_print"}))
def test_infinity_is_no_upper_bound(path: str, value: Any) -> None:
    config = config_with(path, value)
    if "optimizer" in config:
        config["optimizer"]["type"] = "Lamb" if "coeff" in path else "OneBitAdam"
    assert resolve(config).warnings == []


def test_a_rate_of_zero_is_said() -> None:
    still = {"optimizer": {"type": "Adam", "params": {"lr": 0}}}
    (warning,) = resolve(still).warnings
    assert "`optimizer.params.lr` is 0: no parameter changes" in warning
    assert resolve({**still, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}).warnings == []


def test_a_node_size_below_stage_3_is_said() -> None:
    zero = {"stage": 2, "zero_hpz_partition_size": 8}
    (warning,) = resolve({"zero_optimization": zero}).warnings
    assert "zero_hpz_partition_size" in warning and "no effect" in warning
    assert resolve({"zero_optimization": {**zero, "stage": 3}}).warnings == []


def test_experts_that_nothing_divides_are_said() -> None:
    (warning,) = resolve({"expert_parallel": {"enabled": True}}).warnings
    assert "`expert_parallel.autoep_size` is missing; using 1: every rank holds all experts" in warning
    for section in ({"enabled": True, "autoep_size": 2}, {"enabled": False}):
        assert resolve({"expert_parallel": section}).warnings == []


@pytest.mark.parametrize(
    ("section", "kind", "params", "words"),
    [
        ("optimizer", "Adagrad", {"lr_decay": "boom"}, 'lr_decay` is "boom"; allowed: a number'),
        ("optimizer", "Adagrad", {"lr_decay": math.nan}, "lr_decay` is nan; allowed: a finite number"),
        ("optimizer", "Adagrad", {"lr_decay": -1}, "lr_decay` is -1; allowed: a number, at least 0"),
        ("optimizer", "Adagrad", {"maximize": "boom"}, 'maximize` is "boom"; allowed: true or false'),
        ("optimizer", "Rprop", {"etas": [0.5, "nan"]}, "etas` is [0.5, 'nan']; allowed: a finite number"),
        ("scheduler", "StepLR", {"step_size": 1, "gamma": "-0.1"}, 'gamma` is "-0.1"; allowed: a number, at least 0'),
        ("scheduler", "StepLR", {"step_size": math.inf}, "step_size` is inf; allowed: a finite number"),
    ],
)
def test_arguments_of_torch_classes(section: str, kind: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve({section: {"type": kind, "params": params}})
    assert words in str(error.value)
    assert resolve({"scheduler": {"type": "StepLR", "params": {"step_size": 5, "last_epoch": -1, "gamma": "0.1"}}}).warnings == []
