"""Options of runs that save under one configuration and resume under another, drawn by a seed."""

from __future__ import annotations

import random
from typing import Any

Drawn = dict[str, Any]
# Options of the whole run; the first value is the default.
SHARED: dict[str, list[Any]] = {
    "optimizer": ["adamw", "sgd", "adagrad", "amsgrad", "rmsprop", "nadam"],
    "clip": [0.0, 0.5],
    "scheduler": [None, "config", "client"],
    "average": [None, 0.9],
}
# Options of each part, between two loads.
PART: dict[str, list[Any]] = {
    "stage": [3, 2, 1, 0],
    "ranks": [2, 1, 3, 4],
    "precision": ["fp32", "bf16", "fp16"],
    "offload": [None, "optimizer", "both", "nvme"],
    "kind": ["given", "config"],  # of the optimizer
    "groups": ["two", "reversed", "split", "one each"],
    "frozen": [None, "entry", "blocks.0"],
    "scheduled": [True, False],
    "accumulation": [1, 2],
    "implementation": [None, "foreach", "fused"],
    "whole": [True, False],  # blocks that stay whole after use
    "save": [None, "background", "tag", "frozen left out", "twice", "middle"],
    "load": [None, "twice", "trained on", "in accumulation"],
    "steps": [2, 1, 3],
}
PARTS = 3


def draw(random_: random.Random, most_ranks: int) -> Drawn:
    """Draw a run: options of the whole, and of each of its parts."""
    run: Drawn = {name: values[0] for name, values in SHARED.items()}
    for name in random_.sample(sorted(SHARED), 2):
        run[name] = random_.choice(SHARED[name])
    precision = random_.choice(["fp32", "fp32", "fp32", "bf16", "fp16"])
    run["parts"] = []
    for _ in range(PARTS):
        part: Drawn = {name: values[0] for name, values in PART.items()}
        part["stage"], part["precision"] = random_.choice(PART["stage"]), precision
        part["ranks"] = random_.choice([count for count in PART["ranks"] if count <= most_ranks])
        for name in random_.sample(sorted(set(PART) - {"stage", "ranks", "precision"}), random_.randint(1, 5)):
            part[name] = random_.choice(PART[name])
        run["parts"].append(part)
    if random_.random() < 0.15:
        run["parts"][-1]["precision"] = random_.choice(PART["precision"])
    return made_valid(run)


def made_valid(run: Drawn) -> Drawn:
    """Change options that cannot go together."""
    for part in run["parts"]:
        if run["optimizer"] not in ("adamw", "sgd") or run["scheduler"] == "client":
            part["kind"] = "given"
        if part["offload"] in ("both", "nvme"):
            part["stage"] = 3
        if part["offload"] and part["stage"] == 0:
            part["stage"] = 2
        if part["offload"] and run["optimizer"] != "adamw":
            part["offload"] = None
        if part["implementation"] == "fused" and run["optimizer"] not in ("adamw", "sgd", "adagrad", "amsgrad"):
            part["implementation"] = None
        if part["frozen"] and part["save"] == "frozen left out":
            part["save"] = None
    for before, part in zip(run["parts"], run["parts"][1:], strict=False):
        if part["load"] == "trained on" and not before["scheduled"] and run["scheduler"]:
            part["load"] = None  # the checkpoint takes no scheduler back
    return run


def full(options: Drawn) -> Drawn:
    """Return a run with ``options``, and defaults for the others."""
    parts = [{**{name: values[0] for name, values in PART.items()}, **part} for part in options.get("parts", [{}, {}])]
    return made_valid({**{name: values[0] for name, values in SHARED.items()}, **options, "parts": parts})


def changed(run: Drawn) -> Drawn:
    """Return the options that differ from their defaults."""
    found = {name: value for name, value in run.items() if name != "parts" and value != SHARED[name][0]}
    parts = [{name: value for name, value in part.items() if value != PART[name][0] or name in ("stage", "ranks")} for part in run["parts"]]
    return {**found, "parts": parts}
