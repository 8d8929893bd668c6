"""Define scripts of the fuzzer as plain data: the operations and where they may stand, how scripts are drawn, and how they are written in a
line.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

from hypothesis import strategies

PARAMETERS = ("blocks.0.up.weight", "blocks.1.gain", "embed.weight", "blocks.1.down.weight", "head.weight", "blocks.0.up.bias")
DIVIDED = ("blocks.0.up.weight", "blocks.1.down.weight", "blocks.0.up.bias")  # where layers are split
LAYERS = ("blocks.0", "blocks.1", "head", "embed")
# Parameters of models with experts that scripts use in place of others.
EXPERT_PARAMETERS = {
    "listed": {
        "blocks.0.up.weight": "blocks.0.mixture.experts.1.weight",
        "blocks.1.down.weight": "blocks.1.mixture.experts.2.weight",
        "blocks.0.up.bias": "blocks.0.mixture.router.weight",
    },
    "stacked": {
        "blocks.0.up.weight": "blocks.0.mixture.experts.gate_up_proj",
        "blocks.1.down.weight": "blocks.1.mixture.experts.down_proj",
        "blocks.0.up.bias": "blocks.0.mixture.router.weight",
    },
}

WAYS = ("ulysses", "allgather", "alltoall", "both")  # to divide sequences


@dataclass(frozen=True)
class Cell:
    """Settings under which a script runs.

    Attributes:
        stage: ZeRO stage.
        dtype: "fp32" or "bf16".
        ranks: Number of ranks.
        split: Number of ranks that hold each layer together, and have the same batches (tensor parallelism).
        stages: Number of stages of a pipeline, each on other ranks.
        experts: Number of ranks that hold the experts of each layer together.
        sequences: Number of ranks that divide each sequence.
        way: How they do it: "ulysses", "allgather" and "alltoall" of context parallelism, or "both": pairs of ranks exchange heads, and
            keys are gathered over pairs.
        mixture: Experts of each layer: "none", "listed" modules, or "stacked" in one tensor.
        accumulation: Micro-steps per optimizer step.
        clip: Largest norm of all gradients; 0 is off.
        frozen: Layer that is frozen when the engine is made, or "none".
        persist: ``stage3_param_persistence_threshold``.
        keep: Whether blocks stay unsharded between forward and backward.
        client: Whether the script passes its own torch optimizer.
        tied: Whether the head's matrix is the embedding's.
        buffers: Whether the model has a table, running statistics and a counter.
        recompute: "none", "block", or "pieces" (reentrant, in as many pieces as the data determines).
        looks: All values are compared after each "step", or at the "end" only.
        under: Key of ``engine.UNDER``: settings of the configuration that change no result.
    """

    stage: int = 0
    dtype: str = "fp32"
    ranks: int = 1
    split: int = 1
    stages: int = 1
    experts: int = 1
    sequences: int = 1
    way: str = "ulysses"
    mixture: str = "none"
    accumulation: int = 1
    clip: float = 0.0
    frozen: str = "none"
    persist: int = 0
    keep: int = 0
    client: int = 0
    tied: int = 0
    buffers: int = 0
    recompute: str = "none"
    looks: str = "step"
    under: str = "none"

    @property
    def batches(self) -> int:
        """Return the number of different batches of a micro-step."""
        return self.ranks // self.split // self.stages // self.sequences

    def place(self, rank: int) -> int:
        """Return the position of ``rank`` among the ranks of its stage with different batches."""
        return rank % (self.ranks // self.stages) // self.split // self.sequences


# Values of each field; the first is the simplest one.
CELL_VALUES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "ranks": (1, 2),
    "accumulation": (1, 2),
    "clip": (0.0, 0.5),
    "frozen": ("none", *LAYERS),
    "persist": (0, 1000),
    "keep": (0, 1),
    "client": (0, 1),
    "tied": (0, 1),
    "buffers": (0, 1),
    "recompute": ("none", "block", "pieces"),
    "looks": ("step", "end"),
}
_OFTEN = {"stage": (0, 1, 2, 3, 3), "dtype": ("fp32", "bf16"), "ranks": (1, 2, 2, 2), "accumulation": (1, 1, 2)}


class Operation(NamedTuple):
    """One line of a script."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.args)])

    def get(self, key: str) -> Any:
        return dict(self.args).get(key)


class Script(NamedTuple):
    """A cell and the operations that run in it, in order."""

    cell: Cell
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        return "\n".join([cell_text(self.cell), *map(str, self.operations)])


@dataclass(frozen=True)
class Kind:
    """Allowed arguments and places of an operation, and the errors that it may raise.

    Attributes:
        args: Values of each argument, the simplest first.
        gaps: Where it may be drawn: "a" before a forward, "b" before the backward, "c" before the step, "z" at the end: operations that
            always raise.
        refusal: "never": it must work. "named": an error on all ranks that names the parameter or layer of ``args`` is accepted. "any": an
            error of the package on all ranks is accepted. Words: if one rank alone does it, an error on all ranks with one of these words
            is accepted.
    """

    args: dict[str, tuple[Any, ...]]
    gaps: str
    refusal: str | tuple[str, ...] = "never"


_DATA = tuple(range(20, 26))
_ONE: dict[str, tuple[Any, ...]] = {"param": PARAMETERS}
KINDS: dict[str, Kind] = {
    # The training itself, drawn in its own order.
    "forward": Kind({"data": (*range(10), *_DATA)}, ""),
    "backward": Kind({}, ""),
    "step": Kind({}, "a"),
    # Forwards without training.
    "evaluate": Kind({"data": _DATA}, "abc"),
    "generate": Kind({"data": _DATA, "lengths": ("same", "by_rank")}, "abc"),
    "infer": Kind({"data": _DATA}, "abc"),
    "call_module": Kind({"data": _DATA}, "abc"),
    "forward_lost": Kind({"data": _DATA}, "a"),
    "forward_more": Kind({"data": _DATA, "how": ("engine", "module")}, "b"),
    "peek": Kind({"data": _DATA}, "abc"),
    "mode": Kind({"to": ("eval", "train")}, "abc"),
    # Errors that the script catches.
    "fail_forward": Kind({"layer": LAYERS[:2], "who": ("all", 0), "data": (*range(10), *_DATA)}, "ac", ("numbers of micro-steps",)),
    "fail_backward": Kind({"layer": LAYERS[:2], "data": _DATA}, "a"),
    "bad_save": Kind({"who": ("all", 0), "what": ("none", "number")}, "z", "any"),
    # Files.
    "save": Kind({}, "abc"),
    "load": Kind({"which": ("last", "first")}, "a"),
    "save_model": Kind({}, "abc"),
    "state_dict": Kind({}, "abc"),
    # What trains.
    "freeze": Kind({"layer": LAYERS}, "abc", "named"),
    "unfreeze": Kind({"layer": LAYERS}, "abc", "named"),
    "add_adapter": Kind({"layer": LAYERS[:2], "how": ("group", "bare"), "trains": (1, 0)}, "ac", "named"),
    "remove_adapter": Kind({"layer": LAYERS[:2]}, "ac", "named"),
    # Values.
    "write": Kind({**_ONE, "how": ("assign", "mul", "clamp", "copy", "data_mul", "data_copy")}, "abc", "named"),
    "load_module": Kind({"how": ("engine", "module")}, "ac", "any"),
    "gather_write": Kind({**_ONE, "modifier": (0, 1, "none"), "who": ("all", 0, 1)}, "abc", "named"),
    "average": Kind({"how": ("gathered", "plain")}, "abc", "any"),
    "average_in": Kind({"how": ("gathered", "plain")}, "abc", "any"),
    "swa": Kind({"data": _DATA}, "ac", "any"),
    "compute": Kind({**_ONE, "what": ("sum", "norm", "float", "clone", "compare", "cat")}, "abc", "named"),
    "penalty": Kind({"how": ("iterated", "attribute"), "over": ("all", *LAYERS)}, "b"),
    "read": Kind({**_ONE, "what": ("dtype", "shape", "repr", "grad", "requires_grad", "names", "attribute"), "who": ("all", 0)}, "abc"),
    # Hooks, whose results do not depend on the ranks' shares.
    "hook_layer": Kind({"layer": LAYERS}, "a"),
    "hook_grad": Kind(_ONE, "a", "named"),
    # Gradients and the optimizer.
    "write_grad": Kind({**_ONE, "who": ("all", 0)}, "c", "named"),
    "set_grad": Kind(_ONE, "c", "any"),
    "get_grad": Kind(_ONE, "c"),
    "clip_grads": Kind({}, "c"),
    "set_master": Kind(_ONE, "ac", "any"),
    "get_master": Kind(_ONE, "abc"),
    "set_moments": Kind(_ONE, "ac", "any"),
    "set_lr": Kind({"lr": (0.002, 0.05)}, "abc"),
    "zero_grad": Kind({"how": ("engine", "module", "optimizer", "client", "blocks.0", "head")}, "abc"),
}


# They read or write layers of other stages, add some, or raise on one stage while the others wait for it.
_NOT_IN_STAGES = frozenset(
    [
        "compute",
        "penalty",
        "average",
        "average_in",
        "swa",
        "gather_write",
        "add_adapter",
        "remove_adapter",
        "fail_forward",
        "fail_backward",
        "set_moments",
    ]
)
# What must have been done before.
NEEDS = {
    "load": Operation("save"),
    "average_in": Operation("average", (("how", "gathered"),)),
    "remove_adapter": Operation("add_adapter", (("layer", "blocks.0"), ("how", "bare"), ("trains", 1))),
}


def refusal_words(operation: Operation) -> Sequence[str] | None:
    """Return words of which an error that refuses ``operation`` must use one; "" means any error of the package, None: it must work."""
    refusal = KINDS[operation.name].refusal
    if refusal == "never" or (isinstance(refusal, tuple) and operation.get("who") == "all"):
        return None
    if refusal != "named":
        return [""] if isinstance(refusal, str) else refusal
    # A tied matrix has two names; a write to a module may be refused by that of its parameter.
    found = [str(value) for key, value in operation.args if key in ("param", "layer")]
    if operation.get("how") == "group":
        found.append("param group")
    return found + [name for word in found if word in ("embed.weight", "head.weight") for name in ("embed.weight", "head.weight")]


def fails_alone(script: Script, place: int) -> bool:
    """Return whether the operation at ``place`` is a forward that raises on one rank, while the others are at the operation after it."""
    operation = script.operations[place]
    return operation.name == "fail_forward" and operation.get("who") == 0 and script.cell.ranks > 1


class Course:
    """Progress of a script: the facts that decide whether the next operation makes sense.

    Args:
        cell: Settings under which the script runs.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.adapters: set[Any] = set()
        self.done: set[str] = set()
        self.held = self.waits = False  # a loss waits for its backward, gradients wait for their step

    def take(self, operation: Operation) -> bool:
        """Append ``operation``, if it makes sense at this place in plain PyTorch; return whether it does."""
        name, layer, cell = operation.name, operation.get("layer"), self.cell
        between = not self.held and not self.waits
        makes_sense = {
            "backward": self.held,
            "penalty": self.held,
            "forward_more": self.held,
            "clip_grads": self.waits and cell.accumulation == 1,
            "add_adapter": layer not in self.adapters,
            "remove_adapter": layer in self.adapters,
            "load": "save" in self.done and between,
            "average_in": "average" in self.done,
            # At stage 3 the rank that writes is refused where it stands; others cannot know.
            "write_grad": self.waits and cell.accumulation == 1 and (cell.stage < 3 or operation.get("who") == "all"),
            "set_grad": self.waits and cell.accumulation == 1,
            "get_grad": self.waits,
            "zero_grad": cell.client or operation.get("how") != "client",
            "fail_backward": between,
            "bad_save": between,
            "gather_write": cell.ranks > 1 or operation.get("modifier") != 1,
        }
        if cell.sequences > 1 and name == "fail_forward" and operation.get("who") != "all":
            return False  # the others wait for its part of the sequence
        parts = cell.split > 1 or cell.experts > 1
        if parts and not self._fits_parts(operation) or cell.stages > 1 and not self._fits_stages(operation):
            return False
        # Reentrant recomputation has no gradients where its input needs none.
        if not makes_sense.get(name, True) or cell.recompute == "pieces" and "embed" in (layer, cell.frozen):
            return False
        if name in ("add_adapter", "remove_adapter"):
            self.adapters ^= {layer}
        if name in ("forward", "backward", "step"):
            self.held, self.waits = name == "forward", name == "backward" or name == "forward" and self.waits
        self.done.add(name)
        return True

    def _fits_parts(self, operation: Operation) -> bool:
        """Return whether ``operation`` is one that documents allow where ranks hold parts of layers, or some of the experts."""
        name, alone = operation.name, operation.get("who") not in ("all", None)
        if name == "gather_write" and operation.get("modifier") == "none":
            param = str(operation.get("param"))
            return not (alone and (param in DIVIDED or ".experts." in param))  # each rank writes its part
        if name == "generate" and self.cell.experts > 1 and operation.get("lengths") == "by_rank":
            return False  # experts wait for the tokens of each rank
        # A rank that leaves a forward alone is waited for; without gradients a script sees parts of parameters.
        return name != "compute" and not (name == "fail_forward" and alone)

    def _fits_stages(self, operation: Operation) -> bool:
        """Return whether ``operation`` is one that documents allow where ranks hold the layers of their stage alone."""
        sums = self.cell.accumulation > 1 and operation.name == "get_grad"  # those of stages that hold one weight are added at the end
        return operation.name not in _NOT_IN_STAGES and not sums


def valid(script: Script) -> bool:
    """Return whether every operation makes sense at its place: a load comes after its save, a removal after the addition, and so on."""
    return script.cell.batches > 0 and keep_valid(script) == list(script.operations)


# -- text ----------------------------------------------------------------------------------------------------------------


def cell_text(cell: Cell) -> str:
    """Return a cell as the first line of a script: the four settings that always matter, and other settings that differ from the
    default.
    """
    always = ("stage", "dtype", "ranks", "accumulation")
    shown = [field for field in fields(Cell) if field.name in always or getattr(cell, field.name) != field.default]
    return " ".join(["cell", *(f"{field.name}={getattr(cell, field.name)}" for field in shown)])


def parse(text: str) -> Script:
    """Read a script: lines or parts between semicolons, the first of which may be the cell."""
    lines = [line.strip() for line in text.replace(";", "\n").splitlines()]
    operations = [_parse_line(line) for line in lines if line and not line.startswith("#")]
    cell = Cell()
    if operations and operations[0].name == "cell":
        cell = replace(cell, **dict(operations.pop(0).args))
    unknown = [operation.name for operation in operations if operation.name not in KINDS]
    if unknown:
        raise ValueError(f"no operation is called {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return Script(cell, tuple(operations))


def _parse_line(line: str) -> Operation:
    name, *parts = line.split()
    return Operation(name, tuple((key, _parse_value(value)) for key, value in (part.split("=", 1) for part in parts)))


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# -- drawing -------------------------------------------------------------------------------------------------------------


@strategies.composite
def scripts(draw: Any) -> Script:
    """Draw a script: up to three optimizer steps, with other operations before, between and after their phases."""
    cell = Cell(
        **{name: draw(strategies.sampled_from(_OFTEN.get(name, values[:1] * 5 + values[1:]))) for name, values in CELL_VALUES.items()}
    )
    operations: list[Operation] = []
    for _ in range(draw(strategies.integers(1, 3)) * cell.accumulation):
        for gap, name in (("a", "forward"), ("b", "backward"), ("c", "step")):
            operations += _others(draw, gap)
            operations.append(_drawn(draw, name))
    operations += _others(draw, "a")
    if not draw(strategies.integers(0, 7)):
        operations += _others(draw, "z")
    operations = list(_with_needs(operations))
    for place, (operation, following) in enumerate(itertools.pairwise(operations)):
        if (operation.name, operation.get("who"), following.name) == ("fail_forward", 0, "forward") and draw(strategies.booleans()):
            operations[place + 1] = Operation("forward", (("data", operation.get("data")),))
    return Script(cell, tuple(keep_valid(Script(cell, tuple(operations)))))


def _others(draw: Any, gap: str) -> Iterator[Operation]:
    names = [name for name, kind in KINDS.items() if gap in kind.gaps]
    for _ in range(draw(strategies.sampled_from((0, 0, 1, 1, 2)))):
        yield _drawn(draw, draw(strategies.sampled_from(names)))


def _with_needs(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Insert the operations that others need and that are missing: a save for a load, and so on."""
    before: set[Operation] = set()
    for operation in operations:
        need = NEEDS.get(operation.name)
        if need is not None and not any(one.name == need.name for one in before):
            operation = Operation(need.name, tuple((key, operation.get(key) or value) for key, value in need.args))
        before.add(operation)
        yield operation


def _drawn(draw: Any, name: str) -> Operation:
    return draw(strategies.sampled_from(variants(name)))


@cache
def variants(name: str) -> tuple[Operation, ...]:
    """Return the operation with all its arguments."""
    args = KINDS[name].args
    return tuple(Operation(name, tuple(zip(args, values, strict=True))) for values in itertools.product(*args.values()))


def keep_valid(script: Script) -> list[Operation]:
    """Return the operations of ``script`` without those that make no sense after the ones before them."""
    course = Course(script.cell)
    kept = Script(script.cell, tuple(operation for operation in script.operations if course.take(operation)))
    # The other ranks' forward is the one that a rank tries again: any other operation there is a collective that a rank runs alone.
    behind = [*(operation.name for operation in kept.operations[1:]), ""]
    return [operation for place, operation in enumerate(kept.operations) if behind[place] == "forward" or not fails_alone(kept, place)]


def simpler(script: Script) -> Iterator[Script]:
    """Yield scripts that do a little less, those that leave out most first."""
    operations = script.operations
    for size in (len(operations) // 2, 3, 2, 1):
        for start in range(len(operations) - size + 1) if size else ():
            yield Script(script.cell, operations[:start] + operations[start + size :])
    for name, values in CELL_VALUES.items():
        for value in values[: values.index(present)] if (present := getattr(script.cell, name)) in values else ():
            yield Script(replace(script.cell, **{name: value}), operations)
    for index, operation in enumerate(operations):
        for key, values in KINDS[operation.name].args.items():
            for value in values[: values.index(operation.get(key))] if operation.get(key) in values else values[:1]:
                args = tuple((name, value if name == key else old) for name, old in operation.args)
                yield Script(script.cell, (*operations[:index], Operation(operation.name, args), *operations[index + 1 :]))
