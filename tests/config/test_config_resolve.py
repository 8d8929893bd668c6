""" "auto", batch arithmetic, mismatches and origins, against what accelerate and transformers fill."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.config.auto import AUTO_RULES, SOURCE_NAMES, hidden_size_of, infer_sources_from_model
from hf_zero.config.keys import all_keys
from hf_zero.config.resolve import analyse, resolve
from hf_zero.config.table import rows_of
from hf_zero.errors import ConfigError
from tests.support.rows import each

ROOT = Path(__file__).parents[2]

TRAINER_CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}

SOURCES: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "learning_rate": 5e-5,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-7,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_num_steps": 0,
    "total_num_steps": 100,
    "hidden_size": 30,
    "fp16": False,
    "bf16": True,
}


def numbers(config: Any) -> tuple[int, int, int]:
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


# ------------------------------------------------------------------------------------------------------------------- auto


def test_auto_takes_the_sources() -> None:
    resolved = resolve(TRAINER_CONFIG, world_size=2, sources=SOURCES)
    config = resolved.config
    assert numbers(config) == (24, 4, 3)
    assert config.gradient_clipping == 0.5
    assert config.optimizer is not None and config.scheduler is not None
    assert config.optimizer.params == {"lr": 5e-5, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    assert config.scheduler.params == {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 1, "total_num_steps": 100}
    assert (config.fp16.enabled, config.bf16.enabled) == (False, True)
    assert config.zero_optimization.reduce_bucket_size == 900
    assert config.zero_optimization.stage3_prefetch_bucket_size == 810
    assert config.zero_optimization.stage3_param_persistence_threshold == 300
    assert resolved.origin["optimizer.params.betas"] == "auto <- adam_beta1 + adam_beta2"
    assert resolved.origin["zero_optimization.reduce_bucket_size"] == "auto <- hidden_size"
    assert resolved.origin["zero_optimization.stage"] == "file"
    assert resolved.origin["train_batch_size"].startswith("derived")


_FILL_WITH_TRANSFORMERS = """
import json, sys
import _hf_zero_startup  # transformers wants a distribution named deepspeed
from types import SimpleNamespace
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

config = HfTrainerDeepSpeedConfig(json.loads(sys.argv[1]))
config.trainer_config_process(SimpleNamespace(**json.loads(sys.argv[2])))
args = SimpleNamespace(get_warmup_steps=lambda steps: 0)
config.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=30)), 100)
print(json.dumps(config.config))
"""


def test_auto_equals_what_transformers_fills() -> None:
    """The same file, filled by the Trainer's own code and by ours."""
    pytest.importorskip("transformers")
    names = {
        "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "learning_rate", "adam_beta1", "adam_beta2",
        "adam_epsilon", "weight_decay", "fp16", "bf16",
    }  # fmt: skip
    arguments: dict[str, Any] = {name: SOURCES[name] for name in names}
    arguments |= {"world_size": 2, "save_on_each_node": False, "fp16_full_eval": False, "bf16_full_eval": False}
    command = [sys.executable, "-c", _FILL_WITH_TRANSFORMERS, json.dumps(TRAINER_CONFIG), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "HF_ZERO": "1"}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert resolve(theirs, world_size=2).config == resolve(TRAINER_CONFIG, world_size=2, sources=SOURCES).config


def test_auto_without_sources_takes_defaults() -> None:
    resolved = resolve(TRAINER_CONFIG)
    assert numbers(resolved.config) == (1, 1, 1)
    assert resolved.config.gradient_clipping == 1.0
    assert resolved.config.optimizer is not None
    assert resolved.config.optimizer.params == {}, "the optimizer's own defaults apply"
    assert resolved.config.zero_optimization.reduce_bucket_size == 500_000_000
    assert resolved.origin["gradient_clipping"] == "default (auto: max_grad_norm not given)"


@pytest.mark.parametrize("section", ["zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "tensorboard", "aio"])
def test_a_whole_section_may_be_auto(section: str) -> None:
    assert resolve({section: "auto"}).config == resolve({}).config


AUTO_PATHS = [path for path, key in all_keys().items() if not key.is_section and not any(mark in path for mark in ("*", "<", "[]"))]


def test_keys_of_fp16_in_bf16_have_no_effect() -> None:
    """Files that FlagEmbedding and Tevatron ship have the same keys in both sections."""
    scale = {"loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    config = TRAINER_CONFIG | {"fp16": {"enabled": "auto", **scale}, "bf16": {"enabled": "auto", **scale}}
    found, expected = (resolve(one, world_size=2, sources=SOURCES) for one in (config, TRAINER_CONFIG))
    assert found.config.bf16.enabled and found.config.zero_optimization == expected.config.zero_optimization
    fates = {row.key: row.fate for row in found.table()}
    assert {fates[f"bf16.{name}"] for name in scale} == {"accepted"} and fates["bf16.enabled"] == "used"


def test_keys_that_image_models_write_have_no_effect() -> None:
    """Scripts that were made from BEiT's (EVA, EVA-CLIP) write the mode of Adam beside its params, and a profiler that profiles no step."""
    profiler = {"enabled": True, "profile_step": -1, "module_depth": -1, "top_modules": 1, "detailed": True}
    optimizer = {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-3, "bias_correction": True}}
    found = resolve({"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "flops_profiler": profiler})
    assert found.config.flops_profiler is not None and found.config.flops_profiler.profile_step == -1
    assert {row.key: row.fate for row in found.table()}["optimizer.adam_w_mode"] == "accepted"
    with pytest.raises(ConfigError, match=r"profile_step.* is -2"):
        resolve({"flops_profiler": profiler | {"profile_step": -2}})


def test_auto_is_accepted_for_every_key() -> None:
    """Whatever a file leaves to "auto" has a value afterwards, or is gone; only keys for which "auto" is a value keep it."""

    def check(path: str) -> None:
        config: dict[str, Any] = {}
        block = config
        *sections, name = path.split(".")
        for section in sections:
            block = block.setdefault(section, {})
        block[name] = "auto"
        for section, kind in (("optimizer", "SGD"), ("scheduler", "WarmupLR")):
            if section in config:
                config[section]["type"] = "OneBitAdam" if name == "freeze_step" else kind
        if "zeropp_loco_param" in sections:
            config["zero_optimization"].update(stage=1, zero_quantized_gradients=True)
            config["bf16"] = {"enabled": True}
        try:
            resolved = resolve(config).resolved
        except ConfigError as error:  # a section whose mere presence asks for something
            assert all_keys()[path].fate == "refused", str(error)
            return
        for step in path.split("."):
            resolved = resolved.get(step, {}) if isinstance(resolved, dict) else resolved
        assert resolved != "auto" or all_keys()[path].default == "auto" or name == "freeze_step"

    each([path for path in AUTO_PATHS if path not in ("optimizer.type", "scheduler.type")], check)


def test_a_learning_rate_in_the_file_serves_the_scheduler() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "2e-4"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }
    resolved = resolve(config)
    assert resolved.config.scheduler is not None
    assert resolved.config.scheduler.params == {"warmup_max_lr": 2e-4}
    assert resolved.origin["scheduler.params.warmup_max_lr"] == "auto <- optimizer.params.lr"


def test_the_copy_that_zero_init_gets() -> None:
    """accelerate hands transformers a copy whose batch keys are 1 and whose other "auto" values still stand."""
    config = {**TRAINER_CONFIG, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1}
    del config["train_batch_size"]
    assert resolve(config, world_size=4).config.train_batch_size == 4


def test_what_accelerate_writes() -> None:
    config = {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 1.0, "steps_per_print": float("inf"), "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": False},
    }  # fmt: skip
    resolved = resolve(config, world_size=2, strict=True)
    assert resolved.config.steps_per_print is None
    assert resolved.raw["steps_per_print"] == float("inf")
    assert resolved.config.zero_optimization.overlap_comm is True


def test_a_published_stage_2_file() -> None:
    """As tutorials print it: booleans in quotes, numbers in scientific notation, what the launcher knows left to "auto"."""
    config = {
        "fp16": {"enabled": "true", "loss_scale": 0, "loss_scale_window": 1e3, "initial_scale_power": 15, "min_loss_scale": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}},
        "scheduler": TRAINER_CONFIG["scheduler"],
        "zero_optimization": {
            "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True,
            "reduce_bucket_size": 2e8, "contiguous_gradients": True,
        },
        "gradient_accumulation_steps": 1, "gradient_clipping": "auto", "steps_per_print": 2000, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
    }  # fmt: skip
    sources = {"per_device_train_batch_size": 16, "learning_rate": 3e-5, "weight_decay": 0.0, "total_num_steps": 50, "warmup_num_steps": 5}
    resolved = resolve(config, world_size=2, sources=sources, strict=True)
    assert numbers(resolved.config) == (32, 16, 1)
    assert resolved.config.fp16.enabled and resolved.config.fp16.initial_scale_power == 15
    assert resolved.config.zero_optimization.allgather_bucket_size == 200_000_000
    assert resolved.config.optimizer is not None
    assert resolved.config.optimizer.params == {"lr": 3e-5, "weight_decay": 0.0, "torch_adam": True, "adam_w_mode": True}
    assert (resolved.config.gradient_clipping, resolved.config.steps_per_print) == (1.0, 2000)


def test_unknown_source_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        resolve({}, sources={"learning_rat": 1})


def test_every_rule_fills_a_key_that_exists() -> None:
    assert set(AUTO_RULES) <= set(all_keys())
    assert "world_size" in SOURCE_NAMES


def test_the_source_is_not_changed() -> None:
    config = copy.deepcopy(TRAINER_CONFIG)
    resolved = resolve(config, sources=SOURCES)
    assert config == TRAINER_CONFIG
    assert resolved.raw == TRAINER_CONFIG


# ------------------------------------------------------------------------------------------------------------------ batch


@pytest.mark.parametrize(
    ("total", "micro", "accumulation", "world", "expected"),
    [
        (None, None, None, 2, (2, 1, 1)),
        (None, 4, None, 2, (8, 4, 1)),
        (None, 4, 3, 2, (24, 4, 3)),
        (None, None, 3, 2, (6, 1, 3)),
        (24, None, None, 2, (24, 12, 1)),
        (24, 4, None, 2, (24, 4, 3)),
        (24, None, 3, 2, (24, 4, 3)),
        (24, 4, 3, 2, (24, 4, 3)),
        (24, 4, "auto", 2, (24, 4, 3)),
        (24, "auto", 3, 2, (24, 4, 3)),
    ],
)
def test_any_two_give_the_third(total: Any, micro: Any, accumulation: Any, world: int, expected: tuple[int, int, int]) -> None:
    config = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    resolved = resolve({key: value for key, value in config.items() if value is not None}, world_size=world)
    assert numbers(resolved.config) == expected
    assert (resolved.batch.total, resolved.batch.micro, resolved.batch.accumulation) == expected


@pytest.mark.parametrize(
    ("config", "world", "said"),
    [
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            2,
            r"4 \(train_micro_batch_size_per_gpu\) x 2 \(gradient_accumulation_steps\) x 2 \(data-parallel size\) = 16. Give any two",
        ),
        ({"train_batch_size": 25}, 2, r"a multiple of 2 \(data-parallel size\). Set it to a multiple of 2$"),
        ({"train_batch_size": 1}, 2, r"a multiple of 2 \(data-parallel size\). Set it to a multiple of 2$"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            2,
            r"a multiple of 4 \(train_micro_batch_size_per_gpu\) x 2 \(data-parallel size\) = 8. Set it to a multiple of 8$",
        ),
        (
            {"train_batch_size": 10, "gradient_accumulation_steps": 4},
            1,
            r"a multiple of 4 \(gradient_accumulation_steps\) x 1 \(data-parallel size\) = 4. Set it to a multiple of 4$",
        ),
    ],
)
def test_numbers_that_do_not_fit(config: dict[str, int], world: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"`train_batch_size` does not fit: {config['train_batch_size']} is not {said}"):
        resolve(config, world_size=world)
    assert f"{config['train_batch_size']} is not train_micro" in analyse(config, world_size=world).batch.line()


def test_world_size_as_a_source() -> None:
    assert resolve({"train_micro_batch_size_per_gpu": 4}, sources={"world_size": 3}).config.train_batch_size == 12


# ------------------------------------------------------------------------------------------------------------- mismatches


def test_mismatches_are_reported_together() -> None:
    config = copy.deepcopy(TRAINER_CONFIG)
    config["train_micro_batch_size_per_gpu"] = 8
    config["gradient_clipping"] = 1.0
    config["optimizer"]["params"].update(lr=1e-3, betas=[0.9, 0.999])
    config["train_batch_size"] = 48
    with pytest.raises(ConfigError) as error:
        resolve(config, world_size=2, sources=SOURCES)
    text = str(error.value)
    assert text.startswith("Please correct the following DeepSpeed config values")
    found = re.findall(r"- ds (\S+)=(\S.*) vs (\S.*)=(\S.*)", text)
    assert [(key, value, wanted) for key, value, _, wanted in found] == [
        ("train_micro_batch_size_per_gpu", "8", "4"),
        ("gradient_clipping", "1.0", "0.5"),
        ("optimizer.params.lr", "0.001", "5e-05"),
        ("optimizer.params.betas", "[0.9, 0.999]", "[0.8, 0.95]"),
        ("train_batch_size", "48", "24"),
    ]
    assert "'auto'" in text or '"auto"' in text
    assert text.endswith('set these values to "auto" in the DeepSpeed config.')
    with pytest.raises(ConfigError, match=r"; to keep them, give the arguments the same values: --max_grad_norm 1.0 --bf16 true\.$"):
        resolve({"gradient_clipping": 1.0, "bf16": {"enabled": True}}, sources={"max_grad_norm": 0.5, "bf16": False})


def test_equal_values_in_another_form_are_no_mismatch() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "5e-5", "betas": (0.8, "0.95")}}, "gradient_clipping": 5e-1}
    assert resolve(config, sources=SOURCES).config.gradient_clipping == 0.5


def test_the_file_wins_when_sources_need_not_match() -> None:
    config = {"train_micro_batch_size_per_gpu": 8}
    assert resolve(config, sources=SOURCES, match_sources=False).config.train_micro_batch_size_per_gpu == 8


# ------------------------------------------------------------------------------------------------------------ hidden sizes


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"hidden_size": 64}, 64),
        ({"hidden_sizes": [16, 128, 32]}, 128),
        ({"d_model": 48}, 48),
        ({"n_embd": 32}, 32),
        ({"text_config": {"hidden_size": 24}, "vision_config": {"hidden_size": 99}}, 24),
        ({"text_config": {"hidden_sizes": [1, 2]}}, 2),
        ({"decoder": {"d_model": 12}}, 12),
        ({"hidden_size": None, "d_model": 8}, 8),
        ({"layers": 3}, None),
    ],
)
def test_hidden_size_of_configs(config: dict[str, Any], size: int | None) -> None:
    assert hidden_size_of(config) == size
    namespace = SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in config.items()})
    assert hidden_size_of(namespace) == size
    assert hidden_size_of(SimpleNamespace(config=namespace)) == size
    assert infer_sources_from_model(namespace) == ({} if size is None else {"hidden_size": size})


@pytest.mark.parametrize(("name", "arguments", "size"), [("GPT2Config", {"n_embd": 48}, 48), ("T5Config", {"d_model": 40}, 40)])
def test_hidden_size_of_saved_models(name: str, arguments: dict[str, int], size: int, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    getattr(transformers, name)(**arguments).save_pretrained(tmp_path)
    assert infer_sources_from_model(str(tmp_path)) == {"hidden_size": size}
    assert infer_sources_from_model(str(tmp_path / "config.json")) == {"hidden_size": size}


def test_model_that_cannot_be_loaded(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="no local config"):
        infer_sources_from_model(str(tmp_path))


# ----------------------------------------------------------------------------------------------------------------- import


def test_import_is_light() -> None:
    code = (
        "import sys, hf_zero.config.resolve as r; r.resolve({'optimizer': {'type': 'AdamW', 'params': {'lr': 1}}}); "
        "print([m for m in ('transformers', 'accelerate', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("zero_optimization.stage3_max_live_parameters", "1GB", ["a whole number, at least 0 without a unit", "elements, not bytes"]),
        ("zero_optimization.sub_group_size", "1 GiB", ["elements, not bytes"]),
        ("aio.block_size", "8MiB", ["without a unit, such as 8388608"]),
        ("aio.block_size", "8 M", ["such as 8000000"]),
        ("zero_optimization.stage3_max_live_parameters", "many", ["allowed: a whole number, at least 0 (default"]),
    ],
)
def test_a_size_with_a_unit_is_told_what_it_counts(path: str, value: str, words: list[str]) -> None:
    section, _, name = path.partition(".")
    (line,) = analyse({section: {name: value}}).problems.errors
    assert line.startswith(f'`{path}` is "{value}"; allowed: ')
    for word in words:
        assert word in line


def test_a_value_that_is_not_allowed_is_not_listed_as_the_default() -> None:
    found = analyse({"fp16": {"enabled": True, "loss_scale": -1}})
    rows = {row.key: row for row in rows_of(found.resolved, found.origin)}
    assert rows["fp16.loss_scale"][1:3] == ("(see the error)", "file (not allowed)")
