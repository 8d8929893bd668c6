"""Trainer runs with drawn options, under DDP and under ZeRO, which must log, predict and save the same.

By hand: ``python -m tests.trainer.drawn_runs --count 30 --seed 1``, ``python -m tests.trainer.drawn_runs --run "{...}"`` for one that was
printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import ranks, trainers
from tests.trainer.drawn_options import ARGUMENTS, AXES, KEYS, Drawn, changed, draw, full

REFUSED = tuple(f"ONE RAISES: ZeRO: {name}" for name in ("StateError", "ConfigError", "UnsupportedError"))
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}

# -- one run -----------------------------------------------------------------------------------------------------------


def data_of(run: Drawn, count: int, seed: int, train: bool) -> tuple[Any, Any]:
    """Return a data set and its collator."""
    if run["data"] in ("ragged", "grouped"):
        return trainers.ragged_rows(count, seed), trainers.pad
    found = trainers.rows(count, seed)
    if run["data"] == "iterable" and train:
        return Rows(found), None
    return found, None


def held_rows(run: Drawn) -> int:
    """Return the number of rows to evaluate: no multiple of the batch, but where ranks evaluate rows of their own beside one rank."""
    return 12 * run["per_device_eval_batch_size"] if run["axis"] == "sequence" else trainers.EVAL


class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Rows one after the other, without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def model_of(run: Drawn, models: Path) -> nn.Module:
    """Load the model, and freeze or adapt it."""
    options: dict[str, Any] = {}
    if run["dropout"]:
        names = {"gpt2": ("resid_pdrop", "attn_pdrop", "embd_pdrop"), "llama": ("attention_dropout",), "t5": ("dropout_rate",)}
        options = dict.fromkeys(names[run["model"]], 0.1)
    model: Any = trainers.load(models, run["model"], **options)
    if run["frozen"] == "embeddings":
        model.get_input_embeddings().weight.requires_grad_(False)
    if run["frozen"] == "first layer":
        for param in next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0].parameters():
            param.requires_grad_(False)
    if run["adapters"]:
        from peft import LoraConfig, get_peft_model

        targets = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "down_proj"], "t5": ["q", "wo"]}[run["model"]]
        norms = {"gpt2": ["ln_f"], "llama": ["norm"], "t5": ["lm_head"]}[run["model"]] if run["adapters"] == "lora with norms" else None
        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, modules_to_save=norms))
    return model


def callback_of(run: Drawn, seen: list[Any]) -> list[Any]:
    from transformers import TrainerCallback

    kind = run["callback"]
    if kind is None:
        return []

    class Own(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if kind == "freezes" and state.global_step == 2:
                trained = [param for param in model.parameters() if param.requires_grad]
                trained[-1].requires_grad_(False)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
            if kind == "changes lr" and state.global_step == 2:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            if kind == "stops" and state.global_step == 3:
                control.should_training_stop = True
            if kind == "evaluates" and state.global_step == 2:
                control.should_evaluate = True
            if kind == "reads":
                seen.append({name: float(value.norm()) for name, value in trainers.weights_of(model).items()})

    return [Own()]


def optimizers_of(run: Drawn, model: nn.Module) -> dict[str, Any]:
    """Return what a script gives to Trainer."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if run["optimizer"] == "given":
        return {"optimizers": (torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01), None)}
    if run["optimizer"] == "layers":
        half = len(trained) // 2
        groups: list[dict[str, Any]] = [{"params": trained[:half], "lr": 3e-3, "weight_decay": 0.0}, {"params": trained[half:]}]
        return {"optimizers": (torch.optim.AdamW(groups, lr=1e-3), None)}
    if run["optimizer"] == "override":
        return {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 1e-3})}
    return {}


def loss_of(run: Drawn) -> tuple[type, dict[str, Any]]:
    """Return the class of the Trainer and arguments that change its loss."""
    from transformers import Seq2SeqTrainer, Trainer

    base: Any = Seq2SeqTrainer if run["model"] == "t5" else Trainer

    def own(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[1]
        shifted = (logits, labels) if run["model"] == "t5" else (logits[:, :-1], labels[:, 1:])
        total = nn.functional.cross_entropy(shifted[0].flatten(0, 1).float(), shifted[1].flatten(), ignore_index=-100, reduction="sum")
        return total / (num_items_in_batch if num_items_in_batch is not None else (shifted[1] != -100).sum())

    class Own(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            if run["loss"] != "compute_loss" and run["loss"] != "weighted":
                return super().compute_loss(model, inputs, return_outputs, **more)
            outputs = model(**inputs)
            loss = outputs.loss
            if run["loss"] == "weighted":
                loss = loss * (1.0 + inputs["input_ids"].float().mean() / 100) + 1e-4 * outputs.logits.float().pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return Own, ({"compute_loss_func": own} if run["loss"] == "function" else {})


def arguments_of(run: Drawn, folder: Path, config: Any) -> Any:
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    options = {name: run[name] for name in ARGUMENTS}
    kind = options.pop("gradient_checkpointing")
    if kind:
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": kind == "reentrant"}}
    if run["length"] == "epochs":
        options |= {"max_steps": -1, "num_train_epochs": 2}
    else:
        options["max_steps"] = 5
    options |= {"eval_steps": 2, "save_steps": run["resume"] or 2, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    if run["load_best_model_at_end"] and run["resume"]:
        options["save_steps"] = 2
    if options["torch_compile"]:
        options["torch_compile_backend"] = "eager"
    if options["optim"] == "sgd":
        options["learning_rate"] = 0.05
    if options["lr_scheduler_type"] == "cosine_with_min_lr":
        options["lr_scheduler_kwargs"] = {"min_lr": 1e-4}
    if options["lr_scheduler_type"] == "warmup_stable_decay":
        options["lr_scheduler_kwargs"] = {"num_decay_steps": 2}
    if options["include_num_input_tokens_seen"] is True:
        options["include_num_input_tokens_seen"] = "all"
    elif not options["include_num_input_tokens_seen"]:
        options["include_num_input_tokens_seen"] = "no"
    if run["data"] == "grouped":
        grouped = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
        options |= {"train_sampling_strategy": "group_by_length"} if grouped else {"group_by_length": True}
    if run["data"] == "iterable":
        options["accelerator_config"] = options["accelerator_config"] or {"dispatch_batches": False}
    options["dataloader_persistent_workers"] = False
    options = {name: value for name, value in options.items() if value is not None}
    known = TrainingArguments.__dataclass_fields__
    options = {name: value for name, value in options.items() if name in known}
    if run["axis"] == "sequence" and config is not None:
        from accelerate import ParallelismConfig

        options["parallelism_config"] = ParallelismConfig(sp_size=2)
    options["ddp_find_unused_parameters"] = run["callback"] == "freezes"
    return trainers.arguments(folder, config, cls=Seq2SeqTrainingArguments if run["model"] == "t5" else None, **options)


def config_of(run: Drawn) -> dict[str, Any]:
    config = trainers.zero_config(run["stage"])
    if run["json"]:
        config["optimizer"] = json.loads(json.dumps(OPTIMIZER))
    if run["offload"]:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if run["offload"] == "both":
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if run["optimizer"] or run["optim"] != "adamw_torch":
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
    for name, value in KEYS.get(run["keys"] or "", {}).items():
        if isinstance(value, dict):
            config[name] |= value
        else:
            config[name] = value
    if run["keys"] == "clipping":
        config["gradient_clipping"] = run["max_grad_norm"]
    for name, value in AXES.get(run["axis"] or "", {}).items():
        config[name] = value
    return config


def metrics(found: Any, compute_result: bool = True) -> dict[str, float]:
    """Return numbers of all predictions, or of those so far (``batch_eval_metrics``)."""
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    logits = torch.as_tensor(logits).float()
    return {"mean": float(logits.double().mean()), "abs": float(logits.double().abs().mean())} if compute_result else {}


def result_of(run: Drawn, models: Path, folder: Path, config: Any) -> dict[str, Any]:
    """Train, resume if the run says so, evaluate, predict, save; return everything that a user sees."""
    seen: list[Any] = []

    def made() -> Any:
        trainers.forget()
        args = arguments_of(run, folder, config)
        train, collator = data_of(run, run["rows"], 1, train=True)
        held, _ = data_of(run, held_rows(run), 2, train=False)
        torch.manual_seed(11)
        model = model_of(run, models)
        kind, more = loss_of(run)
        wanted = metrics if not run["prediction_loss_only"] else None
        return kind(model=model, args=args, train_dataset=train, eval_dataset=held, data_collator=collator, compute_metrics=wanted,
                    callbacks=callback_of(run, seen), **more, **optimizers_of(run, model))  # fmt: skip

    trainer = made()
    output = trainer.train()
    if run["twice"]:
        trainer.optimizer = None  # under DDP Trainer keeps it, with its moments
        output = trainer.train()
    if run["resume"]:
        path = folder / f"checkpoint-{trainer.args.save_steps}"
        seen.clear()
        trainer = made()
        output = trainer.train(resume_from_checkpoint=str(path))
    history = [{key: value for key, value in entry.items() if is_compared(key)} for entry in trainer.state.log_history]
    held, _ = data_of(run, held_rows(run), 2, train=False)
    predicted = trainer.predict(held)
    trainer.save_model(str(folder / "saved"))
    weights = trainers.weights_of(trainer.model)
    best = trainer.state.best_model_checkpoint
    return {
        "history": history,
        "train": {key: value for key, value in output.metrics.items() if is_compared(key)},
        "state": {name: getattr(trainer.state, name) for name in ("global_step", "epoch", "max_steps", "best_metric", "total_flos",
                                                                 "num_input_tokens_seen", "train_batch_size")},
        "best": best and Path(best).name,
        "predicted": {key: value for key, value in predicted.metrics.items() if is_compared(key)},
        "predictions": numbers(predicted.predictions),
        "weights": weights,
        "saved": saved(folder / "saved") if ranks.rank() == 0 else {},
        "folders": sorted(path.name for path in folder.iterdir() if path.name.startswith("checkpoint")) if ranks.rank() == 0 else [],
        "seen": seen,
    }  # fmt: skip


def numbers(value: Any) -> Any:
    if isinstance(value, tuple):
        return [numbers(item) for item in value[:1]]
    return None if value is None else torch.as_tensor(value).float()


def is_compared(key: str) -> bool:
    return not any(word in key for word in ("runtime", "per_second", "_time"))


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return {name: value.float() for name, value in found.items()}


# -- comparison --------------------------------------------------------------------------------------------------------


def differences(left: Any, right: Any, where: str = "") -> Iterator[str]:
    """Yield where two results differ by more than rounding."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(key for key in left.keys() | right.keys() if not key.endswith("attn.c_attn.bias")):  # a key's bias is noise
            if key not in left or key not in right:
                yield f"{where}.{key}: only {'DDP' if key in left else 'ZeRO'}"
            else:
                yield from differences(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            yield f"{where}: {len(left)} and {len(right)} entries"
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from differences(*pair, f"{where}[{index}]")
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape:
            yield f"{where}: shapes {tuple(left.shape)}, {tuple(right.shape)}"
        elif not torch.allclose(left, right, rtol=2e-3, atol=2e-4, equal_nan=True):
            yield f"{where}: off by {float((left - right).abs().max()):.3g}"
    elif isinstance(left, (int, float)) and isinstance(right, (int, float)) and not isinstance(left, bool):
        if abs(left - right) > 3e-4 * max(1.0, abs(left)):
            yield f"{where}: {left} and {right}"
    elif left != right:
        yield f"{where}: {left!r} and {right!r}"


def outcome_of(result_of: Callable[..., Any], *given: Any) -> Any:
    """Return ``result_of(*given)``, or the text of its error."""
    try:
        return result_of(*given)
    except Exception as error:
        traceback.print_exc()  # for the report of a run in which the other rank hangs
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:400]} ({where.filename.rsplit('/', 2)[-1]}:{where.lineno})"


def errors_of(plain: Any, zero: Any) -> list[str]:
    """Return one line if an outcome is an error; nothing if both are results."""
    if isinstance(plain, str) and isinstance(zero, str):
        return [f"both raise: {plain} | {zero}"]
    if isinstance(plain, str) or isinstance(zero, str):
        return [f"ONE RAISES: {f'DDP: {plain}' if isinstance(plain, str) else f'ZeRO: {zero}'}"]
    return []


def judged(run: Drawn, plain: Any, zero: Any) -> list[str]:
    """Return the differences of two outcomes, or one line with an error."""
    if lines := errors_of(plain, zero):
        return lines
    for result in (plain, zero) if run["json"] else ():
        for entry in result["history"]:
            entry.pop("learning_rate", None)  # of a schedule that the engine steps: Trainer logs it after the step
    return list(differences(plain, zero))


def compared(run: Drawn, models: Path, folder: Path) -> list[str]:
    """Run under DDP and under ZeRO inside ranks; return the differences."""
    with trainers.clean_state():
        return judged(
            run, *(outcome_of(result_of, run, models, folder / name, config) for name, config in (("ddp", None), ("zero", config_of(run))))
        )


def alone(run: Drawn, models: Path, folder: Path, config: Any) -> Any:
    with trainers.clean_state():
        found = outcome_of(result_of, run, models, folder, config)
    if isinstance(found, str):
        return found
    for entry in (found["train"], *found["history"]):
        entry.pop("train_loss", None)  # counts this rank's share of the steps that were not logged
    return {name: value for name, value in found.items() if name not in ("weights", "seen")}


def compared_over(run: Drawn, models: Path, folder: Path, copies: int = 1) -> list[str]:
    """Run on ``copies`` ranks without hf_zero, and on twice as many, two of which share each batch; return the differences of the first
    two.
    """
    plain = ranks.run_ranks(alone, copies, run, models, folder / "one", None, group=False, timeout=90)[0]
    first, second = ranks.run_ranks(alone, 2 * copies, run, models, folder / "two", config_of(run), group=False, timeout=90)[:2]
    if isinstance(plain, dict) and isinstance(second, dict):
        second = {**second, "saved": plain["saved"], "folders": plain["folders"]}
    return [*judged(run, plain, first), *(f"rank 1: {line}" for line in judged(run, plain, second))]


def report(
    runs: list[Drawn],
    lines_of: Callable[[Drawn, Path, Path], list[str]],
    changed: Callable[[Drawn], Drawn],
    save_models: Callable[[Path], None] = trainers.save_models,
) -> None:
    """Print for each run whether it is equal, raises, is refused by name, or differs, and where."""
    with tempfile.TemporaryDirectory() as name:
        save_models(Path(name))
        for index, run in enumerate(runs):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    lines = lines_of(run, Path(name), Path(folder))
                except AssertionError as error:
                    lines = [f"FAILED: {str(error)[-600:]}"]
            word = "ok" if not lines else "raises" if lines[0].startswith("both raise") else "DIFFERS"
            word = "refused" if lines and lines[0].startswith(REFUSED) else word
            print(f"[{index}] {word} {time.monotonic() - start:.0f} s {changed(run)}", flush=True)
            for line in lines[:6]:
                print(f"      {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="with --axes: half of them train without hf_zero")
    parser.add_argument("--run", help="options of one run, as they were printed")
    parser.add_argument("--axes", nargs="+", choices=sorted(AXES), default=[None], help="what two ranks share instead of the data")
    given = parser.parse_args()
    random_ = random.Random(given.seed)
    runs = [full(eval(given.run))] if given.run else [draw(random_, given.axes[i % len(given.axes)]) for i in range(given.count)]  # noqa: S307

    def lines_of(run: Drawn, models: Path, folder: Path) -> list[str]:
        if run["axis"]:
            return compared_over(run, models, folder, given.ranks // 2)
        return sorted({line for one in ranks.run_ranks(compared, 2, run, models, folder, timeout=90) for line in one})

    report(runs, lines_of, changed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
