"""Runs of TRL's trainers with PEFT's adapters and drawn options, under DDP and under ZeRO, which must log and save the same.

By hand: ``python -m tests.trainer.drawn_trl --count 30 --seed 1``, ``--trainers grpo rloo``, ``--adapters`` for one run of SFT with each
kind of adapter, or ``--run "{...}"`` for one that was printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support import ranks, trainers
from tests.trainer import drawn_adapters, drawn_runs
from tests.trainer import drawn_trl_inputs as inputs
from tests.trainer.drawn_trl_options import COMMON, GENERATING, GROUPED, KINDS, REWARDED, TRAINERS, Drawn, changed, draw, full

STEPS = 4
LOOSE = {"fp32": (2e-3, 1e-4, 3e-4), "bf16": (0.1, 0.02, 0.1), "fp16": (0.05, 5e-3, 0.05)}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}

# -- one run -----------------------------------------------------------------------------------------------------------


def config_of(run: Drawn) -> dict[str, Any]:
    """Return the DeepSpeed configuration."""
    config = trainers.zero_config(run["stage"])
    for key, device in (("offload_optimizer", run["offload"]), ("offload_param", run["offload"] == "both")):
        if device:
            config["zero_optimization"][key] = {"device": "cpu"}
    if run["json"]:
        config["optimizer"] = json.loads(json.dumps(OPTIMIZER))
    if run["optim"] != "adamw_torch":
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return config


def given(run: Drawn, folder: Path) -> Any:
    """Return the value of Trainer's ``deepspeed``, or None after the environment has been set as ``accelerate launch`` sets it."""
    if run["given"] == "argument":
        return config_of(run)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ds{ranks.rank()}.json"
    path.write_text(json.dumps(config_of(run)))
    if run["given"] == "file":
        return str(path)
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(run["stage"] == 3).lower()}
    if run["given"] == "environment":
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
    else:
        offload = {None: ("none", "none"), "optimizer": ("cpu", "none"), "both": ("cpu", "cpu")}[run["offload"]]
        os.environ |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(run["stage"]), "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}
        os.environ |= {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": offload[0], "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": offload[1]}
        if run["precision"] != "fp32":
            os.environ["ACCELERATE_MIXED_PRECISION"] = run["precision"]
        if run["max_grad_norm"]:
            os.environ["ACCELERATE_GRADIENT_CLIPPING"] = str(run["max_grad_norm"])
    return None


def arguments_of(run: Drawn, models: Path, folder: Path, zero: bool) -> Any:
    """Return the trainer's configuration."""
    from hf_zero.integrations import callers

    module, name, _, _ = TRAINERS[run["trainer"]]
    cls = getattr(importlib.import_module(module), f"{name}Config")
    options = {key: run[key] for key in COMMON if key in cls.__dataclass_fields__}
    checkpointing = options.pop("gradient_checkpointing")
    options["gradient_checkpointing"] = bool(checkpointing)
    if checkpointing:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpointing == "reentrant"}
    options |= {"max_steps": STEPS, "learning_rate": 1e-2 if run["adapter"] else 1e-3, "bf16": False, "eval_steps": 2, "adam_epsilon": 1e-4}
    if run["optim"] == "sgd":
        options["learning_rate"] = 0.1
    if run["resume"]:
        options |= {"save_strategy": "steps", "save_steps": 2}
    if "max_length" in cls.__dataclass_fields__:
        options["max_length"] = 16
    if run["trainer"] in GENERATING:
        for key in ("max_completion_length", "max_new_tokens"):
            if key in cls.__dataclass_fields__:
                options[key] = 5
        options |= {"num_generations": 2} if run["trainer"] in GROUPED else {}
        options |= {"use_vllm": False} if "use_vllm" in cls.__dataclass_fields__ else {}
        if "generation_kwargs" in cls.__dataclass_fields__:
            options["generation_kwargs"] = {"do_sample": False}
    options |= run["own"]
    if options.pop("group_by_length", False):
        options["train_sampling_strategy"] = "group_by_length"
    if run["precision"] != "fp32" and zero:
        options |= {run["precision"]: True, "use_cpu": True}
    options["ddp_find_unused_parameters"] = (
        run["made"] == "two" or run["model"] == "mixtral" or run["adapter"] in (*drawn_adapters.PROMPTS, "shadow")
    )
    deepspeed: Any = None
    if zero:
        deepspeed = given(run, folder)
        callers.watch()
        if deepspeed is None:
            options["use_cpu"] = False
    return trainers.arguments(folder, deepspeed, cls, **options)


def trainer_of(run: Drawn, models: Path, folder: Path, zero: bool) -> Any:
    """Return the trainer, made as a script makes it: arguments, models, data, trainer."""
    trainers.forget()
    module, name, form, _ = TRAINERS[run["trainer"]]
    cls = getattr(importlib.import_module(module), f"{name}Trainer")
    args = arguments_of(run, models, folder, zero)
    base = "reward" if run["trainer"] == "reward" else run["model"]
    task = "SEQ_CLS" if base == "reward" else "CAUSAL_LM"
    torch.manual_seed(11)
    more: dict[str, Any] = {}
    if run["path"]:
        model: Any = str(models / base)
    else:
        model = inputs.load(models, base)
    if run["adapter"] and run["made"] == "by the trainer":
        more["peft_config"] = drawn_adapters.config_of(run["adapter"], task)
    elif run["adapter"]:
        model = drawn_adapters.adapted(model, run["adapter"], run["made"], task, folder, lambda: inputs.load_plain(models, base))
    if run["reference"]:
        more["ref_model"] = inputs.load(models, "teacher")
    if run["trainer"] in ("distillation", "gkd", "iw_opd"):
        more["teacher_model"] = inputs.load(models, "teacher")
    if run["trainer"] in REWARDED:
        more |= rewards_of(run, models)
    if run["trainer"] == "sft" and run["form"] == "completions":
        form = "completions"
    chats = run["form"] == "chats"
    train = stored(inputs.rows_of(form, "train", chats), folder / "data")
    held = inputs.rows_of(form, "held", chats) if run["eval_strategy"] != "no" or run["habit"] == "completions" else None
    if held is not None:
        held = stored(held, folder / "held")
    if run["form"] == "iterable":
        train = train.to_iterable_dataset()
    torch.manual_seed(13)
    made = cls(model=model, args=args, train_dataset=train, eval_dataset=held, processing_class=inputs.tokenizer(), **more,
               callbacks=drawn_adapters.callbacks_of(run["adapter"], run["made"], run["habit"]))  # fmt: skip
    add_habit(run, made)
    return made


def stored(data: Any, folder: Path) -> Any:
    """Return ``data`` read from a folder of the run, where ranks find the results that one of them stores beside it."""
    import torch.distributed as dist
    from datasets import load_from_disk

    if not folder.exists() and ranks.rank() == 0:
        data.save_to_disk(folder)
    dist.barrier()
    return load_from_disk(folder)


def rewards_of(run: Drawn, models: Path) -> dict[str, Any]:
    """Return the rewards of a trainer that generates."""
    if run["trainer"] == "a2po":
        return {"reward_funcs": inputs.halves}
    if run["rewards"] == "function":
        return {"reward_funcs": inputs.distinct}
    model = inputs.load(models, "reward")
    if run["rewards"] == "model":
        return {"reward_funcs": model}
    return {"reward_funcs": [inputs.distinct, model]}


def add_habit(run: Drawn, trainer: Any) -> None:
    """Add a callback of TRL."""
    from trl.trainer.callbacks import BEMACallback, LogCompletionsCallback

    if run["habit"] == "bema":
        trainer.add_callback(BEMACallback(update_freq=2))
    if run["habit"] == "completions" and "prompt" in trainer.eval_dataset.column_names:
        trainer.add_callback(LogCompletionsCallback(trainer, num_prompts=4, freq=2))


# -- results -----------------------------------------------------------------------------------------------------------


def result_of(run: Drawn, models: Path, folder: Path, zero: bool) -> dict[str, Any]:
    """Train, resume if the run says so, save; return everything that a user sees."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = trainer_of(run, models, folder, zero)
    output = trainer.train()
    assert trainer.is_deepspeed_enabled is zero and hasattr(trainer.model_wrapped, "resolved") is zero
    if run["resume"]:
        trainer = trainer_of(run, models, folder, zero)
        output = trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    found: dict[str, Any] = {
        "history": [{key: value for key, value in entry.items() if is_compared(key)} for entry in trainer.state.log_history],
        "train": {key: value for key, value in output.metrics.items() if is_compared(key)},
        "state": {name: getattr(trainer.state, name) for name in ("global_step", "epoch", "num_input_tokens_seen", "total_flos")},
        "weights": trainers.weights_of(trainer.accelerator.unwrap_model(trainer.model)),
    }
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "BEMACallback":
            found["bema"] = {name: value.float() for name, value in callback.running_model.state_dict().items()}
            found["bema files"] = files_of(folder / "bema") if (folder / "bema").exists() else None
        if type(callback).__name__ == "LogCompletionsCallback":
            found["completions"] = callback.table
    if ranks.rank() == 0:
        found["saved"] = files_of(folder / "saved")
    return found


def is_compared(key: str) -> bool:
    """Return whether a logged value is no time."""
    return drawn_runs.is_compared(key) and key not in ("step_time",)


def files_of(folder: Path) -> dict[str, Any]:
    """Return names and content of a saved folder's files."""
    found: dict[str, Any] = {"names": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())}
    for path in sorted(folder.rglob("*.json")):
        if path.name in ("config.json", "adapter_config.json", "generation_config.json"):
            content = json.loads(path.read_text())
            found[str(path.relative_to(folder))] = {
                key: sorted(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
                for key, value in content.items()
                if "name_or_path" not in key and key not in ("dtype", "torch_dtype")
            }
    for path in sorted(folder.rglob("*.safetensors")):
        from safetensors.torch import load_file

        found[str(path.relative_to(folder))] = {name: value.float() for name, value in load_file(path).items()}
    return found


def compared(run: Drawn, models: Path, folder: Path) -> list[str]:
    """Run under DDP and under ZeRO inside ranks; return the differences."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")  # BOFT builds one: a killed run would leave its lock to all others
    with trainers.clean_state(), drawn_adapters.tokens_on_the_host():
        plain, zero = (drawn_runs.outcome_of(result_of, run, models, folder / name, name == "zero") for name in ("ddp", "zero"))
    if lines := drawn_runs.errors_of(plain, zero):
        return [line for line in lines if "is not compatible with `create_reference_model()`" not in line]  # TRL's own words for stage 3
    for result in (plain, zero) if run["json"] else ():
        for entry in result["history"]:
            entry.pop("learning_rate", None)  # of a schedule that the engine steps: Trainer logs it after the step
    if run["precision"] != "fp32":
        for result in (plain, zero):  # DDP trained in fp32: which entries and files there are is compared, and losses roughly
            result.pop("weights"), result.pop("bema", None)
            if run["trainer"] in (*GROUPED, "online_dpo"):  # rounding may choose other tokens, of which there are more or fewer
                result["state"].pop("num_input_tokens_seen"), result["state"].pop("total_flos")
            result["history"] = [{key: value if key in ("loss", "eval_loss") else 0 for key, value in entry.items()}
                                 for entry in result["history"]]  # fmt: skip
            result["train"] = sorted(result["train"])
            if "saved" in result:
                result["saved"] = {name: sorted(value) if "safetensors" in name else value for name, value in result["saved"].items()}
        return [line for line in drawn_runs.differences(plain, zero) if not is_near(line)]
    return list(drawn_runs.differences(plain, zero))


def is_near(line: str) -> bool:
    """Return whether a line says that two losses differ by the rounding of 16 bits."""
    words = line.split(": ")[-1].split(" and ")
    try:
        left, right = (float(word) for word in words)
    except ValueError:
        return False
    return "loss" in line and abs(left - right) < 0.05 * max(1.0, abs(left))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trainers", nargs="+", choices=sorted(TRAINERS), help="draw from these alone")
    parser.add_argument(
        "--adapters", nargs="*", choices=[*KINDS, []], help="one run of each of --trainers (SFT) for each kind of adapter, or for these"
    )
    parser.add_argument("--stage", type=int, default=3, help="of --adapters")
    parser.add_argument("--run", help="options of one run, or of a list of runs, as they were printed")
    parser.add_argument("--limit", type=int, default=40, help="seconds of a run on an idle machine")
    parsed = parser.parse_args()
    random_ = random.Random(parsed.seed)
    if parsed.run:
        given_run = eval(parsed.run)  # noqa: S307
        runs = [full(given_run) for given_run in (given_run if isinstance(given_run, list) else [given_run])]
    elif parsed.adapters is not None:
        names = parsed.trainers or ["sft"]
        runs = [full({"trainer": name, "stage": parsed.stage, "adapter": kind}) for kind in parsed.adapters or KINDS for name in names]
    else:
        runs = [draw(random_, parsed.trainers) for _ in range(parsed.count)]

    limit = float(parsed.limit)

    def lines_of(run: Drawn, models: Path, folder: Path) -> list[str]:
        return sorted(
            {line for one in ranks.run_ranks(compared, 2, run, models, folder, timeout=limit, group_timeout=limit) for line in one}
        )

    drawn_runs.report(runs, lines_of, changed, inputs.save_models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
