"""Options of training loops with Accelerate, drawn by a seed."""

from __future__ import annotations

import random
from typing import Any

Drawn = dict[str, Any]
# Values of each option; the first is the default.
OPTIONS: dict[str, list[Any]] = {
    "model": ["gpt2", "llama", "mlp"],
    "stage": [3, 2, 1, 0],
    "precision": ["no", "bf16"],
    "accumulation": [1, 2, 3],
    "pattern": ["accumulate", "modulo", "no_sync"],
    "clip": [None, "in sync", "always"],
    "optimizer": ["adamw", "sgd", "groups", "fused", "adagrad"],
    "scheduler": [None, "prepared", "by hand", "not with the optimizer"],
    "zero": ["after", "before", "both", "kept", "module"],
    "loss": ["model", "own", "tokens", "weighted", "two forwards", "skips", "penalty", "scaled"],
    "loader": [None, "split", "dispatch", "uneven", "drop_last", "iterable", "seedless"],
    "rows": [24, 21, 10],
    "batch": [2, 1, 3],
    "epochs": [1, 2],
    "eval": [None, "metrics", "gather", "reduce", "pad", "objects", "loss"],
    "resume": [None, "continues", "starts again"],
    "save": [None, "save_model", "state_dict", "unwrapped"],
    "change": [None, "freezes", "lr", "group lr", "stops", "weights"],
    "checkpointing": [False, "reentrant", "without"],
    "prepare": ["together", "apart", "optimizer first", "no loader"],
    "offload": [None, "optimizer", "both"],
    "dropout": [False, True],
    "reads": [None, "norms", "state"],
    "unwraps": [False, True],
    "plugin": [None, "not with the loader", "not adjusted", "each batch"],
    "guard": [None, "no step", "drops"],
    "registered": [False, True],
    "autocast": [False, True],
    "second": [None, "teacher", "prepared teacher", "trained", "trained in turn"],
    "torch clip": [None, "norm", "value", "accelerator's value"],
    "twice": [False, True],
    "axis": [None],
}


def draw(random_: random.Random, axis: str | None = None) -> Drawn:
    """Draw one loop: up to nine options differ from their defaults, beside stage and model; ``axis`` is a name of ``AXES``, or None."""
    run: Drawn = {name: values[0] for name, values in OPTIONS.items()}
    run["stage"], run["model"] = random_.choice([3, 3, 2, 1, 0]), random_.choice(OPTIONS["model"])
    run["axis"] = axis
    for name in random_.sample(sorted(set(run) - {"stage", "model", "axis"}), random_.randint(4, 9)):
        if name != "pattern" or random_.random() < 0.2:  # an error under DeepSpeed, and here
            run[name] = random_.choice(OPTIONS[name][1:])
    return made_valid(run)


def fit_offload(run: Drawn) -> None:
    """Change stage and optimizer of ``run`` where its offload does not allow them."""
    if run["offload"] == "both":
        run["stage"] = 3
    if run["offload"] and run["stage"] == 0:
        run["stage"] = 2
    if run["offload"] and run["optimizer"] == "adagrad":
        run["optimizer"] = "adamw"


def made_valid(run: Drawn) -> Drawn:
    """Change options that cannot go together, or mean nothing."""
    run = dict(run)
    if run["model"] == "mlp":
        run["checkpointing"], run["dropout"] = False, False
        run["loss"] = {"model": "own", "tokens": "own"}.get(run["loss"], run["loss"])
        run["save"] = "save_model" if run["save"] == "unwrapped" else run["save"]
    if run["clip"] == "always" and run["accumulation"] > 1:
        run["clip"] = "in sync"  # else plain PyTorch clips what it has so far
    if run["change"] == "freezes":
        run["checkpointing"] = False  # DDP refuses it
        run["zero"] = "after" if run["zero"] == "kept" else run["zero"]  # a gradient of zeros decays a weight in plain PyTorch
    if run["resume"]:
        run["loader"] = None if run["loader"] in ("dispatch", "iterable") else run["loader"]
        run["change"] = None
        run["epochs"] = 2
    if run["pattern"] != "accumulate" and run["accumulation"] == 1:
        run["accumulation"] = 2
    fit_offload(run)
    if run["change"] == "weights" and run["precision"] == "bf16":
        run["change"] = None
    if (run["loss"] == "two forwards" or run["second"]) and run["checkpointing"] == "reentrant":
        run["checkpointing"] = "without"  # DDP refuses it
    if run["loader"] == "uneven":
        run["rows"], run["eval"] = 24, None  # ranks with other numbers of batches need join_uneven_inputs
    if run["pattern"] != "accumulate":
        run["plugin"] = None
    if run["torch clip"]:
        run["clip"] = None
    if run["second"] == "prepared teacher":
        run["stage"] = 3  # below, accelerate's script has to say so
    if run["second"] == "teacher" and run["stage"] == 3:
        run["stage"] = 2  # a model that from_pretrained divides is only called when it is prepared; an error says so
    if run["second"] in ("trained", "trained in turn"):
        run["clip"] = None  # "auto" in the JSON is 1.0 for the model that the script does not clip
    if run["second"] and run["model"] == "mlp":
        run["model"] = "gpt2"
    if run["guard"] and run["accumulation"] > 1 or run["resume"]:
        run["guard"] = None
    if run["axis"]:
        run["dropout"] = False  # ranks draw other numbers
        run["loader"] = run["loader"] if run["loader"] == "drop_last" else None
        run["eval"] = run["eval"] if run["eval"] in ("metrics", "objects", "loss") else None  # others have the values of all processes
        run["scheduler"] = run["scheduler"] and "by hand"  # a prepared one steps once per process
        run["save"], run["reads"] = run["save"] or "state_dict", run["reads"] and "state"
        run["model"] = "llama" if run["model"] == "mlp" else run["model"]
        run["pattern"], run["second"] = "accumulate", None
    if run["axis"] == "sequence":  # each rank loads rows of its own, and gets slices
        run["rows"], run["loader"] = 12 * run["batch"], None
        run["eval"] = run["eval"] and "loss"
        run["loss"] = run["loss"] if run["loss"] in ("skips", "scaled") else "model"
    if run["axis"] == "pipeline":
        run["stage"], run["offload"] = min(run["stage"], 1), None
    if run["resume"]:
        run["twice"] = False
        run["second"] = None if run["second"] == "trained in turn" else run["second"]
    return run


def changed(run: Drawn) -> Drawn:
    """Return the options that differ from their defaults."""
    return {name: value for name, value in run.items() if value != OPTIONS[name][0] or name in ("stage", "model")}


def full(options: Drawn) -> Drawn:
    """Return a loop with ``options``, and defaults for the others."""
    return made_valid({**{name: values[0] for name, values in OPTIONS.items()}, **options})
