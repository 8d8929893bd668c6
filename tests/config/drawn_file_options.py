"""DeepSpeed configuration files and the scripts around them, drawn by a seed, as plain JSON that any interpreter reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]
DEFAULTS: Case = {
    "world": 2,  # ranks
    "config": {},
    "model": "plain",  # or "sparse", "unused", "frozen": see Net in the worker; "hf", "tied": transformers' from_config
    "client_optimizer": None,  # a class of torch.optim, or "callable" and a class
    "client_scheduler": None,  # "lambda", "step", "callable"
    "scheduler_by_hand": False,  # the script steps the client's scheduler itself, too
    "groups": None,  # "decay", "rates": two param groups
    "parameters": True,  # model_parameters is given
    "rows": 0,  # of training_data; 0 is no training_data
    "zero_init": False,  # the model is made inside zero.Init, or while HfDeepSpeedConfig lives
    "every": 0,  # micro-steps between updates of a script that counts by itself; 0 is gradient_accumulation_steps
    "loop": "plain",  # "boundary" (set_gradient_accumulation_boundary, step at boundaries), "no_sync"
    "factor": 1.0,  # of the loss, in the micro-steps "factor_at", on rank 0
    "factor_at": [],
    "eval_every": 0,
    "save_at": 0,  # optimizer steps before a checkpoint; 0 is none
    "tag": None,
    "fresh": False,  # a new engine reads the checkpoint
    "load": {},  # arguments of load_checkpoint
    "steps": 4,
}


def full(given: Case) -> Case:
    return {**DEFAULTS, **given}


def changed(case: Case) -> Case:
    """Return the options that differ from their defaults; ``full`` adds the others."""
    return {name: value for name, value in case.items() if value != DEFAULTS[name]}


# -- sections ----------------------------------------------------------------------------------------------------------


def batch_of(random_: random.Random) -> dict[str, int]:
    micro, every = random_.choice([1, 2, 3]), random_.choice([1, 2, 3])
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = dict(zip(names, (micro * every * 2, micro, every), strict=True))
    kept = random_.choice([names, names[:2], names[::2], names[1:], names[:1], names[1:2]])
    return {name: values[name] for name in kept}


def optimizer_of(random_: random.Random) -> dict[str, Any]:
    kind = random_.choice(["Adam", "AdamW", "Adam", "AdamW", "SGD", "Adagrad", "Lion", "Muon", "RMSprop", "adam", "NAdam"])
    params: dict[str, Any] = {"lr": random_.choice([1e-2, 3e-3])}
    if random_.random() < 0.1:
        del params["lr"]
    options: dict[str, dict[str, list[Any]]] = {
        "adam": {
            "betas": [[0.8, 0.95], [0.9, 0.999]], "eps": [1e-6, 1e-3], "weight_decay": [0.1, 0.01], "adam_w_mode": [True, False],
            "bias_correction": [True, False], "torch_adam": [True, False], "amsgrad": [False],
        },
        "sgd": {"momentum": [0.9], "weight_decay": [0.1], "nesterov": [False]},
        "adagrad": {"eps": [1e-6], "weight_decay": [0.1]},
        "lion": {"betas": [[0.8, 0.95]], "weight_decay": [0.1]},
        "muon": {
            "momentum": [0.9, 0.95], "weight_decay": [0.1], "muon_lr": [1e-2], "adam_lr": [1e-3], "ns_method": ["gram", "standard"],
            "betas": [[0.8, 0.95]],
        },
        "rmsprop": {"alpha": [0.9], "momentum": [0.5]},
        "nadam": {"weight_decay": [0.1]},
    }  # fmt: skip
    kinds = options["adam" if kind.lower() == "adamw" else kind.lower()]
    for name in random_.sample(sorted(kinds), random_.randint(0, min(3, len(kinds)))):
        params[name] = random_.choice(kinds[name])
    return {"type": kind, "params": params}


def scheduler_of(random_: random.Random) -> dict[str, Any]:
    kind = random_.choice(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"])
    options: dict[str, dict[str, list[Any]]] = {
        "WarmupLR": {
            "warmup_min_lr": [0, 1e-3], "warmup_max_lr": [2e-2, None], "warmup_num_steps": [1, 2, 3, 10],
            "warmup_type": ["linear", "log"],
        },
        "WarmupDecayLR": {
            "warmup_min_lr": [0, 1e-3], "warmup_max_lr": [2e-2], "warmup_num_steps": [1, 2, 3], "warmup_type": ["linear", "log"],
            "total_num_steps": [2, 4, 10],
        },
        "WarmupCosineLR": {
            "warmup_min_ratio": [0.1], "cos_min_ratio": [0.2], "warmup_num_steps": [1, 2, 3], "warmup_type": ["linear", "log"],
            "total_num_steps": [3, 4, 10],
        },
        "OneCycle": {
            "cycle_min_lr": [1e-3], "cycle_max_lr": [1e-2], "decay_lr_rate": [0.5], "cycle_first_step_size": [2, 3],
            "cycle_second_step_size": [1, 3], "cycle_first_stair_count": [2], "cycle_second_stair_count": [2],
            "decay_step_size": [1, 2], "cycle_momentum": [True, False],
            "cycle_min_mom": [0.7], "cycle_max_mom": [0.95], "decay_mom_rate": [0.1],
        },
        "LRRangeTest": {
            "lr_range_test_min_lr": [1e-3, 1e-4], "lr_range_test_step_size": [1, 2],
            "lr_range_test_step_rate": [1.0, 2.5], "lr_range_test_staircase": [True, False],
        },
    }  # fmt: skip
    kinds = options[kind]
    needed = {"total_num_steps", "cycle_min_lr", "cycle_max_lr", "cycle_first_step_size", "lr_range_test_min_lr", "lr_range_test_step_size"}
    params = {name: random_.choice(kinds[name]) for name in kinds if name in needed or random_.random() < 0.6}
    return {"type": kind, "params": params}


def fp16_of(random_: random.Random, case: Case) -> dict[str, Any]:
    section: dict[str, Any] = {"enabled": True}
    options = {
        "loss_scale": [0, 128.0, 1], "initial_scale_power": [4, 8, 16, 32], "loss_scale_window": [1, 2, 3], "hysteresis": [1, 2, 3],
        "consecutive_hysteresis": [True, False], "min_loss_scale": [1, 64], "auto_cast": [True, False],
    }  # fmt: skip
    for name in random_.sample(sorted(options), random_.randint(1, 5)):
        section[name] = random_.choice(options[name])
    if random_.random() < 0.6:
        case["factor"] = random_.choice([1e30, float("inf")])
        case["factor_at"] = sorted(random_.sample(range(8), random_.randint(1, 4)))
    case["steps"] = 7
    return section


def bf16_of(random_: random.Random, case: Case) -> dict[str, Any]:
    section: dict[str, Any] = {"enabled": True}
    for name in random_.sample(
        ["immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states"], random_.randint(0, 2)
    ):
        section[name] = random_.random() < 0.6
    if random_.random() < 0.3:
        case["factor"], case["factor_at"] = float("inf"), [random_.randint(0, 4)]
    return section


ZERO: dict[str, list[Any]] = {
    "overlap_comm": [True, False], "contiguous_gradients": [True, False], "round_robin_gradients": [True], "reduce_scatter": [True, False],
    "allgather_partitions": [True, False], "reduce_bucket_size": [50, 1000], "allgather_bucket_size": [50, 1000],
    "sub_group_size": [100, 1000],
    "stage3_param_persistence_threshold": [0, 100], "stage3_max_live_parameters": [100], "stage3_max_reuse_distance": [0, 100],
    "stage3_prefetch_bucket_size": [0, 100], "ignore_unused_parameters": [True, False], "elastic_checkpoint": [False],
    "use_multi_rank_bucket_allreduce": [True, False], "zero_hpz_partition_size": [1, 2],
    "stage3_gather_16bit_weights_on_model_save": [True, False], "load_from_fp32_weights": [True, False],
}  # fmt: skip


def zero_of(random_: random.Random) -> dict[str, Any]:
    stage = random_.choice([0, 1, 2, 3, 3])
    section: dict[str, Any] = {"stage": stage}
    for name in random_.sample(sorted(ZERO), random_.randint(0, 4)):
        section[name] = random_.choice(ZERO[name])
    if stage and random_.random() < 0.25:
        section["offload_optimizer"] = {"device": "cpu"}
    if stage == 3 and random_.random() < 0.2:
        section["offload_param"] = {"device": "cpu"}
    return section


# -- habits and other keys -----------------------------------------------------------------------------------------------


def _key(name: str, *values: Any) -> Callable[[random.Random, Case], None]:
    def change(random_: random.Random, case: Case) -> None:
        case["config"][name] = random_.choice(values)

    return change


def _option(name: str, *values: Any) -> Callable[[random.Random, Case], None]:
    def change(random_: random.Random, case: Case) -> None:
        case[name] = random_.choice(values)

    return change


def _saves(random_: random.Random, case: Case) -> None:
    case["save_at"], case["tag"], case["fresh"] = random_.choice([1, 2, 3]), random_.choice([None, "mine"]), random_.random() < 0.5
    names = ("load_optimizer_states", "load_lr_scheduler_states", "load_module_only")
    case["load"] = {name: random_.random() < 0.5 for name in random_.sample(names, random_.randint(0, 2))}


def _loops(random_: random.Random, case: Case) -> None:
    case["loop"], case["every"] = random_.choice(["boundary", "no_sync"]), random_.choice([0, 2])


def _csv(random_: random.Random, case: Case) -> None:
    case["config"]["csv_monitor"] = {"enabled": True, "output_path": "FOLDER/csv", "job_name": "job"}
    if random_.random() < 0.5:
        case["config"]["steps_per_print"] = random_.choice([1, 2])


OTHERS: list[Callable[[random.Random, Case], None]] = [
    _key("gradient_clipping", 0, 0.1, 1.0, 100.0),
    _key("prescale_gradients", True),
    lambda random_, case: case["config"].update(prescale_gradients=True, gradient_predivide_factor=random_.choice([2.0, 4])),
    _key("gradient_predivide_factor", 2.0),
    _key("communication_data_type", "fp32", "bf16", "fp16"),
    _key("seq_parallel_communication_data_type", "fp32", "bf16"),
    _key("gradient_allreduce_op", "sum", "mean"),
    _option("model", "sparse", "unused", "frozen", "hf", "tied", "hf"),
    lambda random_, case: case["config"].update(data_types={"grad_accum_dtype": random_.choice(["fp32", "bf16", "fp16"])}),
    _key("wall_clock_breakdown", True),
    _key("steps_per_print", 1, 2),
    _key("dump_state", True),
    _key("memory_breakdown", True),
    _key("disable_allgather", False),
    _key("zero_allow_untested_optimizer", True, False),
    _key("zero_force_ds_cpu_optimizer", True, False),
    _key("dataloader_drop_last", True),
    _key("checkpoint", {"tag_validation": "Fail"}, {"tag_validation": "Ignore"}, {"use_node_local_storage": False}),
    _key("managed_gradient_accumulation", False),
    _key("flops_profiler", {"enabled": True, "profile_step": 1, "output_file": "FOLDER/flops"}),
    _key("timers", {"throughput": {"enabled": False}}),
    _key("fp16", {"enabled": False, "loss_scale": 0}),
    _key("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),
    _option("groups", "decay", "rates"),
    _option("rows", 29, 40),
    _option("eval_every", 1, 2),
    _option("parameters", False),
    _option("client_scheduler", "lambda", "step", "callable"),
    _csv, _saves, _saves, _loops,
]  # fmt: skip


def draw(random_: random.Random) -> Case:
    """Draw one file and its script."""
    case = dict(DEFAULTS)
    config: dict[str, Any] = batch_of(random_)
    case["config"] = config
    if random_.random() < 0.75:
        config["optimizer"] = optimizer_of(random_)
    else:
        case["client_optimizer"] = random_.choice(["adam", "adamw", "sgd", "rmsprop", "callable adamw", "callable sgd"])
    if random_.random() < 0.5:
        config["scheduler"] = scheduler_of(random_)
    if random_.random() < 0.85:
        config["zero_optimization"] = zero_of(random_)
    for change in random_.sample(OTHERS, random_.randint(1, 5)):
        change(random_, case)
    case["zero_init"] = config.get("zero_optimization", {}).get("stage") == 3 and random_.random() < 0.4
    precision = random_.choice(["fp32", "fp32", "fp16", "bf16"])
    if precision != "fp32":
        config[precision] = fp16_of(random_, case) if precision == "fp16" else bf16_of(random_, case)
        config.pop("torch_autocast", None)
    return made_valid(case)


def made_valid(case: Case) -> Case:
    """Change options that DeepSpeed refuses together, or on CPU."""
    config = case["config"]
    zero = config.get("zero_optimization", {})
    if config.get("fp16", {}).get("enabled") and not zero.get("stage"):
        config["zero_optimization"] = zero = {**zero, "stage": 1}  # at stage 0 DeepSpeed does not scale the loss
    stage, kind = zero.get("stage", 0), config.get("optimizer", {}).get("type", "").lower()
    if "data_types" in config and not stage:
        del config["data_types"]
    if kind == "lion":
        config["zero_optimization"] = zero = {**zero, "stage": max(stage, 1), "offload_optimizer": {"device": "cpu"}}
        stage = zero["stage"]
    if stage and ("prescale_gradients" in config or "gradient_predivide_factor" in config):
        zero["reduce_scatter"] = False
        if stage == 3:
            config.pop("prescale_gradients", None), config.pop("gradient_predivide_factor", None)
    if stage == 3:
        config.pop("gradient_allreduce_op", None)
    if stage and kind not in ("adam", "adamw", "lion", "adagrad"):
        config["zero_allow_untested_optimizer"] = True
    if "offload_optimizer" in zero and kind not in ("adam", "adamw", "lion", "adagrad"):
        config["zero_force_ds_cpu_optimizer"] = False
    if case["model"] == "sparse":
        case["model"] = "sparse" if kind == "sgd" and not stage and "weight_decay" not in config["optimizer"]["params"] else "plain"
    if not (stage and "offload_optimizer" in zero and kind in ("adam", "adamw")):
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            config.get("bf16", {}).pop(name, None)
    if kind == "muon":
        config["gradient_clipping"] = 0  # DeepSpeed clips the orthogonal matrix instead of the gradient
        zero["reduce_scatter"] = False
    if case["loop"] == "no_sync" and stage > 1:
        case["loop"] = "boundary"
    if config.get("managed_gradient_accumulation") is False:
        case["loop"] = "plain"
    return case
