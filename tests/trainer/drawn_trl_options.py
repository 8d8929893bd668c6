"""Options of runs of TRL's trainers, drawn by a seed: the trainer's own, those of Trainer, the adapter and the engine."""

from __future__ import annotations

import random
from typing import Any

from tests.trainer.drawn_adapters import KINDS, LORA, MADE, PROMPTS

Drawn = dict[str, Any]
GENERATION: dict[str, list[Any]] = {
    "ds3_gather_for_generation": [False],
    "repetition_penalty": [1.2],
    "generation_kwargs": [{"do_sample": True}, {"do_sample": False, "num_beams": 2}],
    "cache_implementation": ["static"],
}
GROUPS: dict[str, list[Any]] = {
    **GENERATION,
    "num_iterations": [2],
    "steps_per_generation": [1, 4],
    "generation_batch_size": [16],
    "num_generations_eval": [1, 4],
    "reward_weights": [[1.0, 0.5]],
    "shuffle_dataset": [False],
    "disable_dropout": [True],
    "mask_truncated_completions": [True],
    "log_completions": [True],
    "beta": [0.1, 0.0],
    "epsilon_high": [0.3],
}
REFERENCE: dict[str, list[Any]] = {
    "precompute_ref_log_probs": [True],
    "sync_ref_model": [True],
    "disable_dropout": [False],
    "pad_to_multiple_of": [8, None],
}
# Module, name without "Trainer" and "Config", form of its data, and values of its options beside the defaults.
TRAINERS: dict[str, tuple[str, str, str, dict[str, list[Any]]]] = {
    "sft": ("trl", "SFT", "text", {
        "packing": [True], "packing_strategy": ["wrapped", "bfd_split"], "padding_free": [True], "eval_packing": [False],
        "completion_only_loss": [True, False], "assistant_only_loss": [True], "loss_type": ["dft", "chunked_nll"],
        "pad_to_multiple_of": [8, None], "truncation_mode": ["keep_end"], "shuffle_dataset": [True],
        "neftune_noise_alpha": [5.0], "label_smoothing_factor": [0.1], "max_length": [9, None], "group_by_length": [True],
    }),
    "dpo": ("trl", "DPO", "pairs", {
        **REFERENCE, "padding_free": [True], "truncation_mode": ["keep_end"],
        "loss_type": [["hinge"], ["ipo"], ["exo_pair"], ["nca_pair"], ["robust"], ["bco_pair"], ["sppo_hard"], ["aot"], ["aot_unpaired"],
                      ["apo_zero"], ["apo_down"], ["discopop"], ["sft"], ["sigmoid_norm"], ["sigmoid", "sft"],
                      ["sigmoid", "bco_pair", "sft"]],
        "ld_alpha": [0.5], "f_divergence_type": ["js_divergence", "forward_kl", "alpha_divergence"], "label_smoothing": [0.1],
        "beta": [0.0, 0.5], "use_weighting": [True], "precompute_ref_batch_size": [3],
    }),
    "kto": ("trl", "KTO", "labelled", {
        **REFERENCE, "loss_type": ["apo_zero_unpaired"], "desirable_weight": [1.33], "undesirable_weight": [0.5], "beta": [0.5],
        "precompute_ref_batch_size": [3],
    }),
    "reward": ("trl", "Reward", "pairs", {
        "center_rewards_coefficient": [0.01], "disable_dropout": [False], "pad_to_multiple_of": [8],
    }),
    "grpo": ("trl", "GRPO", "prompts", {
        **GROUPS, "scale_rewards": ["batch", "none"], "importance_sampling_level": ["sequence"], "delta": [2.0],
        "loss_type": ["grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"], "top_entropy_quantile": [0.5],
        "entropy_coef": [0.01], "use_adaptive_entropy": [True], "cast_lm_head_to_fp32": [True], "off_policy_mask_threshold": [0.5],
        "multi_objective_aggregation": ["normalize_then_sum"], "use_bias_correction_kl": [False], "sync_ref_model": [True],
    }),
    "rloo": ("trl", "RLOO", "prompts", {
        **GROUPS, "normalize_advantages": [True], "reward_clip_range": [[-1.0, 1.0]], "sync_ref_model": [True],
    }),
    "distillation": ("trl", "Distillation", "prompts", {**GENERATION, "beta": [0.0, 0.5], "log_completions": [True]}),
    "cpo": ("trl.experimental.cpo", "CPO", "pairs", {
        "loss_type": ["hinge", "ipo", "simpo"], "alpha": [0.5], "cpo_alpha": [0.0], "label_smoothing": [0.1],
        "generate_during_eval": [True],
    }),
    "orpo": ("trl.experimental.orpo", "ORPO", "pairs", {"beta": [0.5], "disable_dropout": [False], "generate_during_eval": [True]}),
    "tpo": ("trl.experimental.tpo", "TPO", "triples", {
        "loss_type": ["hinge", "ipo", "tpo-l"], "beta": [0.1], "label_smoothing": [0.1], "tpo_alpha": [0.0], "pad_to_multiple_of": [8],
    }),
    "online_dpo": ("trl.experimental.online_dpo", "OnlineDPO", "prompts", {
        "loss_type": ["ipo"], "ds3_gather_for_generation": [False], "missing_eos_penalty": [1.0],
    }),
    "gkd": ("trl.experimental.gkd", "GKD", "chats", {"lmbda": [0.0, 1.0], "beta": [0.0, 1.0], "seq_kd": [True], "temperature": [0.5]}),
    "iw_opd": ("trl.experimental.iw_opd", "IWOPD", "chats", {"lmbda": [0.0, 0.5], "beta": [0.0, 0.5], "loss_top_k": [0, 4]}),
    "sdft": ("trl.experimental.sdft", "SDFT", "privileged", {
        **GENERATION, "teacher_model_kind": ["ema", "live"], "num_iterations": [2], "distillation_mode": ["full_logits", "sampled_token"],
        "generate_from_teacher": [True], "teacher_update_rate": [0.5], "distillation_add_tail": [True],
    }),
    "sdpo": ("trl.experimental.sdpo", "SDPO", "privileged", {
        **GENERATION, "teacher_model_kind": ["base", "live"], "num_iterations": [2], "distillation_mode": ["full_logits", "topk_logits"],
        "success_reward_threshold": [0.0], "teacher_update_rate": [0.5], "distillation_weight": [0.5],
    }),
    "a2po": ("trl.experimental.a2po", "A2PO", "prompts", {"num_value_samples": [2], "beta1": [0.1], "filter_all_incorrect": [False]}),
    "gmpo": ("trl.experimental.gmpo", "GMPO", "prompts", {**GROUPS}),
}  # fmt: skip
GROUPED = ("grpo", "rloo", "gmpo", "sdft", "sdpo")  # trainers with several generations of each prompt
GENERATING = (*GROUPED, "distillation", "online_dpo", "gkd", "iw_opd", "a2po")
REWARDED = ("grpo", "rloo", "gmpo", "online_dpo", "sdpo", "a2po")
WITH_REFERENCE = ("dpo", "kto", "online_dpo")
COMMON: dict[str, list[Any]] = {
    "gradient_checkpointing": [False, "reentrant", "without"],
    "gradient_accumulation_steps": [2, 1, 3],
    "per_device_train_batch_size": [2, 4],
    "max_grad_norm": [1.0, 0.0, 0.05],
    "eval_strategy": ["no", "steps"],
    "lr_scheduler_type": ["linear", "cosine"],
    "weight_decay": [0.1, 0.0],
    "average_tokens_across_devices": [True, False],
    "torch_empty_cache_steps": [None, 1],
    "include_num_input_tokens_seen": ["no", "all"],
    "optim": ["adamw_torch", "sgd"],
}
ENGINE: dict[str, list[Any]] = {
    "stage": [3, 2, 1, 0],
    "offload": [None, "optimizer", "both"],
    "precision": ["fp32", "bf16", "fp16"],
    "given": ["argument", "file", "environment", "plugin"],
    "json": [None, "optimizer"],
}
OTHERS: dict[str, list[Any]] = {
    "trainer": list(TRAINERS),
    "model": ["llama", "mixtral", "tied"],
    "path": [False, True],  # the trainer loads the model
    "form": ["own", "chats", "completions", "iterable"],  # of SFT's data; of others: conversations or texts
    "reference": [None, "given"],
    "rewards": ["function", "model", "two"],
    "adapter": [None, *KINDS],
    "made": list(MADE),
    "habit": [None, "merges", "bema", "completions"],
    "resume": [0, 2],
}


def draw(random_: random.Random, names: list[str] | None = None) -> Drawn:
    """Draw one run; ``names``: trainers to draw from."""
    run: Drawn = {name: values[0] for name, values in {**COMMON, **ENGINE, **OTHERS}.items()}
    run["trainer"] = random_.choice(names or [*TRAINERS, *("sft", "dpo", "grpo") * 3, "kto", "reward", "rloo"])
    run["stage"] = random_.choice([3, 3, 3, 2, 1, 0])
    own = TRAINERS[run["trainer"]][3]
    run["own"] = {name: random_.choice(own[name]) for name in random_.sample(sorted(own), random_.randint(0, min(4, len(own))))}
    drawn = sorted(set(run) - {"own", "trainer", "stage", "adapter", "made", "habit", "precision"})
    for name in random_.sample(drawn, random_.randint(2, 6)):
        run[name] = random_.choice({**COMMON, **ENGINE, **OTHERS}[name][1:])
    if random_.random() < 0.6:
        run["adapter"] = random_.choice(sorted(KINDS) if random_.random() < 0.8 else sorted(LORA))
        run["made"] = random_.choice(MADE)
    if random_.random() < 0.25:
        run["habit"] = random_.choice(OTHERS["habit"][1:])
    if random_.random() < 0.15:
        run["precision"] = random_.choice(["bf16", "fp16"])
    return made_valid(run)


def made_valid(run: Drawn) -> Drawn:
    """Change options that TRL or PEFT refuse together, or with which DDP trains other numbers than it should."""
    run = {**run, "own": dict(run["own"])}
    own, name = run["own"], run["trainer"]
    if run["adapter"] is None:
        run["made"] = "by the trainer"
        run["habit"] = None if run["habit"] == "merges" else run["habit"]
    if run["adapter"] in PROMPTS and run["habit"] == "merges":
        run["habit"] = None
    if run["made"] == "loaded" and run["adapter"] in PROMPTS:
        run["made"] = "before"
    if run["made"] == "two" and run["adapter"] not in LORA:
        run["made"] = "before"
    if run["made"] == "two":
        run["resume"], run["habit"] = 0, None
        run["gradient_checkpointing"] = False
    if run["adapter"] is not None:
        run["reference"], run["model"] = None, "llama"
        own.pop("sync_ref_model", None)
        run["path"] = run["path"] and run["made"] == "by the trainer"
        run["habit"] = None if run["habit"] == "bema" else run["habit"]
    if run["reference"] and name not in WITH_REFERENCE:
        run["reference"] = None
    if own.get("sync_ref_model"):
        own.pop("precompute_ref_log_probs", None)
        run["path"], run["reference"] = True, None
        if name in ("grpo", "rloo", "gmpo"):
            own["beta"] = 0.1
    if run["rewards"] == "two" or "reward_weights" in own:
        run["rewards"] = "two"
        own["reward_weights"] = [1.0, 0.5]
    if name not in ("grpo", "rloo", "gmpo"):
        own.pop("reward_weights", None)
        run["rewards"] = "function" if run["rewards"] == "two" else run["rewards"]
    if name in ("a2po", "sdpo"):
        run["rewards"] = "function"
    if name in GENERATING and run["habit"] == "completions":
        run["habit"] = None
    if own.get("generation_batch_size"):
        own.pop("steps_per_generation", None)
    if name in GROUPED:
        run["per_device_train_batch_size"] = 2 if own.get("generation_batch_size") else run["per_device_train_batch_size"]
    if "assistant_only_loss" in own:
        run["form"] = "chats"
    if "completion_only_loss" in own and own["completion_only_loss"]:
        run["form"] = "completions"
    if run["form"] == "completions" and name != "sft":
        run["form"] = "own"
    if run["form"] == "iterable" and name != "sft":
        run["form"] = "own"
    if run["form"] == "iterable":
        for key in ("group_by_length", "shuffle_dataset"):
            own.pop(key, None)
        run["resume"] = 0
    if name in GENERATING:
        run["habit"] = None if run["habit"] == "bema" else run["habit"]
    if run["offload"] == "both":
        run["stage"] = 3
    if name == "a2po":
        run["made"], run["habit"] = "by the trainer", None
        run["stage"], run["adapter"], run["offload"] = min(run["stage"], 2), None, None if run["offload"] == "both" else run["offload"]
    if name == "sdpo":
        run["resume"], run["gradient_accumulation_steps"] = 0, 2  # with 3 TRL's ranks wait for each other under DDP too
    if name == "sdft" and own.get("distillation_mode", "topk_logits") == "topk_logits":
        own["distillation_topk"] = 8
    if name == "online_dpo" and run["adapter"] is None and run["stage"] == 3:
        run["reference"] = "given"  # TRL refuses to copy a sharded model
    if run["offload"] and run["stage"] == 0:
        run["stage"] = 2
    if run["precision"] != "fp32":
        run["given"] = "argument"  # otherwise Trainer looks for an accelerator with that precision
    if run["model"] == "mixtral" and run["gradient_checkpointing"] == "reentrant":
        run["gradient_checkpointing"] = "without"  # DDP looks for unused experts
    if name == "iw_opd" and "lmbda" in own:
        del own["lmbda"]
    if own.get("loss_type") not in (["hinge"], ["ipo"], ["sft"], ["robust"]):
        own.pop("f_divergence_type", None)
    if run["json"]:
        run["weight_decay"] = 0.0
        run["optim"] = "adamw_torch"
    if run["given"] in ("environment", "plugin"):
        run["json"] = None
    return run


def changed(run: Drawn) -> Drawn:
    """Return the options that differ from their defaults."""
    defaults = {name: values[0] for name, values in {**COMMON, **ENGINE, **OTHERS}.items()}
    return {name: value for name, value in run.items() if name in ("stage", "trainer") or value != defaults.get(name, {})}


def full(options: Drawn) -> Drawn:
    """Return a run with ``options``, and the defaults of all others."""
    return made_valid({**{name: values[0] for name, values in {**COMMON, **ENGINE, **OTHERS}.items()}, "own": {}, **options})
