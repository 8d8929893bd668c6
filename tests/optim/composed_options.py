"""Features of optimizers that scripts write, drawn by a seed."""

from __future__ import annotations

import random
from typing import Any

Drawn = dict[str, Any]
# Values of each feature; the first is the default.
OPTIONS: dict[str, list[Any]] = {
    "stage": [1, 0, 2, 3],
    "precision": ["fp32", "bf16"],
    "offload": [None, "cpu", "small sub-groups"],
    "api": ["initialize", "accelerate"],
    "accumulation": [1, 2],
    "clip": [0.0, 0.5],
    # -- the class
    "rule": [
        "momentum", "sgd", "adam", "sign", "rms", "adan", "dual",
        "factored", "trust", "clipped", "centered", "orthogonal", "global", "mean",
    ],
    "counter": [
        "state int", "state tensor", "group", "attribute", "first state", "key", "first group", "list", "table", "tensor", "helper", "none",
    ],
    "write": ["sub", "data", "data sub", "copy", "set", "foreach", "addcdiv", "lerp", "swap", "flat", "slices", "numpy", "temporary"],
    "grad": ["reads", "clones", "in place", "drops", "replaces", "zeroes", "data"],
    "decay": [None, "coupled", "decoupled", "foreach"],
    "made": ["lazy", "init", "setdefault", "empty test"],
    "more state": [None, "nested", "list", "tuple", "text", "none", "float", "scalar", "flag", "double", "half", "bytes", "column"],
    "attribute": [
        None, "list", "walked", "by id", "by param", "buffers by param", "buffers by id", "buffers by index", "names", "numel", "groups",
    ],
    "argument": ["defaults", "attribute", "class"],
    "defaults": ["own", "keys", "none"],
    "methods": [None, "zero_grad", "load_state_dict", "state_dict", "add_param_group", "setstate", "no super", "closure first", "returns"],
    "kind": [None, "lookahead", "lookahead apart", "several", "sam", "adam", "torch"],
    "torch": [
        "AdamW foreach", "AdamW amsgrad", "AdamW maximize", "AdamW tensor", "AdamW fused", "Adam decoupled", "Adam differentiable",
        "Adam decay", "SGD nesterov", "SGD dampening", "SGD plain", "SGD fused", "RMSprop centered", "Adagrad", "Adadelta", "Adamax",
        "NAdam", "NAdam decoupled", "RAdam", "ASGD", "Rprop", "Adafactor", "Muon",
    ],
    # -- the script
    "groups": ["one", "two", "extra key", "each", "named", "rates", "rules"],
    "loop": [
        None, "rate", "flag", "scheduler", "add group", "freezes", "closure", "reads state", "clears state", "own step", "walks groups",
        "resets", "appends",
    ],
    "skips": [None, "some", "first"],
    "resume": [None, "new engine", "same engine", "state_dict"],
}  # fmt: skip
ALWAYS = ("stage", "precision", "offload", "api")


def draw(random_: random.Random) -> Drawn:
    """Draw one run: up to seven features of the class and the script differ from their defaults."""
    run: Drawn = {name: values[0] for name, values in OPTIONS.items()}
    run["stage"], run["rule"] = random_.choice([0, 1, 1, 2, 3, 3]), random_.choice(OPTIONS["rule"])
    run["precision"] = random_.choice(["fp32", "fp32", "bf16"])
    run["offload"] = random_.choice([None, None, "cpu", "small sub-groups"])
    run["api"] = random_.choice(["initialize", "initialize", "accelerate"])
    run["torch"] = random_.choice(OPTIONS["torch"])
    for name in random_.sample(sorted(set(run) - {*ALWAYS, "rule", "torch"}), random_.randint(2, 7)):
        run[name] = random_.choice(OPTIONS[name][1:])
    return made_valid(run)


def made_valid(run: Drawn) -> Drawn:
    """Change features that cannot go together, or mean nothing."""
    run = dict(run)
    if run["stage"] == 0:
        run["offload"] = None
    if run["kind"] in ("adam", "torch"):
        run |= {name: OPTIONS[name][0] for name in ("rule", "write", "grad", "decay", "made", "more state", "argument", "defaults")}
        run["counter"] = "none"
    run["torch"] = run["torch"] if run["kind"] == "torch" else OPTIONS["torch"][0]
    if run["torch"] == "Muon":
        run["loop"] = None if run["loop"] == "add group" else run["loop"]
    if run["kind"] == "torch" and run["groups"] in ("extra key", "rules"):
        run["groups"] = "two"
    if run["kind"]:
        run["methods"], run["attribute"] = None, None
        run["counter"] = "state int" if run["resume"] and run["kind"] not in ("adam", "torch") else run["counter"]
    if run["kind"] == "sam":
        run["loop"], run["api"], run["accumulation"] = None, "initialize", 1
    if run["loop"] in ("resets", "appends"):
        run["attribute"] = None if run["attribute"] == "groups" else run["attribute"]
        run["resume"] = None
    if run["loop"] == "closure" or run["methods"] == "closure first":
        run["accumulation"] = 1
    if run["loop"] == "reads state":
        run["attribute"], run["rule"] = None, "momentum"
    if run["loop"] == "add group" and run["defaults"] == "none":
        run["defaults"] = "own"
    if run["loop"] in ("add group", "freezes") or run["skips"]:
        run["resume"] = run["resume"] and "same engine"
    if run["loop"] == "add group" and run["attribute"] in ("by id", "by param", "names"):
        run["attribute"] = None  # the table lacks what is added
    if run["loop"] == "add group":
        run["groups"] = "one" if run["groups"] in ("each", "named") else run["groups"]
    if run["methods"] in ("add_param_group", "no super"):
        run["loop"] = None if run["loop"] == "add group" else run["loop"]
    if run["loop"] in ("clears state", "reads state", "closure", "own step"):
        run["api"] = "initialize"
    if run["loop"] in ("reads state", "clears state") and run["kind"]:
        run["loop"] = None
    if run["write"] == "numpy" or run["write"] == "set":
        run["argument"] = "defaults"
    if run["api"] == "accelerate":
        run["clip"] = 0.0
        run["resume"] = run["resume"] if run["resume"] != "state_dict" else None
    if run["counter"] == "first state" and run["rule"] in ("sgd",):
        run["rule"] = "momentum"
    if run["loop"] == "reads state":
        run["made"] = "empty test"
    if run["groups"] == "rules":
        run["argument"], run["made"] = "defaults", "lazy"
    if run["made"] == "init" and run["counter"] == "state tensor" or run["methods"] == "no super":
        run["made"] = "lazy"
    if run["methods"] == "no super":
        run["groups"] = "one" if run["groups"] == "named" else run["groups"]
        run["resume"] = None  # torch's own state_dict fails
        run["loop"] = None if run["loop"] == "resets" else run["loop"]
    if run["rule"] in ("global", "mean") or run["attribute"] == "numel":
        run["api"] = "initialize"  # the key that Accelerate sets allows them
        run["stage"], run["offload"] = 0 if run["stage"] < 3 else 3, None
    if run["made"] == "init" and run["methods"] == "no super":
        run["methods"] = None
    return run


def changed(run: Drawn) -> Drawn:
    """Return the features that differ from their defaults."""
    return {name: value for name, value in run.items() if value != OPTIONS[name][0]}


def full(run: Drawn) -> Drawn:
    """Return ``run`` with the defaults of the features that it does not name."""
    return {name: values[0] for name, values in OPTIONS.items()} | run
