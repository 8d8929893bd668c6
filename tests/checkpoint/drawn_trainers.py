"""Trainer runs that save under one configuration and resume under another, on other ranks too, compared with the same under DDP.

By hand: ``python -m tests.checkpoint.drawn_trainers --count 20 --seed 1``; with ``--run "({...}, {...})"`` one pair that was printed.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support import ranks, trainers
from tests.trainer import drawn_runs
from tests.trainer.drawn_options import Drawn, changed, full

ROWS = 12  # of an optimizer step: ranks x micro-steps x rows of a rank
SHARED: dict[str, list[Any]] = {
    "model": ["llama", "gpt2"],
    "adapters": [None, "lora", "lora with norms"],
    "frozen": [None, "embeddings", "first layer"],
    "optim": ["adamw_torch", "sgd", "adamw_torch_fused", "adagrad"],
    "optimizer": [None, "given", "layers", "override"],
    "lr_scheduler_type": ["linear", "cosine", "warmup_stable_decay", "constant_with_warmup"],
    "warmup_steps": [1, 3],
    "max_grad_norm": [1.0, 0.0, 0.05],
    "loss": [None, "function"],  # others weigh tokens by the ranks that have them
    "json": [None, "optimizer"],
    "eval_strategy": ["no", "steps"],
    "load_best_model_at_end": [False, True],
    "logging_steps": [1, 2, 3],
}
EACH: dict[str, list[Any]] = {
    "stage": [3, 2, 1, 0],
    "offload": [None, "optimizer", "both"],
    "gradient_checkpointing": [False, "without"],
    "gradient_accumulation_steps": [2, 1, 3],
    "keys": [None, "overlap", "sub group", "threshold"],
    "axis": [None, "tensor", "context"],
}


def draw(random_: random.Random) -> tuple[Drawn, Drawn]:
    """Draw the run before a resume and the one after it."""
    shared: Drawn = {name: values[0] for name, values in SHARED.items()}
    for name in random_.sample(sorted(SHARED), 4):
        shared[name] = random_.choice(SHARED[name])
    parts = []
    for _ in range(2):
        part = {name: random_.choice(values) if name in ("stage", "axis") else values[0] for name, values in EACH.items()}
        for name in random_.sample(["offload", "gradient_checkpointing", "gradient_accumulation_steps", "keys"], 2):
            part[name] = random_.choice(EACH[name])
        parts.append(made_valid({**shared, **part, "ranks": random_.choice([1, 2, 2, 4])}))
    return parts[0], parts[1]


def made_valid(part: Drawn) -> Drawn:
    """Return a run of ``drawn_runs`` whose steps have ``ROWS`` rows on every number of ranks."""
    world = part["ranks"]
    part = {**part, "resume": 2, "rows": 48}
    if part["axis"] and (world == 1 or part["model"] != "llama"):
        part["axis"] = None
    if part["axis"] in ("context",) and part["adapters"]:
        part["axis"] = None
    copies = world // 2 if part["axis"] in ("tensor", "context") else world
    if copies == 4 and part["gradient_accumulation_steps"] == 2:
        part["gradient_accumulation_steps"] = 1
    run = full({name: value for name, value in part.items() if name != "ranks"})
    run["per_device_train_batch_size"] = ROWS // copies // run["gradient_accumulation_steps"]
    run["rows"] = 48
    run["per_device_eval_batch_size"] = 12 // copies
    return {**run, "ranks": world}


def trainer_of(run: Drawn, models: Path, folder: Path, config: Any) -> Any:
    trainers.forget()
    args = drawn_runs.arguments_of(run, folder, config)
    train, collator = drawn_runs.data_of(run, run["rows"], 1, train=True)
    held = trainers.rows(12, 2, masked=False)
    torch.manual_seed(11)
    model = drawn_runs.model_of(run, models)
    kind, more = drawn_runs.loss_of(run)
    return kind(model=model, args=args, train_dataset=train, eval_dataset=held, data_collator=collator, **more,
                **drawn_runs.optimizers_of(run, model))  # fmt: skip


def before(run: Drawn, models: Path, folder: Path, config: Any) -> dict[str, Any]:
    """Train five steps with a checkpoint after every second one, and drop the last checkpoint's later steps."""
    trainer = trainer_of(run, models, folder, config)
    trainer.args.max_steps = 5
    output = trainer.train()
    return {"loss": output.training_loss}


def after(run: Drawn, models: Path, folder: Path, config: Any) -> dict[str, Any]:
    """Resume from the newest checkpoint, which is the one of step 4, and from that of step 2; train to the end and save."""
    found = {}
    for name, where in (("newest", True), ("second", str(folder / "checkpoint-2"))):
        trainer = trainer_of(run, models, folder, config)
        output = trainer.train(resume_from_checkpoint=where)
        found[name] = {
            "history": [{key: value for key, value in entry.items() if drawn_runs.is_compared(key)} for entry in trainer.state.log_history],
            "train": {key: value for key, value in output.metrics.items() if drawn_runs.is_compared(key) and key != "total_flos"},
            "steps": (trainer.state.global_step, trainer.state.epoch, trainer.state.best_metric),
            "weights": {} if run["axis"] == "tensor" else trainers.weights_of(trainer.model),  # of this rank's half
        }
        trainer.save_model(str(folder / "saved"))
        trainer.accelerator.wait_for_everyone()
        found[name]["saved"] = drawn_runs.saved(folder / "saved") if ranks.rank() == 0 else {}
    return found


def of(what: str, *given: Any) -> Any:
    with trainers.clean_state():
        return drawn_runs.outcome_of({"before": before, "after": after}[what], *given)


def compared(pair: tuple[Drawn, Drawn], models: Path, folder: Path) -> list[str]:
    """Run both parts on one rank without hf_zero and under ZeRO; return the differences of rank 0."""
    results = []
    for name in ("plain", "zero"):
        (folder / name).mkdir()
        for what, part in zip(("before", "after"), pair, strict=True):
            run, world, config = dict(part), part["ranks"], drawn_runs.config_of(part)
            if name == "plain":
                world, config = 1, None
                run |= {"axis": None, "per_device_train_batch_size": ROWS // run["gradient_accumulation_steps"]}
            done = ranks.run_ranks(of, world, what, run, models, folder / name, config, group=False, timeout=90)
            if texts := {one for one in done if isinstance(one, str)}:
                break
        results.append(texts.pop() if texts else done[0])
    plain, zero = results
    if pair[1]["axis"] == "tensor" and isinstance(plain, dict):
        plain = {name: {**result, "weights": {}} for name, result in plain.items()}
    lines = drawn_runs.errors_of(plain, zero) or drawn_runs.differences(plain, zero)
    ignored = ("train_loss", *(("learning_rate",) if pair[1]["json"] else ()))  # which the engine steps before Trainer logs it
    return [line for line in lines if not any(name in line for name in ignored)]


def shown(pair: tuple[Drawn, Drawn]) -> tuple[Drawn, Drawn]:
    first, second = ({**changed({k: v for k, v in part.items() if k != "ranks"}), "ranks": part["ranks"]} for part in pair)
    return first, second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", help="options of the two runs, as they were printed")
    given = parser.parse_args()
    random_ = random.Random(given.seed)
    if given.run:
        defaults: Drawn = {name: values[0] for name, values in {**SHARED, **EACH}.items()}
        pairs: list[Any] = [tuple(made_valid({**defaults, **part}) for part in eval(given.run))]  # noqa: S307
    else:
        pairs = [draw(random_) for _ in range(given.count)]
    drawn_runs.report(pairs, compared, shown)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
