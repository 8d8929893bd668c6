"""Every key that may say "auto" says it through accelerate's plugin, which Trainer uses too; the list is read off the schema."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hf_zero.config.auto import AUTO_RULES
from hf_zero.config.keys import extra_of, nested_of
from hf_zero.config.problems import RefusedKeyError
from hf_zero.config.resolve import resolve
from hf_zero.config.schema.fields import Section
from hf_zero.config.schema.root import ZeroConfig
from tests.support import ranks


def _auto_keys(section: type[Section] = ZeroConfig, path: str = "") -> Iterator[str]:
    """Keys whose own value may be "auto", and those that a rule fills."""
    for name, field in section.model_fields.items():
        here = f"{path}.{name}" if path else name
        nested = nested_of(section, name)
        if nested is not None and nested.kind == "one":
            yield from _auto_keys(nested.section, here)
        elif here in AUTO_RULES or extra_of(field).get("auto_is_value") or "'auto'" in str(field.annotation) + str(field.metadata):
            yield here


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[name] = value


def _through_the_plugin(keys: list[str]) -> None:
    from accelerate import DeepSpeedPlugin

    for key in keys:
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
        config |= {"optimizer": {"type": "OneBitAdam" if key.endswith("freeze_step") else "AdamW"}, "scheduler": {"type": "WarmupDecayLR"}}
        config["scheduler"]["params"] = {"total_num_steps": 10}
        _put(config, key, "auto")
        with suppress(RefusedKeyError):  # a section that is refused whatever stands in it
            plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config))
            plugin.deepspeed_config_process(
                must_match=False, **{"train_micro_batch_size_per_gpu": 1, "scheduler.params.total_num_steps": 10}
            )
            resolve(plugin.deepspeed_config, world_size=1, sources={"total_num_steps": 10})


def _trains_through_trainer(folder: str) -> None:
    """Our own sections on "auto" in one run."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}
    for key in ("hf_zero.gather_for_generation", "hf_zero.offload_overlap", "pipeline.micro_batches", "pipeline.stages"):
        _put(config, key, "auto")
    arguments = TrainingArguments(
        folder, deepspeed=config, max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    assert Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=data).train().global_step == 1


def test_every_key_that_takes_auto_takes_it_through_accelerate() -> None:
    keys = list(_auto_keys())
    assert {"pipeline.micro_batches", "hf_zero.offload_overlap", "zero_optimization.reduce_bucket_size"} <= set(keys)
    ranks.run_ranks(_through_the_plugin, 1, keys)


def test_our_keys_on_auto_train_through_trainer(tmp_path: Any) -> None:
    ranks.run_ranks(_trains_through_trainer, 2, str(tmp_path), group=False)
