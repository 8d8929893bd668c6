"""Optimizers of scripts, composed of features at random, train as in plain PyTorch, or are refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.optim import drawn_optimizers
from tests.optim.composed_options import changed, draw, full
from tests.support.rows import slow_but
from tests.trainer.drawn_runs import REFUSED

FEW, MANY = 5, 60  # optimizers of a row


@pytest.mark.parametrize("row", [0, *(pytest.param(row, marks=pytest.mark.slow) for row in (1, 2, 3))])
def test_drawn_optimizers(row: int, tmp_path: Path) -> None:
    for seed in range(100 * row + 1, 100 * row + 1 + (MANY if row else FEW)):
        run = draw(random.Random(seed))
        (tmp_path / str(seed)).mkdir()
        lines = drawn_optimizers.lines_of(run, tmp_path / str(seed))
        assert not lines or lines[0].startswith(REFUSED), f"{changed(run)}: {lines[:5]}"


# Each is a loss that the tool found.
CASES: list[dict[str, Any]] = [
    {"stage": 2, "rule": "trust", "argument": "attribute"},
    {"stage": 1, "attribute": "walked", "groups": "two"},
    {"stage": 1, "counter": "helper", "offload": "small sub-groups"},
    {"stage": 3, "attribute": "buffers by index", "offload": "small sub-groups", "write": "flat"},
    {"stage": 0, "kind": "lookahead apart"},
    {"stage": 1, "kind": "several", "rule": "rms", "counter": "first group", "resume": "same engine"},
    {"stage": 3, "groups": "rules", "resume": "same engine", "loop": "add group"},
    {"stage": 1, "loop": "freezes", "more state": "nested"},
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0], CASES[1]), ids=str)
def test_losses_that_were_found(case: dict[str, Any], tmp_path: Path) -> None:
    assert drawn_optimizers.lines_of(full(case), tmp_path) == []
