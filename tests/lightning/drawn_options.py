"""Options of programs with Lightning, drawn by a seed: loops with Fabric, and fits of Trainer."""

from __future__ import annotations

import random
from typing import Any

from tests.accelerate.loop_options import Drawn, fit_offload

# Values of each option; the first is the default.
COMMON: dict[str, list[Any]] = {
    "stage": [3, 2, 1, 0],
    "strategy": ["config", "arguments", "stock"],
    "precision": ["32-true", "bf16-mixed", "bf16-true", "16-mixed"],
    "optimizer": ["adamw", "sgd", "groups", "adagrad", "two"],
    "accumulation": [1, 2, 3],
    "scheduler": [None, "step", "epoch", "plateau"],
    "dropout": [False, True],
    "rows": [24, 22, 13],
    "epochs": [2, 1, 3],
    "resume": [None, "continues", "starts again"],
    "frozen": [None, "first", "freezes", "unfreezes"],
    "change": [None, "lr", "weights"],
    "reads": [None, "norms", "state", "gradients"],
    "late": [False, True],
    "offload": [None, "optimizer", "both"],
}
FABRIC: dict[str, list[Any]] = {
    "setup": ["together", "with scheduler", "module first"],
    "pattern": ["no_sync", "plain", "config"],
    "clip": [None, "norm", "value", "inf", "not finite", "torch", "torch value", "config"],
    "zero": ["after", "before", "kept", "module"],
    "call": ["forward", "marked", "two forwards", "closure", "module"],
    "second": [None, "teacher", "in turn", "interleaved", "one loss"],
    "eval": [None, "no_grad", "all_gather", "all_reduce"],
    "skips": [None, "step", "drops"],
    "saves": ["checkpoint", "state_dict", "model only", "with more"],
}
TRAINER: dict[str, list[Any]] = {
    "manual": [None, "each batch", "accumulates", "closure", "toggles"],
    "clip": [None, "norm", "value", "hook", "hook value"],
    "frequency": [1, 2],
    "validation": [None, "epoch", "steps"],
    "callback": [None, "average", "swa", "accumulation", "finetuning", "early", "monitor", "best"],
    "hook": [None, "optimizer_step", "before step", "after backward", "backward", "zero_grad", "lr_scheduler_step", "batch end"],
    "returns": ["loss", "dict"],
    "logs": [None, "step", "epoch", "both"],
    "after": [None, "test", "predict", "validate", "twice", "load_from_checkpoint"],
    "limit": [None, 3, 0.5],
    "hyper": [False, True],
    "json": [None, "optimizer"],
    "loader": [None, "no sampler", "iterable", "data module"],
    "length": ["epochs", "steps"],
}
OPTIONS = {"fabric": {**COMMON, **FABRIC}, "trainer": {**COMMON, **TRAINER}}


def draw(random_: random.Random, kind: str) -> Drawn:
    """Draw one program: up to eight options differ from their defaults, beside the stage; ``kind`` is "fabric" or "trainer"."""
    options = OPTIONS[kind]
    run: Drawn = {"kind": kind, **{name: values[0] for name, values in options.items()}}
    run["stage"] = random_.choice([3, 3, 2, 1, 0])
    for name in random_.sample(sorted(set(options) - {"stage"}), random_.randint(3, 8)):
        run[name] = random_.choice(options[name][1:])
    if kind == "fabric" and run["setup"] == "with scheduler":
        run["scheduler"] = "step"  # per epoch it is an error
    return made_valid(run)


def made_valid(run: Drawn) -> Drawn:
    """Change options that cannot go together, or mean nothing."""
    run = dict(run)
    fit_offload(run)
    if run["precision"] != "32-true":
        run["change"] = None if run["change"] == "weights" else run["change"]
        run["reads"] = None
    if run["frozen"] == "unfreezes" or run["frozen"] == "freezes":
        run["resume"] = None
    if run["frozen"] == "freezes" and run.get("zero") == "kept":
        run["zero"] = "after"  # docs/parameters.md: plain PyTorch goes on with gradients of zeros
    if run["reads"] == "gradients" and run["kind"] == "trainer":
        run["hook"] = "before step"
    if run["resume"]:
        run["change"] = None
        run["epochs"] = max(run["epochs"], 2)
        run["dropout"] = False  # a script's own random state is its own to save
    return _valid_loop(run) if run["kind"] == "fabric" else _valid_fit(run)


def _valid_loop(run: Drawn) -> Drawn:
    if run["accumulation"] == 1:
        run["pattern"] = "no_sync"
    if run["clip"] == "config":
        run["skips"] = None  # the loop of DDP clips where it does not step
    if run["call"] == "closure":
        run["accumulation"], run["pattern"], run["skips"], run["clip"] = 1, "no_sync", None, None
    if run["setup"] == "with scheduler":
        run["scheduler"] = run["scheduler"] or "step"
    if run["second"] == "teacher" and run["precision"] == "bf16-true":
        run["precision"] = "bf16-mixed"  # DDP refuses a model without trained parameters
    if run["second"] and run["clip"] == "config":
        run["clip"] = None
    if run["second"]:
        run["resume"], run["skips"] = None, None
        run["call"] = "forward"
    if run["pattern"] == "config":
        run["skips"], run["zero"] = None, "after"
        run["second"] = None
        run["clip"] = run["clip"] and "config"
        run["reads"] = None if run["reads"] == "gradients" else run["reads"]
    if run["scheduler"] == "plateau":
        run["setup"] = "together" if run["setup"] == "with scheduler" else run["setup"]
    return run


def _valid_fit(run: Drawn) -> Drawn:
    if run["manual"]:
        run["accumulation"] = 1
        run["clip"] = {"norm": "hook", "value": "hook value"}.get(run["clip"], run["clip"])
        run["returns"] = "loss"
        run["callback"] = None if run["callback"] in ("accumulation", "swa") else run["callback"]
        if run["hook"] in ("optimizer_step", "lr_scheduler_step", "zero_grad", "backward"):
            run["hook"] = None
    if run["callback"] in ("early", "best") or run["scheduler"] == "plateau":
        run["validation"] = run["validation"] or "epoch"
    if run["json"] and run["callback"] == "monitor":
        run["callback"] = None  # its entries have the name of the optimizer's class
    if run["callback"] == "accumulation":
        run["accumulation"] = 1
    if run["loader"] == "iterable":
        run["limit"] = None if run["limit"] == 0.5 else run["limit"]
        run["validation"] = run["validation"] and "epoch"
    if run["json"]:
        run["optimizer"], run["scheduler"] = "adamw", None
        run["strategy"] = "stock" if run["strategy"] == "stock" else "config"
        # Lightning gives the configuration's optimizer the parameters that require a gradient at first; a warning names the others.
        run["frozen"] = "first" if run["frozen"] == "unfreezes" else run["frozen"]
    if run["resume"] and run["callback"] in ("swa", "finetuning", "average"):
        run["callback"] = None
    if run["after"] == "twice":
        run["resume"] = None
        run["frozen"] = "first" if run["frozen"] == "unfreezes" else run["frozen"]
    return run


def each(kind: str) -> list[Drawn]:
    """Return one program for each value of each option, with stages in turn."""
    options = OPTIONS[kind]
    cases = [(name, value) for name, values in options.items() for value in values[1:] if name != "stage"]
    return [full({"kind": kind, "stage": (3, 1, 2, 0)[index % 4], name: value}) for index, (name, value) in enumerate(cases)]


def changed(run: Drawn) -> Drawn:
    """Return the options that differ from their defaults."""
    options = OPTIONS[run["kind"]]
    return {name: value for name, value in run.items() if name in ("kind", "stage") or value != options[name][0]}


def full(options: Drawn) -> Drawn:
    """Return a program with ``options``, and defaults for the others."""
    return made_valid({**{name: values[0] for name, values in OPTIONS[options["kind"]].items()}, **options})
