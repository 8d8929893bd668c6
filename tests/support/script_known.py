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
            be several, parted by "/".
        reason: What goes wrong.
        scripts: Small ones that show it.
    """

    issue: str
    pattern: str
    reason: str
    scripts: tuple[str, ...] = ()


KNOWN_OPEN: tuple[Known, ...] = ()

# Scripts that failed once: they run each time.
MENDED: tuple[str, ...] = ()


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
    left = list(script.operations)
    for wanted in operations:
        place = next((index for index, operation in enumerate(left) if _fits(wanted, operation)), None)
        if place is None:
            return False
        left = left[place + 1 :]
    return True


def _parts(pattern: str) -> list[str]:
    return [part.strip() for part in pattern.split("|")]


def _fits_cell(settings: str, cell: Cell) -> bool:
    return all(str(getattr(cell, name)) in values.split("/") for name, values in _pairs(settings.split()))


def _fits(wanted: str, operation: Operation) -> bool:
    names, *arguments = wanted.split()
    return operation.name in names.split("/") and all(str(operation.get(key)) in values.split("/") for key, values in _pairs(arguments))


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in (text.split("=", 1) for text in texts)]


def mended() -> list[Script]:
    """The scripts that failed once."""
    return [parse(text) for text in MENDED]
