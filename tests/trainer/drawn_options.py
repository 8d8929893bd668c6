"""Options of Trainer runs, drawn by a seed: arguments of Trainer, and habits of the scripts around it."""

from __future__ import annotations

import random
from typing import Any

Drawn = dict[str, Any]
# Values of each option; the first is the default.
ARGUMENTS: dict[str, list[Any]] = {
    "per_device_train_batch_size": [2, 1, 3],
    "per_device_eval_batch_size": [2, 3, 4],
    "gradient_accumulation_steps": [2, 1, 3],
    "max_grad_norm": [1.0, 0.0, 0.05],
    "weight_decay": [0.1, 0.0],
    "optim": ["adamw_torch", "sgd", "adafactor", "adamw_torch_fused", "rmsprop", "adagrad"],
    "lr_scheduler_type": [
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_restarts",
        "cosine_with_min_lr", "reduce_lr_on_plateau", "warmup_stable_decay",
    ],
    "warmup_steps": [1, 0, 3],
    "label_smoothing_factor": [0.0, 0.1],
    "gradient_checkpointing": [False, "reentrant", "without"],
    "average_tokens_across_devices": [True, False],
    "dataloader_drop_last": [False, True],
    "include_num_input_tokens_seen": [False, True, "non_padding"],
    "logging_steps": [1, 2, 3],
    "logging_strategy": ["steps", "epoch"],
    "logging_first_step": [False, True],
    "eval_strategy": ["no", "steps", "epoch"],
    "eval_on_start": [False, True],
    "eval_accumulation_steps": [None, 1],
    "batch_eval_metrics": [False, True],
    "prediction_loss_only": [False, True],
    "neftune_noise_alpha": [None, 5.0],
    "accelerator_config": [
        None, {"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}, {"use_seedable_sampler": False},
    ],
    "full_determinism": [False, True],
    "torch_empty_cache_steps": [None, 1],
    "torch_compile": [False, True],
    "save_only_model": [False, True],
    "save_strategy": ["no", "steps", "epoch", "best"],
    "load_best_model_at_end": [False, True],
    "ignore_data_skip": [False, True],
    "auto_find_batch_size": [False, True],
}  # fmt: skip
OTHERS: dict[str, list[Any]] = {
    "model": ["gpt2", "llama", "t5"],
    "stage": [3, 2, 1, 0],
    "length": ["steps", "epochs"],
    "rows": [32, 29, 13],
    "data": ["rows", "ragged", "grouped", "iterable"],
    "dropout": [False, True],
    "adapters": [None, "lora", "lora with norms"],
    "frozen": [None, "embeddings", "first layer"],
    "loss": [None, "function", "compute_loss", "weighted"],
    "optimizer": [None, "override", "given", "layers"],
    "callback": [None, "freezes", "changes lr", "stops", "evaluates", "reads"],
    "resume": [0, 2, 3],
    "json": [None, "optimizer"],
    "offload": [None, "optimizer", "both"],
    "keys": [None, "overlap", "predivide", "round robin", "clipping", "hpz", "sub group", "threshold"],
    "twice": [False, True],
    "axis": [None],
}
AXES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "sequence": {"sequence_parallel_size": 2},
    "context": {"hf_zero": {"context_parallel_size": 2}},
    "ring": {"hf_zero": {"context_parallel_size": 2, "context_parallel_strategy": "alltoall"}},
    "pipeline": {"pipeline": {"stages": 2}},
}
KEYS: dict[str, dict[str, Any]] = {
    "overlap": {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 500}},
    "predivide": {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    "round robin": {"zero_optimization": {"round_robin_gradients": True}},
    "hpz": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    "sub group": {"zero_optimization": {"sub_group_size": 1000, "stage3_prefetch_bucket_size": 1000}},
    "threshold": {"zero_optimization": {"stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 3000}},
}


def draw(random_: random.Random, axis: str | None = None) -> Drawn:
    """Draw one run: up to nine options differ from their defaults, beside stage and model; ``axis`` is a name of ``AXES``, or None."""
    run: Drawn = {name: values[0] for name, values in {**ARGUMENTS, **OTHERS}.items()}
    run["stage"], run["model"] = random_.choice([3, 3, 2, 1, 0]), random_.choice(OTHERS["model"])
    run["axis"] = axis
    for name in random_.sample(sorted(set(run) - {"stage", "model", "axis"}), random_.randint(4, 9)):
        if name != "torch_compile" or random_.random() < 0.2:  # slow
            run[name] = random_.choice({**ARGUMENTS, **OTHERS}[name][1:])
    return made_valid(run)


def made_valid(run: Drawn) -> Drawn:
    """Change options that plain Trainer refuses together."""
    run = dict(run)
    if run["data"] == "iterable":
        run["length"] = "steps"
    if run["axis"] in ("sequence", "context", "ring") and run["model"] == "t5":
        run["model"] = "llama"
    if run["model"] == "t5":
        run["optimizer"] = None if run["optimizer"] == "override" else run["optimizer"]
        run["label_smoothing_factor"] = 0.0
        run["loss"] = None if run["loss"] == "function" else run["loss"]
    if run["load_best_model_at_end"] or run["save_strategy"] == "best":
        run["eval_strategy"] = run["eval_strategy"] if run["eval_strategy"] != "no" else "steps"
        if run["save_strategy"] != "best":
            run["save_strategy"] = run["eval_strategy"]
    if run["resume"]:
        run["save_strategy"], run["save_only_model"], run["auto_find_batch_size"], run["length"] = "steps", False, False, "steps"
        if run["load_best_model_at_end"]:
            run["eval_strategy"] = "steps"
        if run["callback"] in ("stops", "freezes", "changes lr"):
            run["callback"] = None
        run["ignore_data_skip"] = False
        run["twice"] = False
    if run["lr_scheduler_type"] == "reduce_lr_on_plateau":
        run["eval_strategy"], run["callback"] = "steps" if run["eval_strategy"] == "no" else run["eval_strategy"], None
    run["batch_eval_metrics"] = run["batch_eval_metrics"] and not run["prediction_loss_only"]
    if run["callback"] == "freezes":
        run["gradient_checkpointing"] = False  # DDP refuses it
    if run["json"]:
        run["optimizer"], run["optim"], run["weight_decay"] = None, "adamw_torch", 0.0  # the JSON has one group for all parameters
        run["callback"] = None if run["callback"] == "changes lr" else run["callback"]
    if run["optimizer"] in ("given", "layers", "override"):
        run["optim"] = "adamw_torch"
    if run["adapters"]:
        run["frozen"], run["twice"] = None, False
    if run["offload"] == "both" and run["stage"] < 3 or run["keys"] in ("hpz", "threshold") and run["stage"] < 3:
        run["stage"] = 3
    if run["offload"] and run["stage"] == 0:
        run["stage"] = 2
    if run["offload"]:
        run["keys"] = None if run["keys"] == "hpz" else run["keys"]
    if run["data"] == "iterable":
        run["accelerator_config"] = run["accelerator_config"] if run["accelerator_config"] == {"dispatch_batches": True} else None
        run["eval_strategy"] = "steps" if run["eval_strategy"] == "epoch" else run["eval_strategy"]
        run["save_strategy"] = "steps" if run["save_strategy"] == "epoch" else run["save_strategy"]
        run["logging_strategy"] = "steps"
    elif run["accelerator_config"] == {"dispatch_batches": True}:
        run["accelerator_config"] = None
    if run["accelerator_config"] == {"split_batches": True}:
        run["per_device_train_batch_size"] = 2
        run["per_device_eval_batch_size"] = 2
    if run["accelerator_config"] == {"even_batches": False}:
        run["rows"] = 32
    if run["optimizer"]:
        run["twice"] = False
    if run["axis"]:
        run["dropout"], run["neftune_noise_alpha"] = False, None  # ranks draw other numbers
        run["callback"] = None if run["callback"] == "reads" else run["callback"]
        run["accelerator_config"] = None
        run["keys"] = None if run["keys"] == "hpz" else run["keys"]
        run["data"] = "rows" if run["data"] == "iterable" else run["data"]
    if run["axis"] == "sequence":
        run["label_smoothing_factor"], run["loss"] = 0.0, None  # an error; a loss of one's own gets slices
        run["rows"] = 32  # each rank loads rows of its own
        run["model"] = "llama"  # of GPT-2's loss Trainer on one rank counts one label too much of each row, in evaluation too
    if run["axis"] == "pipeline":
        run["stage"] = min(run["stage"], 1)
        run["offload"], run["auto_find_batch_size"] = None, False
    if run["stage"] == 3:
        run["auto_find_batch_size"] = False
    if run["load_best_model_at_end"]:
        run["save_only_model"] = False
    return run


def changed(run: Drawn) -> Drawn:
    """Return the options that differ from their defaults."""
    defaults = {name: values[0] for name, values in {**ARGUMENTS, **OTHERS}.items()}
    return {name: value for name, value in run.items() if value != defaults[name] or name in ("stage", "model")}


def full(options: Drawn) -> Drawn:
    return made_valid({**{name: values[0] for name, values in {**ARGUMENTS, **OTHERS}.items()}, **options})
