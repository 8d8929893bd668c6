"""DeepSpeed files as axolotl and LLaMA-Factory publish them, under Trainer: the logs of DDP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, trainers
from tests.support.rows import slow_but

BATCHES = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
CLIPPED = {**BATCHES, "gradient_clipping": "auto"}
SCALE = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
PINNED = {"device": "cpu", "pin_memory": True}

_AXOLOTL = {"bf16": {"enabled": "auto"}, "fp16": {**SCALE, "auto_cast": False, "initial_scale_power": 32}, "wall_clock_breakdown": False}
_AXOLOTL_16 = {"bf16": {"enabled": True}, "wall_clock_breakdown": False, **CLIPPED}
_OWN_ADAM = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
_ADAM = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
_AXOLOTL_3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto"}
_PREFETCH = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
# Spelled as DeepSpeed's older versions did; these files mix both spellings.
_OLD_LIMITS = {"max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True}
_LIMITS = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_gather_16bit_weights_on_model_save": True}

_FACTORY = {**CLIPPED, "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"}, "fp16": {**SCALE, "initial_scale_power": 16}}
_FACTORY_2 = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
_FACTORY_3 = {
    "stage": 3,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    **_PREFETCH,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_OFFLOADED = {"offload_optimizer": PINNED, "offload_param": PINNED}

FILES: dict[str, dict[str, Any]] = {
    "axolotl zero1": {"zero_optimization": {"stage": 1, "overlap_comm": True}, **_AXOLOTL, "optimizer": _ADAM, **BATCHES},
    "axolotl zero1_torch_compile": {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "compile": {"disable": False, "backend": "inductor"},
        **_AXOLOTL,
        **CLIPPED,
    },
    "axolotl zero2": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True},
        **_AXOLOTL,
        **CLIPPED,
    },
    "axolotl zero3": {"zero_optimization": {**_AXOLOTL_3, **_PREFETCH, **_LIMITS}, **_AXOLOTL, **CLIPPED},
    "llamafactory z0": {**_FACTORY, "zero_optimization": {"stage": 0, **_FACTORY_2}},
    "llamafactory z2": {**_FACTORY, "zero_optimization": {"stage": 2, **_FACTORY_2}},
    "llamafactory z2_offload": {**_FACTORY, "zero_optimization": {"stage": 2, "offload_optimizer": PINNED, **_FACTORY_2}},
    "llamafactory z3": {**_FACTORY, "zero_optimization": _FACTORY_3},
    "llamafactory z3_offload": {**_FACTORY, "zero_optimization": {**_FACTORY_3, **_OFFLOADED}},
}
SIXTEEN_BIT: dict[str, dict[str, Any]] = {
    "axolotl zero3_bf16_cpuoffload_params": {
        **_OWN_ADAM,
        "zero_optimization": {**_AXOLOTL_3, "offload_param": PINNED, **_PREFETCH, **_OLD_LIMITS},
        **_AXOLOTL_16,
    },
    "axolotl zero3_bf16_cpuoffload_all": {
        **_OWN_ADAM,
        "zero_optimization": {**_AXOLOTL_3, **_OFFLOADED, **_PREFETCH, **_OLD_LIMITS},
        **_AXOLOTL_16,
    },
}


def _same_logs(models: Path, folder: Path, files: dict[str, dict[str, Any]], **options: Any) -> None:
    with trainers.clean_state():
        # bf16 of DDP is autocast, another arithmetic than ZeRO's: there the stages are compared with each other.
        plain = trainers.zero_config(2) if options else None
        expected = trainers.logs_of(trainers.train_with(models, folder / "plain", plain, "llama", **options))
        for name, config in files.items():
            trainer = trainers.train_with(models, folder / name, copy.deepcopy(config), "llama", **options)
            found = trainers.logs_of(trainer)
            if "optimizer" in config:  # the engine steps the schedule then, and Trainer logs the next step's rate
                found = [
                    {**entry, **{key: kept[key] for key in ("learning_rate",) if key in kept}}
                    for entry, kept in zip(found, expected, strict=True)
                ]
            trainers.assert_close(expected, found, name)
            assert trainer.model_wrapped.zero_optimization_stage() == config["zero_optimization"]["stage"]


@pytest.mark.parametrize("name", slow_but(FILES, "llamafactory z3_offload"))
def test_a_file_gives_the_logs_of_ddp(name: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_same_logs, 2, trainer_models, tmp_path, {name: FILES[name]}, timeout=200)


@pytest.mark.slow
def test_files_of_bf16_give_the_logs_of_stage_2(trainer_models: Path, tmp_path: Path) -> None:
    job = {"bf16": True, "use_cpu": True}
    ranks.run_ranks(_bf16, 2, trainer_models, tmp_path, job, timeout=200)


def _bf16(models: Path, folder: Path, options: dict[str, Any]) -> None:
    _same_logs(models, folder, SIXTEEN_BIT, **options)
