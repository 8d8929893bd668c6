"""List open faults: patterns that the fuzzer leaves out until they are fixed, each with scripts that show the fault.

Delete an entry when ``python -m tests.parity.fuzzer.report known`` reports that it is closed, and move its scripts to ``MENDED``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.parity.fuzzer.grammar import Cell, Operation, Script, keep_valid, parse


class Known(NamedTuple):
    """A fault that is open.

    Attributes:
        issue: Section of the issue that it belongs to.
        pattern: Settings of the cell and operations, in this order with any others between them, separated by "|"; alternatives of a value
            are separated by "/". "at" is the place of an operation, as in ``phases``.
        reason: What goes wrong.
        scripts: Small scripts that show it.
    """

    issue: str
    pattern: str
    reason: str
    scripts: tuple[str, ...] = ()


_TRAIN = "forward data=0; backward; step"
KNOWN_OPEN: tuple[Known, ...] = ()

_UP, _GAIN, _BIAS = "blocks.0.up.weight", "blocks.1.gain", "blocks.0.up.bias"
_IN_PLACE = ("mul", "clamp", "copy", "data_mul", "data_copy")

# Scripts that failed once, and some that stand for what has always been exact: they run each time.
MENDED: tuple[str, ...] = (
    # The gradient of a parameter that joins at the coming step is read.
    *(
        f"cell stage={stage} dtype=bf16 ranks=2 accumulation=2 frozen=embed tied=1 looks=end; unfreeze layer=head; forward data=3; "
        "backward; get_grad param=head.weight; step; forward data=4; backward; get_grad param=head.weight; step"
        for stage in (0, 3)
    ),
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
    # Buffers in their own type, and after a load those of one rank.
    f"cell stage=0 dtype=bf16 buffers=1; {_TRAIN}",
    f"cell stage=3 dtype=bf16 ranks=2 buffers=1; {_TRAIN}",
    *(f"cell stage={stage} ranks=2 buffers=1; {_TRAIN}; save; load which=last" for stage in (0, 3)),
    # What is trained.
    *(f"cell stage={stage} ranks=2; {_TRAIN}; freeze layer=head; forward data=1; backward; step" for stage in range(4)),
    *(f"cell stage={stage} ranks=2 frozen=blocks.0; unfreeze layer=blocks.0; {_TRAIN}" for stage in range(4)),
    *(f"cell stage={stage} ranks=2 client=1; add_adapter layer=blocks.0 how=group trains=1; {_TRAIN}" for stage in range(4)),
    # Values that are assigned.
    *(f"cell stage={stage} ranks=2; write param={_UP} how=assign; get_master param={_UP}" for stage in range(3)),
    f"cell stage=3 ranks=2; write param={_UP} how=assign; swa data=20",
    *(f"cell stage=3 ranks=2 recompute={how}; forward data=0; write param={_UP} how=assign; backward; step" for how in ("none", "block")),
    *(f"cell stage={stage}; forward data=0; write param={_UP} how=assign; backward; step" for stage in range(4)),
    *(f"cell stage={stage} ranks=2; forward data=0; backward; write param={_GAIN} how=assign; step" for stage in range(3)),
    # Values that are written in place, or by the module itself.
    *(
        f"cell stage={stage} dtype=bf16 ranks=2; write param={_GAIN} how={how}; {_TRAIN}"
        for stage in range(3)
        for how in ("mul", "data_copy")
    ),
    *(f"cell stage={stage} dtype=bf16 ranks=2; load_module how=module; {_TRAIN}" for stage in range(3)),
    *(
        f"cell stage={stage} dtype=bf16 ranks=2; average how=plain; {_TRAIN}; average_in how=plain; forward data=1; backward; step"
        for stage in range(3)
    ),
    *(f"cell stage=3 ranks=2 persist=1000; write param={_BIAS} how={how}; {_TRAIN}" for how in ("assign", "mul")),
    # Values that are written inside a gather.
    *(f"cell stage={stage} dtype=bf16 ranks=2; gather_write param={_GAIN} modifier=none who=all; {_TRAIN}" for stage in range(3)),
    *(f"cell stage={stage} ranks=2; gather_write param={_GAIN} modifier=none who=0; {_TRAIN}" for stage in range(3)),
    f"cell stage=3 ranks=2; forward data=0; gather_write param={_UP} modifier=none who=all; backward; step",
    *(f"cell stage=3 ranks=2 persist=1000; gather_write param={_BIAS} modifier=none who={who}; {_TRAIN}" for who in ("all", 0)),
    *(
        f"cell stage={stage} ranks=2; gather_write param={_GAIN} modifier={modifier} who={1 - modifier}; {_TRAIN}"
        for stage in range(4)
        for modifier in (0, 1)
    ),
    *(f"cell stage={stage} ranks=2 frozen=blocks.0; gather_write param={_UP} modifier=0 who=0; {_TRAIN}" for stage in range(3)),
    *(f"cell stage={stage} ranks=2 frozen=blocks.0; gather_write param={_UP} modifier=none who=1; {_TRAIN}" for stage in range(3)),
    # Values that are not there.
    *(f"cell stage=3 ranks=2; write param={_UP} how={how}; {_TRAIN}" for how in _IN_PLACE),
    f"cell stage=3 ranks=2; load_module how=module; {_TRAIN}",
    f"cell stage=3 ranks=2; average how=plain; {_TRAIN}",
    *(f"cell stage=3 ranks=2; compute param={_UP} what={what}; {_TRAIN}" for what in ("sum", "float", "clone", "compare")),
    # PyTorch's own error, before the ranks meet: a value was written in place behind a forward that another rank's write came before.
    f"cell stage=0 ranks=2; forward data=0; gather_write param={_UP} modifier=none who=1; write param={_GAIN} how=clamp; backward",
    # Values that are written in place through `data`, which torch does not count, between forward and backward.
    *(
        f"cell stage=3 dtype={dtype} ranks=2 {more}; forward data=0; write param={_UP} how=data_mul; backward; step; save_model"
        for dtype in ("fp32", "bf16")
        for more in ("keep=1", "recompute=block", "frozen=blocks.0")
    ),
    "cell stage=3 ranks=2 tied=1; forward data=0; write param=head.weight how=data_copy; backward; step",
    "cell stage=3 ranks=2 tied=1; forward data=0; gather_write param=embed.weight modifier=none who=all; backward; step",
    # The old values are in the graph, the new ones would be in the file.
    *(f"cell stage={stage} ranks=2; forward data=0; write param={_UP} how=assign; save; backward; step" for stage in range(3)),
    f"cell stage=0; forward data=0; write param={_UP} how=assign; get_master param={_UP}; backward; step",
    f"cell stage=1 ranks=2; forward data=0; write param={_UP} how=assign; gather_write param={_BIAS} modifier=0 who=0; backward; step",
    f"cell stage=0 ranks=2; forward_lost data=20; write param={_UP} how=assign; save; {_TRAIN}",
    # The same values on all ranks in the end, and a backward before that.
    *(
        f"cell stage={stage} ranks=2 {more}; forward data=0; gather_write param=head.weight modifier=none who=0; evaluate data=20; "
        "gather_write param=head.weight modifier=none who=1; backward; step"
        for stage, more in ((0, "frozen=none"), (2, "frozen=head"), (3, "persist=1000"))
    ),
    # Gradients.
    *(
        f"cell stage={stage}; forward data=0; backward; write_grad param=embed.weight who=all; get_grad param=embed.weight"
        for stage in range(3)
    ),
    *(
        f"cell stage={stage} ranks=2; {_TRAIN}; forward data=1; backward; zero_grad how=engine; write_grad param={_UP} who=all; step"
        for stage in range(3)
    ),
    *(
        f"cell stage={stage} ranks=2; freeze layer=blocks.0; {_TRAIN}; {more}; forward data=1; backward; {how} param={_UP}{who}; "
        f"step; {_TRAIN}"
        for stage, more in ((0, "set_lr lr=0.05"), (2, "unfreeze layer=blocks.0"), (3, "set_lr lr=0.05"))
        for how, who in (("set_grad", ""), ("write_grad", " who=all"))
        if stage < 3 or how == "set_grad"
    ),
    f"cell stage=1 ranks=2 frozen=blocks.0; forward data=0; backward; write_grad param={_BIAS} who=0; step",
    *(f"cell stage={stage} ranks=2; forward data=0; backward; zero_grad how=engine; set_grad param={_UP}; step" for stage in (0, 3)),
    *(
        f"cell stage={stage} ranks=2 accumulation=2 recompute=pieces; forward data=8; backward; get_grad param={_UP}; step; "
        "forward data=1; backward; step"
        for stage in range(4)
    ),
    # Written and taken back before the next step: the masters keep their digits.
    f"cell stage=1 dtype=bf16 ranks=2; {_TRAIN}; average how=gathered; forward data=1; write param=head.weight how=data_copy; backward; "
    "average_in how=gathered; step",
    # A parameter in no group: its gradient is the mean over ranks, is part of the norm, and stays until the script clears it.
    *(
        f"cell stage={stage} ranks=2; add_adapter layer=blocks.0 how=bare trains=1; forward data=0; backward; clip_grads; step; "
        "forward data=1; backward; get_grad param=blocks.0.adapter.down.weight; clip_grads; step"
        for stage in (0, 3)
    ),
    # A removed adapter's gradients, and a parameter that waits for its first one.
    f"cell stage=1 ranks=2 clip=0.5; add_adapter layer=blocks.0 how=group trains=1; {_TRAIN}; forward data=1; backward; "
    f"remove_adapter layer=blocks.0; step; {_TRAIN}",
    f"cell stage=3 ranks=2 dtype=bf16 frozen=blocks.0; unfreeze layer=blocks.0; get_master param={_UP}; {_TRAIN}; get_master param={_UP}",
    # What one rank does alone.
    "cell stage=3 ranks=2 frozen=embed; unfreeze layer=embed; forward data=0; backward; step; generate data=21 lengths=by_rank",
    f"cell stage=3 ranks=2; forward data=0; read param={_UP} what=attribute who=0; backward; step; {_TRAIN}",
    f"cell stage=3 ranks=2; forward data=0; read param={_GAIN} what=attribute who=0; evaluate data=20; backward; step",
    f"cell stage=3 ranks=2; forward data=0; read param={_UP} what=repr who=0; backward; step; {_TRAIN}",
    *(f"cell stage={stage} ranks=2 recompute=pieces; {_TRAIN}" for stage in range(3)),
    *(f"cell stage={stage} ranks=2; fail_forward layer=blocks.0 who=0 data={data}; {_TRAIN}" for stage in range(4) for data in (0, 20)),
    *(f"cell stage={stage} ranks=2; bad_save who=0 what=none" for stage in (0, 3)),
    f"cell stage=3 ranks=2; forward data=24; state_dict; gather_write param={_UP} modifier=none who=all; backward; step",
    *(
        f"cell stage=3 ranks=2 {more}; forward data=24; {first}; {second}; backward; step"
        for more, first, second in (
            ("frozen=blocks.0", "state_dict", f"gather_write param={_UP} modifier=none who=all"),
            ("frozen=blocks.0 dtype=bf16", "state_dict", f"write param={_UP} how=data_mul"),
            ("", f"write param={_UP} how=mul; forward data=0", f"write param={_UP} how=data_mul"),
            ("tied=1", "gather_write param=head.weight modifier=0 who=all", "write param=head.weight how=data_copy"),
        )
    ),
    # Values that are assigned before others are loaded.
    *(f"cell stage={stage} ranks=2; save; write param={_UP} how=assign; load which=last; {_TRAIN}" for stage in (0, 2, 3)),
    # Gradients that a script clears: of the whole model, by whatever object, or of a part; in the middle of an accumulation all are kept.
    *(
        f"cell stage={stage} ranks=2 {more}; {_TRAIN}; forward data=1; backward; zero_grad how={how}; step; forward data=2; backward; step"
        for stage, more, how in ((0, "client=1", "client"), (1, "tied=1", "head"), (2, "", "blocks.0"), (3, "dtype=bf16", "module"))
    ),
    *(
        f"cell stage={stage} dtype=bf16 accumulation=2; add_adapter layer=blocks.0 how=group trains=1; {_TRAIN}; zero_grad how=module; "
        "forward data=1; backward; zero_grad how=blocks.0; step; forward data=2; backward; step"
        for stage in (0, 3)
    ),
    *(
        f"cell stage={stage} dtype=bf16; forward data=0; backward; set_grad param={_UP}; zero_grad how=optimizer; step; {_TRAIN}"
        for stage in (0, 2)
    ),
    *(  # everything is frozen when its backward runs
        f"cell stage={stage} ranks=2 frozen=embed client=1 tied=1; {_TRAIN}; forward data=8; freeze layer=blocks.0; freeze layer=blocks.1; "
        f"backward; step; {_TRAIN}"
        for stage in (0, 1, 3)
    ),
)


def known(script: Script, faults: Sequence[Known] = KNOWN_OPEN) -> Known | None:
    """Return the first of ``faults`` that ``script`` would trigger."""
    return next((one for one in faults if matches(one.pattern, script)), None)


def without_known(script: Script, faults: Sequence[Known] = KNOWN_OPEN) -> Script:
    """Return the script without the operations that would complete one of ``faults``; if the cell alone triggers one, the cell is
    changed.
    """
    cell = script.cell
    for one in faults:
        settings, *operations = _parts(one.pattern)
        if not operations and _fits_cell(settings, cell):
            # The setting that is least common goes back to its default.
            name = settings.split()[-1].split("=")[0]
            cell = Cell(**{**vars(cell), name: getattr(Cell(), name)})
    kept: list[Operation] = []
    for operation in script.operations:
        if known(Script(cell, (*kept, operation)), faults) is None:
            kept.append(operation)
    return Script(cell, tuple(keep_valid(Script(cell, tuple(kept)))))


def matches(pattern: str, script: Script) -> bool:
    """Return whether ``script`` runs in a cell of ``pattern`` and has its operations in their order."""
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
    """Return the place of each operation: "b" while a loss has no backward yet, else "c" while gradients have no step yet, else "a"."""
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
    """Return the scripts that failed once."""
    return [parse(text) for text in MENDED]
