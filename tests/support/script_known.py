"""What scripts may not do yet: patterns that the fuzzer leaves out until they are mended, each with scripts that show the fault.

Delete an entry when ``python -m tests.support.script_report known`` says that it is closed, and move its scripts to ``MENDED``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.support.script_grammar import Cell, Operation, Script, keep_valid, parse


class Known(NamedTuple):
    """A fault that is open.

    Attributes:
        issue: Section of the issue that it belongs to.
        pattern: Settings of the cell and operations that come in this order, whatever stands between them, parted by "|"; a value may
            be several, parted by "/". "at" is where an operation stands, as in ``phases``.
        reason: What goes wrong.
        scripts: Small ones that show it.
    """

    issue: str
    pattern: str
    reason: str
    scripts: tuple[str, ...] = ()


_TRAIN = "forward data=0; backward; step"
KNOWN_OPEN: tuple[Known, ...] = (
    Known(
        "A",
        "dtype=bf16 buffers=1",
        "buffers are cast to the type of the parameters",
        (f"cell stage=0 dtype=bf16 buffers=1; {_TRAIN}", f"cell stage=3 dtype=bf16 ranks=2 buffers=1; {_TRAIN}"),
    ),
    Known(
        "B",
        "| freeze",
        "what is frozen after initialize goes on moving by momentum and decay",
        tuple(f"cell stage={stage} ranks=2; {_TRAIN}; freeze layer=head; forward data=1; backward; step" for stage in range(4)),
    ),
    Known(
        "B",
        "| unfreeze",
        "what was frozen at initialize never moves",
        tuple(f"cell stage={stage} ranks=2 frozen=blocks.0; unfreeze layer=blocks.0; {_TRAIN}" for stage in range(4)),
    ),
    Known(
        "B",
        "client=1 | add_adapter how=group",
        "the script's own optimizer takes the group, and ranks train what they added apart",
        tuple(f"cell stage={stage} ranks=2 client=1; add_adapter layer=blocks.0 how=group trains=1; {_TRAIN}" for stage in range(4)),
    ),
    Known(
        "C",
        "| write how=assign at=a",
        "safe_get_full_fp32_param does not see what was assigned before the next backward; at stage 3 a copy of the module names nothing",
        (
            *(
                f"cell stage={stage} ranks=2; write param=blocks.0.up.weight how=assign; get_master param=blocks.0.up.weight"
                for stage in range(3)
            ),
            "cell stage=3 ranks=2; write param=blocks.0.up.weight how=assign; swa data=20",
        ),
    ),
    Known(
        "C",
        "| write how=assign at=b",
        "backward computes with the new values of a matrix, where PyTorch's saved view has the old ones",
        tuple(f"cell stage={stage}; forward data=0; write param=blocks.0.up.weight how=assign; backward; step" for stage in range(4)),
    ),
    Known(
        "C",
        "| write how=assign at=c",
        "the update of the step that follows is lost",
        tuple(f"cell stage={stage} ranks=2; forward data=0; backward; write param=blocks.1.gain how=assign; step" for stage in range(3)),
    ),
    Known(
        "C",
        "dtype=bf16 | write how=mul/clamp/copy/data_mul/data_copy",
        "the next step takes back what was written in place",
        tuple(
            f"cell stage={stage} dtype=bf16 ranks=2; write param=blocks.1.gain how={how}; {_TRAIN}"
            for stage in range(3)
            for how in ("mul", "data_copy")
        ),
    ),
    Known(
        "C",
        "dtype=bf16 | load_module how=module",
        "the next step takes back what the module's own load_state_dict wrote",
        tuple(f"cell stage={stage} dtype=bf16 ranks=2; load_module how=module; {_TRAIN}" for stage in range(3)),
    ),
    Known(
        "C",
        "dtype=bf16 stage=0/1/2 | gather_write modifier=none",
        "the next step takes back what was written inside a gather that changes nothing",
        tuple(
            f"cell stage={stage} dtype=bf16 ranks=2; gather_write param=blocks.1.gain modifier=none who=all; {_TRAIN}" for stage in range(3)
        ),
    ),
    Known(
        "C",
        "stage=0/1/2 ranks=2 | gather_write modifier=none who=0/1",
        "what one rank wrote stays on that rank",
        tuple(f"cell stage={stage} ranks=2; gather_write param=blocks.1.gain modifier=none who=0; {_TRAIN}" for stage in range(3)),
    ),
    Known(
        "C",
        "stage=3 | gather_write modifier=none at=b",
        "weights keep what was written while the block was whole, masters do not",
        ("cell stage=3 ranks=2; forward data=0; gather_write param=blocks.0.up.weight modifier=none who=all; backward; step",),
    ),
    Known(
        "C",
        "stage=3 persist=1000 | gather_write modifier=none",
        "weights that stay whole keep what was written, masters do not; what one rank wrote stays on that rank",
        tuple(
            f"cell stage=3 ranks=2 persist=1000; gather_write param=blocks.0.up.bias modifier=none who={who}; {_TRAIN}"
            for who in ("all", 0)
        ),
    ),
    Known(
        "C",
        "stage=3 persist=1000 | write",
        "what was assigned to weights that stay whole is lost",
        tuple(f"cell stage=3 ranks=2 persist=1000; write param=blocks.0.up.bias how={how}; {_TRAIN}" for how in ("assign", "mul")),
    ),
    Known(
        "C",
        "ranks=2 | gather_write modifier=0 who=1",
        "what another rank than modifier_rank wrote is lost",
        tuple(f"cell stage={stage} ranks=2; gather_write param=blocks.1.gain modifier=0 who=1; {_TRAIN}" for stage in range(4)),
    ),
    Known(
        "C",
        "ranks=2 | gather_write modifier=1 who=0",
        "what another rank than modifier_rank wrote is lost",
        tuple(f"cell stage={stage} ranks=2; gather_write param=blocks.1.gain modifier=1 who=0; {_TRAIN}" for stage in range(4)),
    ),
    Known(
        "C",
        "stage=0/1/2 ranks=2 frozen=blocks.0/blocks.1/head/embed | gather_write modifier=0/1 who=0/1",
        "a frozen parameter is not broadcast, so ranks have different values",
        tuple(
            f"cell stage={stage} ranks=2 frozen=blocks.0; gather_write param=blocks.0.up.weight modifier=0 who=0; {_TRAIN}"
            for stage in range(3)
        ),
    ),
    Known(
        "C",
        "| write_grad | get_grad",
        "safe_get_full_grad does not see a gradient that the script has written",
        tuple(
            f"cell stage={stage}; forward data=0; backward; write_grad param=embed.weight who=all; get_grad param=embed.weight"
            for stage in range(3)
        ),
    ),
    Known(
        "D",
        "stage=3 | write how=mul/clamp/copy/data_mul/data_copy",
        "arithmetic on an empty parameter does nothing, a copy to it names nothing",
        tuple(
            f"cell stage=3 ranks=2; write param=blocks.0.up.weight how={how}; {_TRAIN}"
            for how in ("mul", "clamp", "copy", "data_mul", "data_copy")
        ),
    ),
    Known(
        "D",
        "stage=3 | load_module how=module",
        "torch refuses shapes of empty parameters; nothing says what to do",
        (f"cell stage=3 ranks=2; load_module how=module; {_TRAIN}",),
    ),
    Known(
        "D",
        "stage=3 | average/average_in how=plain",
        "averages of nothing",
        (f"cell stage=3 ranks=2; average how=plain; {_TRAIN}",),
    ),
    Known(
        "D",
        "stage=3 | compute",
        "arithmetic, copies and comparisons of an empty parameter give nothing",
        tuple(
            f"cell stage=3 ranks=2; compute param=blocks.0.up.weight what={what}; {_TRAIN}" for what in ("sum", "float", "clone", "compare")
        ),
    ),
    Known(
        "C",
        "dtype=bf16 | average_in how=plain",
        "the next step takes back an average that was copied to the weights",
        tuple(
            f"cell stage={stage} dtype=bf16 ranks=2; average how=plain; {_TRAIN}; average_in how=plain; forward data=1; backward; step"
            for stage in range(3)
        ),
    ),
    Known(
        "E",
        "stage=3 ranks=2 | read what=attribute/repr who=0 at=b",
        "a rank that reads an attribute, or prints the module, gathers alone, which pairs with the others' next gather",
        (
            f"cell stage=3 ranks=2; forward data=0; read param=blocks.0.up.weight what=attribute who=0; backward; step; {_TRAIN}",
            "cell stage=3 ranks=2; forward data=0; read param=blocks.1.gain what=attribute who=0; evaluate data=20; backward; step",
            f"cell stage=3 ranks=2; forward data=0; read param=blocks.0.up.weight what=repr who=0; backward; step; {_TRAIN}",
        ),
    ),
    Known(
        "E",
        "stage=0/1/2 ranks=2 recompute=pieces",
        "ranks that recompute in different numbers of pieces wait for each other",
        tuple(f"cell stage={stage} ranks=2 recompute=pieces; {_TRAIN}" for stage in range(3)),
    ),
    Known(
        "F",
        "ranks=2 | fail_forward who=0",
        "a forward that one rank tries again counts as another micro-step; at stage 3 ranks wait for each other",
        tuple(f"cell stage={stage} ranks=2; fail_forward layer=blocks.0 who=0 data=20; {_TRAIN}" for stage in range(4)),
    ),
    Known(
        "H",
        "ranks=2 buffers=1 | load",
        "buffers of one module come back from different ranks",
        tuple(f"cell stage={stage} ranks=2 buffers=1; {_TRAIN}; save; load which=last" for stage in (0, 3)),
    ),
    Known(
        "E",
        "ranks=2 | bad_save who=0",
        "the rank that has no folder raises, the others wait for it",
        tuple(f"cell stage={stage} ranks=2; bad_save who=0 what=none" for stage in (0, 3)),
    ),
)

# Scripts that failed once, and some that stand for what has always been exact: they run each time.
MENDED: tuple[str, ...] = (
    *(
        f"cell stage={stage} dtype=bf16 ranks=2 accumulation=2 clip=0.5; {_TRAIN}; forward data=1; backward; step; save; "
        "forward data=2; infer data=20; backward; step; forward data=3; backward; step; load which=last; "
        f"generate data=21 lengths=by_rank; {_TRAIN}"
        for stage in range(4)
    ),
    f"cell stage=3 ranks=2 recompute=pieces; {_TRAIN}; forward data=1; backward; step",
    f"cell stage=3 ranks=2 tied=1; {_TRAIN}; fail_backward layer=blocks.1 data=20; forward data=1; backward; "
    "set_moments param=head.weight; step",
    "cell stage=1 ranks=2; forward data=0; backward; write_grad param=embed.weight who=all; step; save_model",
    # States of what trains beside parameters that were frozen before their first gradient; an adapter that is gone when it would join.
    *(f"cell stage={stage} ranks=2; freeze layer=head; forward data=0; backward; step" for stage in range(4)),
    "add_adapter layer=blocks.1 how=group trains=0; forward data=0; backward; step; unfreeze layer=blocks.1; forward data=1; backward; "
    "remove_adapter layer=blocks.1; step",
    # Pieces that nearly cancel out: autograd rounds their sum to 16 bit, the package adds them in fp32.
    "cell stage=0 dtype=bf16 ranks=2 recompute=pieces; forward data=3; backward; step",
    # Gradients that came late in backwards of which none completes the step: the second ``step`` does.
    *(
        f"cell stage={stage} accumulation=2 recompute=pieces; forward data=0; backward; forward data=1; backward; step; step"
        for stage in (2, 3)
    ),
)


def known(script: Script) -> Known | None:
    """The first open fault that ``script`` would meet."""
    return next((one for one in KNOWN_OPEN if matches(one.pattern, script)), None)


def without_known(script: Script) -> Script:
    """The script without the operations that would complete an open fault; its cell is changed where that alone is one."""
    cell = script.cell
    for one in KNOWN_OPEN:
        settings, *operations = _parts(one.pattern)
        if not operations and _fits_cell(settings, cell):
            # The setting that is least common goes back to its default.
            name = settings.split()[-1].split("=")[0]
            cell = Cell(**{**vars(cell), name: getattr(Cell(), name)})
    kept: list[Operation] = []
    for operation in script.operations:
        if known(Script(cell, (*kept, operation))) is None:
            kept.append(operation)
    return Script(cell, tuple(keep_valid(Script(cell, tuple(kept)))))


def matches(pattern: str, script: Script) -> bool:
    """Whether ``script`` runs where ``pattern`` says and has its operations in their order."""
    settings, *operations = _parts(pattern)
    if not _fits_cell(settings, script.cell):
        return False
    left = list(zip(script.operations, phases(script.operations), strict=True))
    for wanted in operations:
        place = next((index for index, found in enumerate(left) if _fits(wanted, *found)), None)
        if place is None:
            return False
        left = left[place + 1 :]
    return True


def phases(operations: Sequence[Operation]) -> list[str]:
    """Where each operation stands: "b" while a loss waits for its backward, else "c" while gradients wait for their step, else "a"."""
    found, held, waits = [], False, False
    for operation in operations:
        found.append("b" if held else "c" if waits else "a")
        if operation.name in ("forward", "backward", "step"):
            held, waits = operation.name == "forward", operation.name == "backward" or operation.name == "forward" and waits
    return found


def _parts(pattern: str) -> list[str]:
    return [part.strip() for part in pattern.split("|")]


def _fits_cell(settings: str, cell: Cell) -> bool:
    return all(str(getattr(cell, name)) in values.split("/") for name, values in _pairs(settings.split()))


def _fits(wanted: str, operation: Operation, phase: str) -> bool:
    names, *arguments = wanted.split()
    given = {"at": phase, **dict(operation.args)}
    return operation.name in names.split("/") and all(str(given.get(key)) in values.split("/") for key, values in _pairs(arguments))


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in (text.split("=", 1) for text in texts)]


def mended() -> list[Script]:
    """The scripts that failed once."""
    return [parse(text) for text in MENDED]
