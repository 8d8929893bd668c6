"""Blocks of the parity matrix: one call on the ranks covers every stage, accumulation and clipping of a model and precision."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

from tests.support import ranks
from tests.support.parity import Difference, Run, Trace, check_bitwise, check_case, reference_case

STAGES = (0, 1, 2, 3)
ACCUMULATIONS = (1, 3)
CLIPS = (0.0, 0.1)  # every model's norm is above 0.5, so 0.1 clips each step


@dataclass(frozen=True)
class Cell:
    """One training run of the matrix that matched the reference, with the differences."""

    model: str
    dtype: str
    world: int
    stage: int
    accumulation: int
    clip: float
    difference: Difference

    def row(self) -> dict[str, object]:
        return asdict(self)


def check_block(name: str, dtype: str) -> list[Cell]:
    """Check all stages x accumulation x clipping of one model and precision. Call it on every rank; only rank 0 gets cells."""
    cells = []
    for accumulation, clip in itertools.product(ACCUMULATIONS, CLIPS):
        cells += check_stages(name, dtype, accumulation, clip)
    return cells


def check_stages(name: str, dtype: str, accumulation: int = 1, clip: float = 0.1, stages: tuple[int, ...] = STAGES) -> list[Cell]:
    """Check stages (3 among them) against one reference and, in fp32, stages 1, 2, 3 against each other bitwise."""
    settings = {"dtype": dtype, "accumulation": accumulation, "clip": clip, "steps": 3}
    world = ranks.world()
    expected = reference_case(name, Run(**settings), world) if ranks.rank() == 0 else None
    traces: dict[int, Trace] = {}
    cells = []
    for stage in stages:
        traces[stage], found = check_case(name, Run(stage=stage, **settings), expected=expected)
        if found is not None:
            cells.append(Cell(name, dtype, world, stage, accumulation, clip, found))
    if dtype == "fp32":
        for stage in {1, 2} & traces.keys():
            check_bitwise(traces[3], traces[stage], f"{name} accumulation {accumulation} clip {clip}: stage 3 against stage {stage}")
    return cells
